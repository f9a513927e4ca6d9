"""prime-rl's /init_broadcaster, which is refused: its broadcast needs CUDA at both ends, and pickles what it announces.

A 404 would do worse: prime-rl goes on without a broadcast then, and fails at the first update.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.errors import RequestError
from tokserve.server.serving import Serving


async def init_broadcaster(serving: Serving, request: Request) -> Response:
    """POST /init_broadcaster: refused; the error names the setting to use instead"""
    raise RequestError(
        "prime-rl's NCCL broadcast needs a CUDA device at both ends and sends pickles: set the trainer's and the "
        'orchestrator\'s weight_broadcast.type to "filesystem", which this server reads',
        code="unsupported",
    )
