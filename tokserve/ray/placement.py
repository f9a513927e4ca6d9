"""Where an engine runs that Ray starts: on a node of its cluster."""

from __future__ import annotations

import importlib.util
import os

from tokserve.base.errors import StartError
from tokserve.client.launch import EngineHandle
from tokserve.config import Config


def prepare(option: str) -> None:
    """Make this process and its children ready for Ray, which `option` has chosen.  Raises StartError."""
    if importlib.util.find_spec("ray") is None:
        raise StartError(f"{option} ray needs Ray: pip install 'tokserve[ray]'")
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # SIGTERM is no failure: the server drains


def start_engine(config: Config, name: str) -> EngineHandle:
    """Start an engine on a node.  `name`: in its log.  Raises StartError."""
    from tokserve.ray.ray_engines import RayEngine

    return RayEngine(config, name)
