"""Vectors of pooling requests: those of the hidden states, with the same bits in any chunks and any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from tests.runner.drive import Driver, Job, on_either_device, plan_of
from tests.runner.fake_device import FakeDevice
from tests.runner.test_runner import outcomes, prompt
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.features.pooling.pooled_outputs import VectorRules, pooler_of
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.plan import NOT_FINITE, OK, DeviceFacts, NewRow, StepResult
from tokserve.runner.runner import Runner
from tokserve.runner.startup import load_runner

LENGTH = 37


@pytest.fixture(scope="module", params=["host", "cuda"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, DeviceFacts]:
    return on_either_device(request.param, tmp_path_factory.mktemp("model"))


def pooled(runner: Runner, params: PoolingParams, chunks: list[int], other_row: Any = None) -> list[StepResult]:
    """The results of a request in slot 3 whose prompt is computed in these chunks."""
    row = NewRow(3, "", np.array(prompt(LENGTH, 1), np.int32), LENGTH, params, 0, ())
    computed, results = 0, []
    for step, count in enumerate(chunks):
        more = {"new": [row], "blocks": [(3, 0, [24, 25, 26])]} if step == 0 else {}
        others = [] if other_row is None else [other_row(step, more)]
        results.append(runner.execute(plan_of([*others, (3, computed, count, 0)], step, **more)))
        computed += count
    assert computed == LENGTH
    runner.execute(plan_of([], freed=[3, 5]))
    return results


def hidden(runner: Runner) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Hidden states of the prompt, by the model itself."""
    slots = runner.backend.slots
    slots.assign(NewRow(3, "", np.array(prompt(LENGTH, 1), np.int32), LENGTH, SamplingParams(), 0, ()))
    slots.extend(3, 0, [24, 25, 26])
    with torch.inference_mode():
        batch = slots.build(plan_of([(3, 0, LENGTH, 1)]), runner.backend.kv)  # type: ignore[attr-defined]
        return runner.model.forward(batch).double().numpy()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_vector_is_that_of_the_hidden_states_in_any_chunks(
    loaded: tuple[Runner, DeviceFacts], pooling: Any, normalize: bool
) -> None:
    runner, _ = loaded
    params = PoolingParams(pooling, normalize)
    (result,) = pooled(runner, params, [LENGTH])
    vector = result.values["pooled"][0]
    assert vector.dtype == np.float32 and result.status.tolist() == [OK] and result.counts.tolist() == [0]
    states = hidden(runner)
    expected = states[-1] if pooling == "last" else states.mean(0)
    expected = expected / np.linalg.norm(expected) if normalize else expected
    assert np.allclose(vector, expected, rtol=1e-6, atol=1e-7)
    for chunks in ([1] * LENGTH, [16, 16, 5], [30, 6, 1]):
        *chunked, last = pooled(runner, params, chunks)
        assert not any(result.values.get("pooled") for result in chunked)
        assert last.values["pooled"][0].tobytes() == vector.tobytes()


def test_the_vector_does_not_depend_on_the_batch(loaded: tuple[Runner, DeviceFacts]) -> None:
    runner, facts = loaded
    other = Job(prompt(20, 5), SamplingParams(max_tokens=3, prompt_logprobs=1), 1)
    expected = outcomes(Driver(runner, facts).run([other.fresh()]))[0][0]
    tokens: list[int] = []

    def other_row(step: int, more: dict[str, Any]) -> tuple[int, int, int, int]:
        if step == 0:
            row = NewRow(5, "", np.array(other.prompt, np.int32), 20, other.params, 1, ())
            more |= {"new": [*more["new"], row], "blocks": [*more["blocks"], (5, 0, [40, 41])]}
            return (5, 0, 20, 1)
        return (5, 19 + step, 1, 1)

    (alone,) = pooled(runner, PoolingParams("mean"), [LENGTH])
    results = pooled(runner, PoolingParams("mean"), [16, 20, 1], other_row)
    tokens = [int(token) for result in results for token in result.token_ids]
    assert tokens == expected
    assert results[-1].values["pooled"][1].tobytes() == alone.values["pooled"][0].tobytes()


@pytest.mark.parametrize("pooling", ["last", "mean", "all"])
def test_no_step_waits_for_a_vector(loaded: tuple[Runner, DeviceFacts], pooling: Any) -> None:
    runner, _ = loaded
    target = runner.backend.device
    if not isinstance(target, FakeDevice):
        return  # the host's results are there at once
    row = NewRow(3, "", np.array(prompt(LENGTH, 1), np.int32), LENGTH, PoolingParams(pooling, normalize=False), 0, ())
    plan = plan_of([(3, 0, LENGTH, 0)], new=[row], blocks=[(3, 0, [24, 25, 26])])
    before = target.waits
    pending = runner.sample(runner.forward(plan), None)
    assert target.waits == before
    assert "pooled" in pending.result().values and target.waits > before
    runner.execute(plan_of([], freed=[3]))


def test_a_slot_keeps_no_sum_of_its_last_request(loaded: tuple[Runner, DeviceFacts]) -> None:
    runner, _ = loaded
    (expected,) = pooled(runner, PoolingParams("mean"), [LENGTH])
    row = NewRow(3, "", np.array(prompt(LENGTH, 2), np.int32), LENGTH, PoolingParams("mean"), 0, ())
    runner.execute(plan_of([(3, 0, 20, 0)], new=[row], blocks=[(3, 0, [24, 25, 26])]))  # and preempted
    (result,) = pooled(runner, PoolingParams("mean"), [LENGTH])
    assert result.values["pooled"][0].tobytes() == expected.values["pooled"][0].tobytes()


def test_a_vector_that_is_not_finite_is_flagged(
    loaded: tuple[Runner, DeviceFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = loaded
    forward = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda batch: forward(batch) * float("nan"))
    monkeypatch.setattr(runner.backend, "prompt_graphs", None, raising=False)
    (result,) = pooled(runner, PoolingParams("last"), [LENGTH])
    assert result.status.tolist() == [NOT_FINITE]


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "Qwen3Model"), ("gemma3_text", "Gemma3TextModel"), ("phi3", "Phi3Model")]
)
def test_a_checkpoint_without_a_head(tmp_path: Path, family: str, kind: str) -> None:
    """transformers' AutoModel saves it so: the architecture has no head, names have no prefix.  Released embedding
    models may have such tensors and the architecture of the model that generates."""
    config = tiny_config(family, dtype="float32", tie_word_embeddings=False)
    model = AutoModel.from_pretrained(write_checkpoint(tmp_path / "whole", config, seed=1), dtype=torch.float32)
    base = tmp_path / "base"
    model.save_pretrained(base)
    assert json.loads((base / "config.json").read_text())["architectures"] == [kind]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt(LENGTH, 1)])).last_hidden_state[0, -1].numpy()

    def runner(**options: Any) -> Runner:
        common = {"model": str(base), "device": "cpu", "cpu_threads": 1, "max_model_len": 128, "max_num_seqs": 24}
        return load_runner(resolve(Config.make(**common, **options)))[0]

    def vector(runner: Runner) -> Any:
        return pooled(runner, PoolingParams("last", normalize=False), [LENGTH])[0].values["pooled"][0]

    assert np.allclose(vector(runner()), expected, atol=1e-4), "the architecture says that it pools"
    (base / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    assert np.allclose(vector(runner(runner="pooling")), expected, atol=1e-4)
    with pytest.raises(StartError, match=r"1 missing: lm_head\.weight \(if the output head is the embedding"):
        runner(runner="generate")


def test_modules_of_sentence_transformers_choose_the_pooling(tmp_path: Path) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()

    def rules(**config: bool) -> Any:
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
        resolved = resolve(Config.make(model=str(tmp_path), tokens_only=True, load_format="dummy"))
        assert resolved.model.runner == "pooling"
        return pooler_of(resolved.model)

    chosen = rules(pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    assert chosen == VectorRules("mean", normalize=False), "there is no module Normalize"
    with pytest.raises(StartError, match="max_tokens"):
        rules(pooling_mode_max_tokens=True)
