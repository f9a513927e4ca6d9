"""What NeMo-RL asks an external rollout server before it sends `required_prefix_token_ids`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve import __version__
from tokserve.server.http import body
from tokserve.server.serving import Serving


class PrefixCapability(msgspec.Struct):
    """What chat and /tokenize do with ids of earlier turns.  There is no plugin: the routes are this server's own."""

    active: bool = True
    plugin: str = "tokserve"
    plugin_version: str = __version__
    vllm_version: str = ""
    required_prefix_token_ids: bool = True
    ng_capture: bool = False
    external_staging: bool = False
    return_token_ids: bool = True
    stock_chat_routes_replaced: int = 0


async def prefix_capability(serving: Serving, request: Request) -> Response:
    """GET /v1/nemo-rl/prefix-token-capability: chat and /tokenize take required_prefix_token_ids"""
    return body.reply(request, PrefixCapability())
