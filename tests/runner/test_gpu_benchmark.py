"""benchmarks/gpu.py runs to its end on the fake device, with small shapes and fixed times."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runner.fake_device import FakeDevice
from tests.runner.test_triton import bind_references
from tokserve import ops
from tokserve.gpu.cuda import CudaBackend
from tokserve.models import dummy
from tokserve.ops.registry import OPS
from tokserve.runner import device, exactness

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_benchmark", module)
    spec.loader.exec_module(module)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, value in (
        ("SHAPES", {"8B": small}),
        ("VOCAB", 96),
        ("HEAD_DIM", 16),
        ("CONTEXT", 20),
        ("PROMPT", 5),
        ("LONG", 64),
        ("STEPS", 3),
        ("WARM", 1),
        ("median_seconds", lambda run: run() is None or 1e-3),
        ("sampling_seconds", lambda rows: (1e-3, 1e-3)),
        ("few_values", Values()),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(dummy, "values", dummy.values)
    for name in [*OPS, "torch_device"]:
        monkeypatch.setattr(ops, name, getattr(ops, name))
    monkeypatch.setattr(ops, "bind", bind_references)
    monkeypatch.setattr(device, "use", lambda kind: FakeDevice())
    monkeypatch.setattr(CudaBackend, "warm_ups", CudaBackend.warm_ups[:1])
    monkeypatch.setattr(exactness, "SIZES", (2,))
    monkeypatch.setattr(exactness, "MOST", 3)
    monkeypatch.setattr(exactness, "LONG", 301)
    monkeypatch.setattr(exactness, "ROWS", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return module


class Values:
    def __call__(self, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() * deviation

    def cache_clear(self) -> None:
        pass


@pytest.mark.slow
def test_a_row_of_the_table_is_made(program: Any) -> None:
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    row = program.measure("8B", 1, 3, program.Card("fake", 1e12, 1e15), **options)
    assert row["rows"] == 3 and row["graph_ms"] == 1.0
    assert all(row[name] > 0 for name in ("decode_tok_s", "prefill_tok_s", "roofline_share", "fast_step_ms"))
    assert row["chat_step_ms"] > 0 and row["long_prompt_tok_s"] > 0
    assert row["with_a_prompt_ms"] > 0 and row["with_a_prompt_launched_ms"] > 0


@pytest.mark.slow
def test_a_step_is_profiled(program: Any) -> None:
    kernels = program.profile("8B", 1, 3)
    assert kernels[0]["us"] >= kernels[-1]["us"] >= 0 and kernels[0]["us"] > 0
    assert all(kernel["launches"] > 0 for kernel in kernels)
