"""numpy in tokserve's processes: one BLAS thread, and no variable left in the environment of torch's processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tokserve.base.one_blas_thread import VARIABLE

CODE = f"""
import os, tokserve.MODULE, numpy
print(len(os.listdir("/proc/self/task")), os.environ.get("{VARIABLE}"))
"""
CPUS = os.cpu_count() or 1


def imported(code: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "module", ["cli.serve", "features.fleet.api_server", "engine.process", "features.ranks.worker"]
)
def test_the_main_module_of_a_process_starts_no_threads(module: str) -> None:
    assert imported(CODE.replace("MODULE", module)) == ["1", "None"]


def test_variables_of_the_user_are_kept() -> None:
    assert imported(CODE.replace("MODULE", "engine.process"), **{VARIABLE: "2"}) == [str(min(2, CPUS)), "2"]


@pytest.mark.slow
def test_a_library_leaves_numpy_alone() -> None:
    """`from tokserve import LLM` may be the first import in a program that multiplies with numpy."""
    threads, variable = imported(CODE.replace("MODULE", "features.offline.llm, tokserve.client.async_llm"))
    assert int(threads) > 1 or CPUS == 1
    assert variable == "None"
