"""A whole model has the same bits on every instruction set of one arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.adapters import write_adapter
from tests.models.test_float8 import QWEN, quantize
from tests.runner import test_lora
from tests.runner.drive import Driver, make_runner
from tests.runner.test_runner import jobs, outcomes
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.checkpoint import DEMO_DIR, hf_config

if not needs.EXTENSION.is_there():
    pytest.skip(needs.EXTENSION.reason, allow_module_level=True)
from tokserve import _C

FMA = [name for name in _C.instruction_sets() if _C.arithmetic(name) == "fma"]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dtype": "bfloat16"}),
    ("mistral", {"dtype": "bfloat16", "quantization": "int8", "quantize_lm_head": True}),
    ("llama", {"dtype": "float16", "block_size": 8}),
    ("qwen2", {"dtype": "float32", "head_dtype": "float32"}),
]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = _C.instruction_set()
    yield
    _C.select(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param(*pair, marks=pytest.mark.slow if i > 1 else (), id=pair[0]) for i, pair in enumerate(OPTIONS)],
)
def test_a_model_has_the_same_bits_on_all_instruction_sets_of_fma(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Seeds, all kinds of logprobs, prompt logprobs, filters, penalties; chunks, preemption and recorded steps too."""
    results = []
    for name in FMA:
        runner, facts = make_runner(tmp_path / "model", tiny_config(family), cpu_kernels=name, **options)
        assert facts.facts["kernels"] == name and facts.facts["arithmetic"] == "fma"
        results.append(outcomes(Driver(runner, facts, seed=1).run(jobs(), chunk=16, preempt_after={3: 2})))
    assert all(result == results[0] for result in results[1:])


@pytest.mark.slow
def test_the_demo_model_has_the_same_bits_on_all_instruction_sets_of_fma(tmp_path: Path) -> None:
    hf, results = hf_config(DEMO_DIR), []
    for name in FMA:
        runner, facts = make_runner(
            tmp_path / "unused",
            hf,
            model=str(DEMO_DIR),
            load_format="auto",
            dtype="bfloat16",
            cpu_kernels=name,
        )
        requests = jobs()
        for request in requests:
            request.prompt = [token % hf["vocab_size"] for token in request.prompt]
        results.append(outcomes(Driver(runner, facts, seed=1).run(requests)))
    assert all(result == results[0] for result in results[1:])


def test_adapters_have_the_same_bits_on_all_instruction_sets_of_fma(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", tiny_config("qwen3"), seed=3)
    adapters = [write_adapter(tmp_path / str(rank), base, rank=rank, seed=rank) for rank in (4, 16)]
    results = []
    for name in FMA:
        runner, facts = test_lora.loaded(base, [*adapters, adapters[0]], dtype="bfloat16", cpu_kernels=name)
        results.append(outcomes(Driver(runner, facts, seed=1).run(test_lora.jobs())))
    assert all(result == results[0] for result in results[1:])


def test_the_arithmetic_is_a_fact_of_the_start(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    _, facts = make_runner(tmp_path / "model", config, dtype="bfloat16", cpu_arithmetic="fma")
    assert facts.facts["arithmetic"] == "fma" and facts.facts["kernels"] == FMA[0] == _C.instruction_set()
    _, facts = make_runner(tmp_path / "model", config, ops={"*": "torch"})
    assert facts.facts["arithmetic"] is None and facts.facts["kernels"] == "none"
    with pytest.raises(StartError, match="cpu_arithmetic and cpu_kernels need the compiled kernels"):
        make_runner(tmp_path / "model", config, ops={"*": "torch"}, cpu_arithmetic="fma")
    with pytest.raises(StartError, match="option cpu_kernels: this machine does not run 'z80'"):
        make_runner(tmp_path / "model", config, cpu_kernels="z80")


def test_the_log_recommends_rounded_activations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, integers = tiny_config("qwen3"), {"quantization": "int4", "quantization_group_size": 32}
    for options, advised in (
        (integers, True),
        (integers | {"quantization_activations": "int8"}, False),
        ({"quantization": "int8"}, False),
        ({}, False),
    ):
        caplog.clear()
        with caplog.at_level("INFO", "tokserve"):
            make_runner(tmp_path / "model", config, cpu_arithmetic="fma", **options)
        assert ("--quantization-activations int8 is faster" in caplog.text) == advised


def test_the_log_says_what_float8_weights_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3", hidden_size=96))
    quantize(tmp_path, QWEN, "block", "_scale_inv", torch.float32)
    for quantization in (None, "none"):
        caplog.clear()
        with caplog.at_level("INFO", "tokserve"):
            make_runner(tmp_path, hf_config(tmp_path), load_format="auto", quantization=quantization, dtype="bfloat16")
        assert ("--quantization none has the same bits" in caplog.text) == (quantization is None)
