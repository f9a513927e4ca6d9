"""Where an engine runs: as a child process of this one, or on a node of a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from tokserve.base.errors import StartError
from tokserve.client.launch import EngineHandle, EngineProcess
from tokserve.config import Config


def start_engine(config: Config, name: str, environment: Mapping[str, str] | None = None) -> EngineHandle:
    """Start an engine at the place that `config` names.  `name`: in its log.  `environment`: of a child process.
    Raises StartError, OSError."""
    if (option := config.parallel.on_ray) is not None:
        if importlib.util.find_spec("ray") is None:
            raise StartError(f"{option} ray needs Ray: pip install 'tokserve[ray]'")
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # SIGTERM is no failure: the server drains
    if config.parallel.data_parallel_backend != "ray":
        return EngineProcess(config, name=name, environment=environment)
    from tokserve.ray.ray_engines import RayEngine

    return RayEngine(config, name)
