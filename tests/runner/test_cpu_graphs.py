"""Captured decode steps give the bits of steps run op by op, through all that changes what a step reads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.runner.drive import Driver, make_runner
from tests.runner.test_drafts import SomeRight
from tests.runner.test_runner import jobs, outcomes
from tests.tiny_families import FAMILIES
from tests.tiny_models import tiny_config
from tokserve.models.decoder import Decoder
from tokserve.ops.registry import load_extension
from tokserve.runner.cpu_graphs import MAX_TOKENS, CpuGraphs
from tokserve.runner.host import HostBackend
from tokserve.runner.runner import Runner

load_extension("cpu")
pytestmark = needs.EXTENSION.skips()

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dtype": "bfloat16"}),
    ("qwen2", {"dtype": "float32", "quantization": "int8"}),
    ("mistral", {"dtype": "bfloat16", "quantization": "int8", "quantize_lm_head": True, "cpu_threads": 2}),
    ("llama", {"dtype": "float32", "block_size": 8}),
]


def captured(runner: Runner) -> list[int]:
    """The numbers of tokens whose steps are."""
    assert isinstance(runner.backend, HostBackend) and isinstance(runner.backend._graphs, CpuGraphs)
    return runner.backend._graphs.sizes


def run(runner: Runner, facts: Any, seed: int) -> list[Any]:
    """What comes of the requests, which join and leave by chance, so that all numbers of tokens occur."""
    driver = Driver(runner, facts, seed=seed)
    rng = random.Random(seed)
    return outcomes(driver.run(jobs(), chunk=rng.choice([7, 16, 1000]), preempt_after={3: 2, 8: 4, 11: 1}))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_decodes_op_by_op(family: str, quantization: str | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"quantization": quantization, "quantization_group_size": 32} if quantization else {}
    runner, facts = make_runner(tmp_path / "model", tiny_config(family), dtype="bfloat16", **options)
    run(runner, facts, 0)
    assert captured(runner)


@pytest.mark.some(2)
@pytest.mark.parametrize(("family", "options"), OPTIONS, ids=[family for family, _ in OPTIONS])
def test_captured_steps_have_the_bits_of_steps_run_op_by_op(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    runner, facts = make_runner(tmp_path / "model", tiny_config(family), **options)
    eager, facts_eager = make_runner(tmp_path / "model", tiny_config(family), enforce_eager=True, **options)
    assert isinstance(eager.backend, HostBackend) and eager.backend._graphs is None
    expected = run(eager, facts_eager, 0)
    for seed in (1, 2):
        assert run(runner, facts, seed) == expected
    assert len(captured(runner)) >= 3
    runner.call("release", {"tags": ["kv_cache"]})
    runner.call("restore", {"tags": ["kv_cache"]})
    assert captured(runner) == []
    assert run(runner, facts, 4) == expected


def test_what_torch_computes_is_run_op_by_op(tmp_path: Path) -> None:
    """A head of another type converts its input."""
    options = {"dtype": "bfloat16", "head_dtype": "float32"}
    runner, facts = make_runner(tmp_path / "model", tiny_config("llama"), **options)
    eager, facts_eager = make_runner(tmp_path / "model", tiny_config("llama"), enforce_eager=True, **options)
    assert run(runner, facts, 1) == run(eager, facts_eager, 1)
    assert captured(runner) == []


def test_many_rows_are_run_op_by_op(tmp_path: Path) -> None:
    runner, facts = make_runner(tmp_path / "model", tiny_config("qwen3"), max_num_seqs=MAX_TOKENS + 1)
    wide = [job.fresh() for job in jobs() for _ in range(4)][: MAX_TOKENS + 1]
    assert (
        outcomes(Driver(runner, facts, MAX_TOKENS + 1).run(wide))
        == [outcome for outcome in run(runner, facts, 1) for _ in range(4)][: MAX_TOKENS + 1]
    )
    assert max(captured(runner)) <= MAX_TOKENS


@pytest.mark.parametrize(("family", "options"), OPTIONS[:2], ids=[family for family, _ in OPTIONS[:2]])
def test_captured_steps_with_drafts_have_the_bits_of_steps_without(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    runner, facts = make_runner(tmp_path / "model", tiny_config(family), **options)
    eager, facts_eager = make_runner(tmp_path / "model", tiny_config(family), enforce_eager=True, **options)
    alone = [Driver(eager, facts_eager).run([job])[0] for job in jobs()]
    for wrong in (0.0, 0.3):
        driver = Driver(runner, facts, seed=3, drafter=SomeRight(alone, wrong, 1))
        assert outcomes(driver.run(jobs())) == outcomes(alone)
        assert driver.accepted > 40
    graphs = captured(runner)
    assert max(graphs) > len(jobs()), "steps with drafts were captured"
    assert outcomes(Driver(runner, facts, seed=1).run(jobs())) == outcomes(alone), "after drafts, without"


def swap_head(model: Decoder) -> None:
    """Foreign code that puts another weight in the place of the head's."""
    model.head.linear.load("lm_head", torch.randn(model.spec.vocab, model.spec.hidden))


def test_foreign_code_that_replaces_weights_is_seen_by_the_next_step(tmp_path: Path) -> None:
    results = []
    for enforce_eager in (False, True):
        torch.manual_seed(0)
        runner, facts = make_runner(tmp_path / "model", tiny_config("llama"), enforce_eager=enforce_eager)
        before = run(runner, facts, 1)
        runner.call("apply_model", {"function": f"{__name__}:swap_head"})
        results.append((before, run(runner, facts, 1)))
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]
