"""Steps that a start has not captured run in larger graphs, and are captured while the engine is idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Engine
from tests.runner.drive import Driver, Job
from tests.runner.test_cuda import Loaded, cuda, make
from tests.runner.test_runner import outcomes, prompt
from tests.tiny_models import tiny_config
from tokserve.gpu.cuda_graphs import FIRST, decode_sizes, prompt_sizes
from tokserve.protocol.params import SamplingParams

SIZES = decode_sizes(40), prompt_sizes(256, 1e4)


def load(path: Path) -> Loaded:
    hf = tiny_config("qwen3", max_position_embeddings=512)
    return make(path, hf, max_num_seqs=40, max_num_batched_tokens=256, max_model_len=400)


def requests() -> list[Job]:
    return [Job(prompt(3 + 2 * i, i), SamplingParams(max_tokens=4, temperature=0.5, logprobs=1), i) for i in range(35)]


def sizes(loaded: Loaded) -> tuple[list[int], list[int]]:
    backend = cuda(loaded[0])
    assert backend.decode_graphs is not None and backend.prompt_graphs is not None
    return backend.decode_graphs.sizes, backend.prompt_graphs.sizes


def test_sizes_that_are_captured_later_change_no_bit(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    runner, facts, fake = loaded
    first = tuple([size for size in kind if size in FIRST or size == kind[-1]] for kind in SIZES)
    assert sizes(loaded) == first != SIZES
    before = outcomes(Driver(runner, facts, seed=1, max_num_seqs=40).run(requests()))
    replayed, missing = fake.replayed, [runner.call("capture_next", {}) for _ in range(20)]
    left = sum(len(kind) for kind in SIZES) - sum(len(kind) for kind in first)
    assert missing == [*reversed(range(left)), *[0] * (20 - left)]
    assert sizes(loaded) == SIZES
    assert outcomes(Driver(runner, facts, seed=1, max_num_seqs=40).run(requests())) == before
    assert fake.replayed == 2 * replayed


def test_a_model_that_wakes_has_all_sizes_at_once(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    runner = loaded[0]
    runner.call("release", {"tags": ["kv_cache"]})
    assert runner.call("capture_next", {}) == 0
    runner.call("restore", {"tags": ["kv_cache"]})
    assert sizes(loaded) == SIZES and runner.call("capture_next", {}) == 0


@pytest.mark.parametrize("is_here", [True, False])
def test_without_memory_on_a_rank_none_captures_more(
    is_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tmp_path)
    runner, facts, fake = loaded
    before = tuple(map(list, sizes(loaded)))

    def fails(run: Any, pool: object) -> Any:
        raise torch.OutOfMemoryError("none is left")

    if is_here:
        monkeypatch.setattr(fake, "capture", fails)
    else:
        monkeypatch.setattr(cuda(runner), "_agree", lambda number: 0)
    assert runner.call("capture_next", {}) == 0
    assert sizes(loaded) == before
    assert len(Driver(runner, facts).run(requests()[:20])) == 20


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_captures_one_size_a_turn_while_it_has_no_request(depth: int) -> None:
    engine = Engine(depth=depth, device="cuda")
    missing, busy = [5], []

    def call(method: str, args: dict[str, Any]) -> int:
        assert (method, args) == ("capture_next", {})
        busy.append(bool(list(engine.core.intake.live)))
        missing[0] -= 1
        return missing[0]

    engine.executor.call = call  # type: ignore[method-assign]
    assert engine.core.seconds_to_deadline() == 0.0
    assert not engine.core.step() and missing == [4]
    engine.add("r", [3, 4, 5], max_tokens=9, ignore_eos=True)
    engine.run()
    engine.check_complete("r")
    for _ in range(8):
        engine.core.step()
    assert missing == [0] and not any(busy)
    assert engine.core.seconds_to_deadline() is None


def test_a_paused_engine_captures_nothing() -> None:
    engine = Engine(device="cuda")
    engine.executor.call = lambda method, args: pytest.fail(method)  # type: ignore[method-assign]
    engine.call("pause", mode="wait")
    engine.core.step()
    assert engine.core.seconds_to_deadline() is None
