"""Ranks that exchange through memory they have mapped of each other: processes, with the driver simulated
(tests/fake_libcuda.c) and the kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.fake_cuda import build
from tests.tiny_models import tiny_config, write_checkpoint

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("simulated_rank.py")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a GPU shows it")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(build(tmp_path_factory.mktemp("driver")).parent)}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), tiny_config("qwen3"), seed=1)


def results(size: int, task: dict[str, Any], driver: dict[str, str]) -> list[Any]:
    """What each of so many ranks prints."""
    tcp: Any = distributed
    store = tcp.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"} | driver
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(store.port), str(rank), json.dumps(task)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(output) for output in outputs]


@pytest.mark.slow
def test_sums_are_in_rank_order_and_nothing_is_mixed_up(driver: dict[str, str]) -> None:
    size = 3
    assert results(size, {"what": "exchanges", "size": size}, driver) == [{"wrong": []}] * size


def tokens(
    driver: dict[str, str], model: Path, tensor: int, stages: int, *, simulated: bool, **options: Any
) -> dict[str, Any]:
    """What the sampling rank says of its steps, and all say of the tokens."""
    task = {
        "what": "steps",
        "model": str(model),
        "tensor": tensor,
        "stages": stages,
        "simulated": simulated,
        "options": options,
    }
    every = results(tensor * stages, task, driver)
    assert all(one["outputs"] == every[0]["outputs"] for one in every)
    first: dict[str, Any] = every[(stages - 1) * tensor]
    return first


@pytest.mark.slow
def test_recorded_steps_of_ranks_have_the_bits_of_steps_on_hosts(driver: dict[str, str], qwen3: Path) -> None:
    on_hosts = tokens(driver, qwen3, 2, 1, simulated=False)
    recorded = tokens(driver, qwen3, 2, 1, simulated=True, depth=2)
    assert recorded["outputs"] == on_hosts["outputs"]
    assert recorded["recorded"] and recorded["replayed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_recorded_stages_have_the_bits_of_one(driver: dict[str, str], qwen3: Path, tensor: int) -> None:
    on_hosts = tokens(driver, qwen3, tensor, 1, simulated=False)
    staged = tokens(driver, qwen3, tensor, 2, simulated=True, depth=3 - tensor)
    assert staged["outputs"] == on_hosts["outputs"]
    assert staged["recorded"] and staged["replayed"] > 0
