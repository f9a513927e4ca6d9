"""For trainers: a client of the server's routes, the trainer's end of weight transfers, and checksums of weights.

The same modules are the package `tokserve_client` of the distribution tokserve-client, so they import each other
relatively and nothing else of tokserve (docs/decisions/024).  Public names are imported on first use: the client needs
no torch, and the server, which uses the transfers, no HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .adapter_push import AdapterPushResult
    from .blocking import Client
    from .client import AsyncClient, TokserveClient
    from .cuda_ipc import CudaIpc
    from .delta_directory import WeightDirectory
    from .digests import checksum, checksums
    from .errors import (
        ClientClosed,
        PromptsFailed,
        ServerError,
        TorchMissing,
        TransferError,
        WeightsConflict,
        WeightsError,
    )
    from .push import PushResult
    from .rollouts import CandidateScores, Rollout, RolloutDelta, TokenColumns, sticky_seeds
    from .sessions import SessionSequence, SessionTree, SessionTurn

_HOMES = {
    "adapter_push": ("AdapterPushResult",),
    "blocking": ("Client",),
    "client": ("AsyncClient", "TokserveClient"),
    "cuda_ipc": ("CudaIpc",),
    "delta_directory": ("WeightDirectory",),
    "digests": ("checksum", "checksums"),
    "errors": (
        "ClientClosed",
        "PromptsFailed",
        "ServerError",
        "TorchMissing",
        "TransferError",
        "WeightsConflict",
        "WeightsError",
    ),
    "push": ("PushResult",),
    "rollouts": ("CandidateScores", "Rollout", "RolloutDelta", "TokenColumns", "sticky_seeds"),
    "sessions": ("SessionSequence", "SessionTree", "SessionTurn"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [
    "AdapterPushResult",
    "AsyncClient",
    "CandidateScores",
    "Client",
    "ClientClosed",
    "CudaIpc",
    "PromptsFailed",
    "PushResult",
    "Rollout",
    "RolloutDelta",
    "ServerError",
    "SessionSequence",
    "SessionTree",
    "SessionTurn",
    "TokenColumns",
    "TokserveClient",
    "TorchMissing",
    "TransferError",
    "WeightDirectory",
    "WeightsConflict",
    "WeightsError",
    "__version__",
    "checksum",
    "checksums",
    "sticky_seeds",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
