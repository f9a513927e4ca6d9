"""Drafts that the device draws: no bit of an output depends on them, and their KV is reused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runner.drive import Driver, Job, feature, make_runner, plan_of
from tests.runner.fake_device import FakeDevice
from tests.runner.test_runner import jobs, outcomes, prompt
from tests.tiny_models import tiny_config
from tokserve.base.errors import StartError
from tokserve.features.speculation.draft_model import DraftModel
from tokserve.features.speculation.draft_progress import DraftProgress
from tokserve.features.weights.runner_feature import RunnerUpdates
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DRAWN, DeviceFacts, NewRow, StepPlan
from tokserve.runner import device
from tokserve.runner.runner import Runner

VOCAB = 320
Loaded = tuple[Runner, DeviceFacts]
METHODS: dict[str, dict[str, Any]] = {
    "self-int8": {"spec_method": "self-int8"},
    "self-int4": {"speculative_config": {"method": "self", "quantization": "int4"}},
    "same": {"spec_model": "same"},
    "other": {"spec_model": "other"},
    "int8 model": {"spec_model": "same"},
}
METHODS["int8 model"]["speculative_config"] = {"quantization": "int8", "num_speculative_tokens": 4}


def smaller(layers: int = 1, vocab: int = VOCAB) -> dict[str, Any]:
    """Another model's config.json."""
    return tiny_config("llama") | {"num_hidden_layers": layers, "vocab_size": vocab}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    """Runners by method, backend and dtype, each made once; method None: without drafts."""
    cache: dict[tuple[str | None, str, str], Loaded] = {}
    root = tmp_path_factory.mktemp("models")
    for name, hf in (("same", tiny_config("qwen3")), ("other", smaller())):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(hf))

    def get(method: str | None, backend: str = "host", dtype: str = "float32") -> Loaded:
        key = (method, backend, dtype)
        if key not in cache:
            options = dict(METHODS[method]) if method else {}
            if "spec_model" in options:
                options["spec_model"] = str(root / options["spec_model"])
            with pytest.MonkeyPatch.context() as patch:
                if backend == "cuda":
                    patch.setattr(device, "use", lambda kind: FakeDevice())
                cache[key] = make_runner(root / "served", tiny_config("qwen3"), dtype=dtype, depth=2, **options)
        return cache[key]

    return get


def some_drawn(seed: int) -> Callable[[Job], list[int]]:
    """Up to five drafts for a request that generates."""
    rng = random.Random(seed)
    return lambda job: [DRAWN] * rng.randrange(6) if job.output else []


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("method", "backend", "dtype"),
    [
        ("self-int8", "host", "float32"),
        ("same", "host", "bfloat16"),
        ("other", "cuda", "float32"),
        pytest.param("self-int4", "host", "bfloat16", marks=pytest.mark.slow),
        pytest.param("other", "host", "float32", marks=pytest.mark.slow),
        pytest.param("int8 model", "host", "float32", marks=pytest.mark.slow),
        pytest.param("same", "cuda", "float32", marks=pytest.mark.slow),
    ],
)
def test_drawn_drafts_change_no_bit(loaded: Callable[..., Loaded], method: str, backend: str, dtype: str) -> None:
    alone = [Driver(*loaded(None, backend, dtype)).run([job])[0] for job in jobs()]
    runner, facts = loaded(method, backend, dtype)
    preempt = {i: 1 + i % 7 for i in range(0, 17, 2)}
    for chunk, options in ((1 << 30, {}), (7, {"preempt_after": preempt})):
        driver = Driver(runner, facts, seed=chunk % 5, drafter=some_drawn(chunk))
        assert outcomes(driver.run(jobs(), chunk=chunk, **options)) == outcomes(alone)  # type: ignore[arg-type]
        if method == "same":
            assert driver.accepted > 80 and driver.rejected == 0, "the same model draws what is sampled"
        elif method != "other":
            # Of random weights, whose logits are close together: by chance alone one draft of 300 is accepted.
            assert driver.accepted > driver.rejected // 4 > 0
        else:
            assert driver.rejected > 60


def drawn_step(runner: Runner, slot: int, computed: int, count: int, **more: Any) -> tuple[list[int], Any]:
    """A step of a slot with so many drawn drafts: its tokens, and what the draft model did."""
    plan = plan_of([(slot, computed, count + 1, count + 1)], 0, [[DRAWN] * count], **more)
    result = runner.execute(plan)
    return result.token_ids.tolist(), result.draft_passes


def enter(runner: Runner, slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> int:
    """Compute all of a slot's prompt from `computed` on; the first token."""
    row = NewRow(slot, "", np.array(tokens, np.int32), len(tokens), SamplingParams(), 7, ())
    count = len(tokens) - computed
    plan = plan_of([(slot, computed, count, 1)], new=[row], blocks=[(slot, 0, blocks)])
    return int(runner.execute(plan).token_ids[0])


def free(runner: Runner, *slots: int) -> None:
    runner.execute(plan_of([], freed=list(slots)))


def test_a_prefix_that_was_computed_for_drafts_is_found_again(loaded: Callable[..., Loaded]) -> None:
    runner, _ = loaded("same")
    tokens = prompt(50, 5)
    enter(runner, 0, tokens, [0, 1, 2, 3, 4, 5])
    first, drawing = drawn_step(runner, 0, 50, 3)
    assert len(first) == 4 and drawing.num_tokens == 51 + 2 and drawing.num_passes == 3 and drawing.seconds > 0
    second, drawing = drawn_step(runner, 0, 54, 3)  # three blocks of 16 are full; the last draft and one token are new
    assert len(second) == 4 and drawing.num_tokens == 2 + 2
    free(runner, 0)
    other = [*tokens[:40], *prompt(9, 6)]
    enter(runner, 1, other, [0, 1, 8, 9, 10, 11], computed=32)  # shares two blocks
    ids, drawing = drawn_step(runner, 1, 49, 2)
    assert len(ids) == 3 and drawing.num_tokens == 50 - 32 + 1
    free(runner, 1)
    enter(runner, 2, prompt(50, 7), [0, 1, 2, 3, 12, 13])  # the blocks have another prompt now
    ids, drawing = drawn_step(runner, 2, 50, 2)
    assert len(ids) == 3 and drawing.num_tokens == 51 + 1
    free(runner, 2)
    enter(runner, 3, tokens, [0, 1, 2, 3, 12, 13])
    _, drawing = drawn_step(runner, 3, 50, 1)
    assert drawing.num_tokens == 51, "what another prompt overwrote is not found"
    free(runner, 3)


def test_rejected_drafts_and_steps_without_drafts_are_caught_up_with(loaded: Callable[..., Loaded]) -> None:
    runner, _ = loaded("same")
    job = Job(prompt(20, 3), SamplingParams(max_tokens=16), 7)
    output = Driver(*loaded(None)).run([job.fresh()])[0].output
    assert enter(runner, 0, job.prompt, [0, 1, 2, 3]) == output[0]
    ids, _ = drawn_step(runner, 0, 20, 2)
    assert ids == output[1:4]
    wrong = [(output[4] + 1) % VOCAB, 5]
    assert runner.execute(plan_of([(0, 23, 3, 3)], 0, [wrong])).token_ids.tolist() == [output[4]]  # drafts from a text
    ids, drawing = drawn_step(runner, 0, 24, 3)
    assert ids == output[5:9] and drawing.num_tokens == 25 - 22 + 2
    free(runner, 0)


def test_a_long_prompt_is_caught_up_with_in_parts(
    loaded: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = loaded("same")
    monkeypatch.setattr(DraftModel, "catch_up", 32)
    enter(runner, 0, prompt(40, 8), [0, 1, 2, 3])
    enter(runner, 1, prompt(3, 9), [4, 5])
    plan = plan_of([(0, 40, 3, 3), (1, 3, 3, 3)], 0, [[DRAWN] * 2] * 2)
    result = runner.execute(plan)
    assert result.draft_passes is not None and result.draft_passes.behind == [0], "the short one does not wait"
    assert result.counts[1] == 3 and result.draft_passes.num_tokens == 32 + 4 + 1
    _, drawing = drawn_step(runner, 0, 40 + int(result.counts[0]), 2)
    assert drawing.behind == [] and drawing.num_tokens == 40 + int(result.counts[0]) + 1 - 32 + 1
    free(runner, 0, 1)


def test_rows_with_one_prompt_compute_it_once(loaded: Callable[..., Loaded]) -> None:
    runner, _ = loaded("same")
    tokens = prompt(60, 10)
    enter(runner, 0, tokens, [0, 1, 2, 3, 4])
    enter(runner, 1, tokens, [0, 1, 2, 8, 9], computed=48)
    plan = plan_of([(0, 60, 2, 2), (1, 60, 2, 2)], 0, [[DRAWN]] * 2)
    result = runner.execute(plan)
    assert (
        result.draft_passes is not None and result.draft_passes.behind == [1] and result.draft_passes.num_tokens == 61
    )
    ids, drawing = drawn_step(runner, 1, 60 + int(result.counts[1]), 1)
    assert len(ids) == 2 and drawing.num_tokens == 60 + int(result.counts[1]) + 1 - 48
    free(runner, 0, 1)


def test_released_pages_are_not_reused(loaded: Callable[..., Loaded]) -> None:
    runner, _ = loaded("same")
    tokens = prompt(33, 11)
    enter(runner, 0, tokens, [0, 1, 2])
    drawn_step(runner, 0, 33, 1)
    free(runner, 0)
    runner.call("release", {"tags": ["kv_cache"]})
    runner.call("restore", {"tags": ["kv_cache"]})
    enter(runner, 0, tokens, [0, 1, 2])
    assert drawn_step(runner, 0, 33, 1)[1].num_tokens == 34
    free(runner, 0)


def test_the_quantized_copy_follows_the_weights(tmp_path: Path) -> None:
    options = {"max_num_seqs": 8, "spec_method": "self-int8"}
    runner, facts = make_runner(tmp_path / "one", tiny_config("qwen3"), **options)
    other, other_facts = make_runner(tmp_path / "two", tiny_config("qwen3"), seed=5, spec_method="none")

    def requests() -> list[Job]:
        return [Job(prompt(9, n), SamplingParams(max_tokens=24), n) for n in range(4)]

    expected = outcomes(Driver(other, other_facts).run(requests()))
    runner.background("begin_update", {"have_weights": True})
    staging = feature(runner, RunnerUpdates).sync._staging
    assert staging is not None
    for name, parameter in other.model.parameters_by_name().items():
        place = parameter.places()[0]
        staging.push(name, place.read(0, parameter.shape[0]).clone())
    runner.background("finish_update", {})
    copies = feature(runner, DraftModel)
    assert copies.num_bytes()["draft_bytes"] > 0
    runner.call("commit_update", {})
    runner.background("forget_weights", {})
    for accepted in (False, True):  # the first run is drafted for by old and new weights
        driver = Driver(runner, facts, drafter=lambda job: [DRAWN] * 3 if job.output else [])
        assert outcomes(driver.run(requests())) == expected
        if accepted:
            assert driver.accepted > 4 * driver.rejected
    runner.call("release", {"tags": ["weights"]})
    copies.on_weights()  # again


def test_unsuitable_draft_models_are_refused(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(smaller(vocab=300)))
    with pytest.raises(StartError, match="draft model's vocabulary has 300 tokens, and the model's 320"):
        make_runner(tmp_path / "a", tiny_config("qwen3"), spec_model=str(draft))
    with pytest.raises(StartError, match="quantized"):
        make_runner(tmp_path / "b", tiny_config("qwen3"), spec_method="self-int8", quantization="int8")
    with pytest.raises(StartError, match="experts are not copied"):
        make_runner(tmp_path / "c", tiny_config("qwen3_moe"), spec_method="self-int8")


def test_drafts_of_logits_that_are_not_finite_are_ids(loaded: Callable[..., Loaded]) -> None:
    runner, _ = loaded("other")
    draft = runner.backend.draft
    assert draft is not None
    tokens = prompt(9, 12)
    expected = enter(runner, 0, tokens, [0, 1, 2])
    assert expected >= 0
    weight = draft.model.norm.weight
    kept = weight.clone()
    with torch.inference_mode():
        weight.fill_(float("nan"))
    for params in (SamplingParams(), SamplingParams(top_k=3, temperature=0.5)):
        row = NewRow(1, "", np.array(tokens, np.int32), len(tokens), params, 7, ())
        runner.execute(plan_of([(1, 0, 9, 1)], new=[row], blocks=[(1, 0, [4, 5, 6])]))
        ids, drawing = drawn_step(runner, 1, 9, 4)
        assert ids and drawing.behind == []
        free(runner, 1)
    with torch.inference_mode():
        weight.copy_(kept)
    free(runner, 0)


def test_progress_of_a_slot_ends_with_its_request() -> None:
    class FakeSlots:
        block_size = 4
        tokens = np.arange(40, dtype=np.int32).reshape(2, 20)
        blocks = np.array([[0, 1, 2, 3, 4], [0, 1, 5, 6, 7]], np.int32)

    slots = FakeSlots()
    progress = DraftProgress(slots)  # type: ignore[arg-type]
    slots.tokens[1, :8] = slots.tokens[0, :8]
    assert progress.computed(0, 11) == 0
    progress.before_write(0, 0, 11)
    progress.on_computed(0, 11)
    progress.on_drafted(0, np.array([11, 99, 13], np.int32))
    assert progress.computed(0, 14) == 12, "of three drafts one stayed"
    assert progress.computed(1, 8) == 4, "never all of the tokens"
    progress.release(1)
    assert progress.computed(1, 12) == 8
    progress.before_write(1, 3, 5)
    progress.release(0)
    assert progress.computed(0, 14) == 0
    progress.on_computed(0, 8)
    progress.release(0)
    progress.before_write(1, 4, 5)
    assert progress.computed(0, 14) == 4, "a block of which one token was overwritten is not found"


def test_a_plan_keeps_drafts_that_it_was_given(loaded: Callable[..., Loaded]) -> None:
    runner, _ = loaded("same")
    enter(runner, 0, prompt(9, 13), [0, 1])
    enter(runner, 1, prompt(9, 14), [2, 3])
    plan = plan_of([(0, 9, 3, 3), (1, 9, 2, 2)], 0, [[5, 6], [DRAWN]])
    step = runner.forward(plan)
    assert isinstance(step.plan, StepPlan)
    drafts = step.plan.draft_token_ids.tolist()
    assert drafts[:2] == [5, 6] and 0 <= drafts[2] < VOCAB
    runner.sample(step, None).result()
    free(runner, 0, 1)
