"""For trainers: a client of the server's routes, its end of weight transfers, and checksums of weights.

The server uses `broadcast` too, so the client (and its HTTP library) is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokserve.rl.digests import checksum, checksums

if TYPE_CHECKING:
    from tokserve.rl.client import Rollout, TokserveClient, sticky_seeds
    from tokserve.rl.push import PushResult
    from tokserve.rl.pusher import ServerError

__all__ = ["PushResult", "Rollout", "ServerError", "TokserveClient", "checksum", "checksums", "sticky_seeds"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tokserve.rl' has no attribute {name!r}")
    return getattr(importlib.import_module("tokserve.rl.client"), name)
