"""The engine's process around a scripted executor: started by tests as `python -m tests.engine.scripted_process`."""

from __future__ import annotations

import tokserve.base.one_blas_thread  # noqa: F401
from tests.engine.scripted import ScriptedExecutor
from tokserve.engine import process

if __name__ == "__main__":
    process.main(ScriptedExecutor)
