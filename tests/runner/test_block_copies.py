"""A prompt's end that is copied from another request's block, on the real runner: no bit of a result depends on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.runner.drive import plan_of
from tests.runner.fake_device import FakeDevice
from tests.runner.test_runner import prompt
from tests.runner.test_with_engine import RealEngine
from tokserve.features.groups.block_copies import BlockCopies
from tokserve.features.groups.prompt_ends import PromptEnds
from tokserve.models.decoder import Decoder
from tokserve.protocol.messages import StepOutput
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import NewRow
from tokserve.runner import device
from tokserve.runner.backend import Backend

ROW = NewRow(0, "", np.zeros(6, np.int32), 6, SamplingParams(), 0, ())


def test_blocks_of_all_dtypes_are_copied_before_a_step() -> None:
    """Two requests may get the same block; float8 pages are of GPUs alone, where a test may not run."""
    pages = [(torch.randn(5, 2, 3).to(dtype),) for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32)]
    before = [content.float() for (content,) in pages]
    backend = SimpleNamespace(kv=pages, routed=None, device=SimpleNamespace(torch_device=torch.device("cpu")))
    new = [replace(ROW, slot=slot, copied_block=copied) for slot, copied in enumerate([(1, 3), None, (1, 0)])]
    BlockCopies(cast(Backend, backend)).before(plan_of([(0, 5, 1, 1)], new=new), cast(Decoder, None))
    for (content,), old in zip(pages, before, strict=True):
        assert torch.equal(content.float(), old[[1, 1, 2, 1, 4]])


FAMILIES = ("qwen3", "deepseek_v3", "gemma3_text", "gpt_oss")  # plain, latent, with windows, with sinks


def results(engine: RealEngine) -> dict[str, Any]:
    """Tokens, logprobs and experts of two groups of one prompt each, and of a request of which both prompts begin."""
    groups = {"a": prompt(45, 1), "b": [*prompt(45, 1)[:32], *prompt(14, 2)], "c": prompt(33, 1)}
    fields = {"max_tokens": 9, "ignore_eos": True, "logprobs": 1}
    for name, ids in groups.items():
        for i in range(4):
            engine.add(f"{name}{i}", ids, seed=i, **fields)
    engine.run(5000)
    engine.core.close()
    engine.real.close()
    experts = {
        rid: fields.values["routed_experts"]
        for _, message in engine.messages
        if isinstance(message, StepOutput)
        for rid, _, _, fields in message.rows()
        if fields is not None and "routed_experts" in fields.values
    }
    assert engine.real is not None and bool(experts) == engine.config.model.enable_return_routed_experts
    return {rid: (received.tokens, received.logprobs, experts.get(rid)) for rid, received in engine.received.items()}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("backend", "family", "options"),
    [
        *((backend, family, {}) for backend in ("host", "cuda") for family in FAMILIES),
        ("host", "qwen3_moe", {"enable_return_routed_experts": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_members_of_a_group_are_what_they_are_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, family: str, options: dict[str, Any]
) -> None:
    if backend == "cuda":
        monkeypatch.setattr(device, "use", lambda kind: FakeDevice())
    expected = results(RealEngine(tmp_path / "model", family=family, enable_prefix_caching=False, **options))
    engine = RealEngine(tmp_path / "model", family=family, **options)
    assert results(engine) == expected
    assert engine.feature(PromptEnds).copied >= 4


def test_keys_that_a_group_shares_are_counted(tmp_path: Path) -> None:
    """Four requests behind 96 tokens, of which attention reads the first 64 once for all of them, in three layers."""
    stats = []
    for members in (1, 4):
        engine = RealEngine(tmp_path / "model", cpu_threads=1)
        engine.add("first", prompt(100, 1), max_tokens=1, ignore_eos=True)
        engine.run()
        before = engine.stats.rooms
        assert before["attention_keys"] > 0 and before["shared_attention_keys"] == 0
        for i in range(members):
            engine.add(f"r{i}", [*prompt(100, 1)[:96], i], max_tokens=5, ignore_eos=True)
        engine.run()
        after = engine.stats.rooms
        engine.core.close()
        engine.real.close()
        stats.append((after["attention_keys"] - before["attention_keys"], after["shared_attention_keys"]))
    (alone, none), (together, shared) = stats
    assert (none, together) == (0, 4 * alone)
    assert shared == 3 * 64 * 3 * 5
