"""Models with recurrent states in the engine and the runner: drafts, snapshots, chunks and batches change no bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.engine.drafters import OneByOne
from tests.runner.drive import plan_of
from tests.runner.fake_device import FakeDevice
from tests.runner.test_with_engine import KINDS, RealEngine
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.engine.request import Request
from tokserve.protocol.kv_spec import KVLayout, KVSpec, StateLayout, StateSpec
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import NewRow
from tokserve.runner import device, kvcache
from tokserve.runner.tables.states import StateTable

FAMILIES = [
    "lfm2",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3_next", "qwen3_5_text", "bamba", "nemotron_h", "mamba2", "falcon_h1")
    ),
]
PROMPT = [(7 * i * i + 3 * i) % 320 for i in range(90)]


class Guesses(OneByOne):
    """Drafts of which some are right: the request's own outputs in a run without drafts, and noise."""

    def __init__(self, known: dict[str, list[int]], seed: int) -> None:
        self._known, self._rng = known, random.Random(seed)

    def propose_one(self, request: Request, limit: int) -> list[int]:
        if request.num_in_flight:
            return []
        following = self._known[request.request_id][request.num_output :]
        drafts = following[: self._rng.randrange(7)]
        drafts += [self._rng.randrange(320) for _ in range(self._rng.randrange(3))]
        return drafts[:limit]


def engine_of(directory: Path, family: str, drafter: Guesses | None = None, **options: Any) -> RealEngine:
    overrides = tiny_config(family) | {"num_hidden_layers": 2}
    if "layer_types" in overrides:
        overrides["layer_types"] = overrides["layer_types"][:2]
    if "layers_block_type" in overrides:
        overrides |= {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3}
    return RealEngine(directory, drafter, hf_overrides=overrides, **options)


def run(engine: RealEngine, *, turns: int = 1) -> dict[str, Any]:
    """What comes of requests of all kinds whose prompts share beginnings, some of them after others have ended."""
    for turn in range(turns):
        for i, options in enumerate(KINDS):
            prompt = PROMPT[: [70, 33, 48, 64][i % 4]] + [i % 2] * (i % 3)
            fields = {"max_tokens": 12 + i} | options
            engine.add(f"t{turn}r{i}", prompt, seed=i, ignore_eos=True, **fields)
            if i % 3 == 2:
                engine.steps(5)
        engine.run(5000)
    engine.core.cache.check_idle()
    engine.core.close()
    return {
        rid: (received.tokens, received.logprobs, received.prompt_logprobs, received.finish and received.finish.detail)
        for rid, received in engine.received.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_snapshots_drafts_depth_and_preemption_change_no_bit(family: str, tmp_path: Path) -> None:
    alone = engine_of(tmp_path / "alone", family, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True)
    known = run(alone, turns=2)
    tokens = {rid: result[0] for rid, result in known.items()}
    variants: list[dict[str, Any]] = [
        {"depth": 1, "state_snapshot_interval": 16},
        {"depth": 2, "state_snapshot_interval": 32},
        {"depth": 1, "kv_cache_memory_bytes": 20 * 16 * 2 * 2 * 16 * 2, "state_snapshot_interval": 16},
        {"depth": 2, "state_snapshot_interval": 16, "max_num_batched_tokens": 11, "max_chunk": 7, "cpu_threads": 2},
    ]
    hits = drafted = 0
    for number, options in enumerate(variants):
        engine = engine_of(tmp_path / f"v{number}", family, Guesses(tokens, number), **options)
        assert run(engine, turns=2) == known
        hits += engine.stats.prefix_hits
        drafted += sum(engine.stats.rooms["accepted_by_position"])
    assert hits > 1000 and drafted > 100


def test_decoding_has_the_bits_of_scoring(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "one", "qwen3_5_text", state_snapshot_interval=16)
    engine.add("decoded", PROMPT[:40], temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=0)
    engine.run(500)
    tokens = engine.received["decoded"].tokens
    for attempt in range(2):  # the second finds the prefix in the cache, up to the first position that is scored
        engine.add(f"scored{attempt}", PROMPT[:40] + tokens, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=40)
        engine.run(500)
        decoded, scored = engine.received["decoded"].logprobs, engine.received[f"scored{attempt}"].prompt_logprobs
        assert decoded is not None and scored is not None
        assert np.array_equal(Logprobs.of(scored).token_logprobs, Logprobs.of(decoded).token_logprobs)
        assert engine.received[f"scored{attempt}"].cached == 32


@pytest.mark.parametrize("level", [0, 1])
def test_requests_outlive_sleep(level: int, tmp_path: Path) -> None:
    """Level 1 gives the states' memory back, so requests begin again."""
    results = []
    for sleeps in (False, True):
        engine = engine_of(tmp_path / f"{sleeps}", "lfm2", state_snapshot_interval=16)
        for i in range(3):
            engine.add(f"r{i}", PROMPT[: 30 + i], seed=i, max_tokens=30, ignore_eos=True, logprobs=0)
        engine.steps(12)
        if sleeps:
            engine.call("sleep", level=level, mode="keep", call_id=5)
            engine.run(100)
            assert engine.replies[-1].error is None
            engine.call("wake_up", call_id=6)
        engine.run(500)
        assert all(engine.received[f"r{i}"].finish for i in range(3))
        results.append([(engine.tokens(f"r{i}"), engine.received[f"r{i}"].logprobs) for i in range(3)])
        engine.core.close()
    assert results[0] == results[1]


def test_too_many_states_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"recurrent states of max_num_seqs 4096 .* lower --max-num-seqs to at most"):
        engine_of(tmp_path / "one", "qwen3_next", max_num_seqs=4096, gpu_memory_utilization=1e-3)


def test_snapshots_are_taken_only_of_positions_that_the_state_passes() -> None:
    states = StateLayout(slots=2, snapshots=3, interval=16, spare_inputs=1)
    specs = (StateSpec(3, 8, "float32"),)
    table = StateTable(KVLayout(specs, 4, 16, states), states, kvcache.allocate(KVLayout(specs, 4, 16, states)))
    for slot in (0, 1):
        table.assign(NewRow(slot, "", np.zeros(40, np.int32), 40, SamplingParams(), 0, (), num_state=16 * slot))
    plan = plan_of([(1, 16, 17, 1), (0, 0, 16, 0)])
    plan = replace(plan, saves=[(1, 16, 0), (1, 32, 1), (1, 48, 2), (0, 16, 2)])
    table.begin(plan)
    assert table.saved == [1, 2]
    assert (table.step.start.tolist(), table.step.end.tolist()) == ([16, 0], [33, 16])
    assert table.step.saves.tolist() == [[0, 32, 2 + 1], [1, 16, 2 + 2]]


def test_a_device_gets_a_spare_block_and_no_spare_state() -> None:
    specs = (StateSpec(3, 8, "float32"), KVSpec(1, 16, "float32"), StateSpec(3, 8, "bfloat16", memory=(2, 4, 4)))
    layout = KVLayout(specs, 4, 16, StateLayout(slots=5, snapshots=2, interval=16, spare_inputs=1))
    kv = kvcache.allocate_on(torch.device("cpu"), layout, spare=1)
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in kv]
    assert shapes == [[(7, 4, 8)], [(5, 1, 16, 16)] * 2, [(7, 4, 8), (7, 2, 4, 4)]]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_with_memory_of_its_own_changes_no_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = engine_of(tmp_path / "alone", family, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True)
    known = run(alone)
    tokens = {rid: result[0] for rid, result in known.items()}
    fake = FakeDevice()
    monkeypatch.setattr(device, "use", lambda kind: fake)
    for depth in (1, 2):
        options: dict[str, Any] = {"depth": depth, "state_snapshot_interval": 16, "max_num_batched_tokens": 40 * depth}
        engine = engine_of(tmp_path / f"depth{depth}", family, Guesses(tokens, depth), **options)
        assert run(engine) == known
        assert engine.stats.prefix_hits > 100 and fake.copies > 0


def long_outputs(engine: RealEngine, fake: FakeDevice | None = None) -> tuple[dict[str, Any], int, int]:
    """What comes of three requests of many tokens, and how many steps were replayed and how many copied over."""
    before = (0, 0) if fake is None else (fake.replayed, fake.copies)
    for i in range(3):
        engine.add(f"r{i}", PROMPT[: 20 + 5 * i], seed=i, ignore_eos=True, max_tokens=60 + i, logprobs=1)
    engine.run(5000)
    engine.core.close()
    outcome = {rid: (received.tokens, received.logprobs) for rid, received in engine.received.items()}
    after = (0, 0) if fake is None else (fake.replayed, fake.copies)
    return outcome, after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_move_states_on(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, *_ = long_outputs(engine_of(tmp_path / "alone", family, max_num_seqs=1, enforce_eager=True))
    fake = FakeDevice()
    monkeypatch.setattr(device, "use", lambda kind: fake)
    for interval, most_copies in ((0, 30), (16, 60)):  # tokens between snapshots; 0: none are taken
        for depth in (1, 2):
            options = {"depth": depth, "state_snapshot_interval": interval}
            engine = engine_of(tmp_path / f"{interval}-{depth}", family, **options)
            outcome, replayed, copies = long_outputs(engine, fake)
            assert outcome == known
            assert replayed > 55 and copies < most_copies


@pytest.mark.parametrize("method", ["self", "draft_model"])
def test_draft_models_are_refused(method: str, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", tiny_config("qwen3"))
    chosen = {"method": method} | ({"model": str(draft)} if method == "draft_model" else {})
    with pytest.raises(StartError, match="draft model is not supported with recurrent states"):
        engine_of(tmp_path / "one", "lfm2", spec_method=None, speculative_config=chosen)
