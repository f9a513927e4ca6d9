"""Vectors of pooling requests: what the hidden states say, to the same bit in any chunks and any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.runner.drive import Driver, Job, on_either_device, plan_of
from tests.runner.test_runner import outcomes, prompt
from tokserve.params import PoolingParams, SamplingParams
from tokserve.plan import NOT_FINITE, OK, DeviceFacts, NewRow, StepResult
from tokserve.runner.runner import Runner

LENGTH = 37


@pytest.fixture(scope="module", params=["host", "cuda"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, DeviceFacts]:
    return on_either_device(request.param, tmp_path_factory.mktemp("model"))


def pooled(runner: Runner, params: PoolingParams, chunks: list[int], company: Any = None) -> list[StepResult]:
    """The results of a request in slot 3 whose prompt is computed in these chunks."""
    row = NewRow(3, "", np.array(prompt(LENGTH, 1), np.int32), LENGTH, params, 0, ())
    computed, results = 0, []
    for step, count in enumerate(chunks):
        more = {"new": [row], "blocks": [(3, 0, [24, 25, 26])]} if step == 0 else {}
        others = [] if company is None else [company(step, more)]
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
    vector = result.pooled[0]
    assert vector.dtype == np.float32 and result.status.tolist() == [OK] and result.counts.tolist() == [0]
    states = hidden(runner)
    expected = states[-1] if pooling == "last" else states.mean(0)
    expected = expected / np.linalg.norm(expected) if normalize else expected
    assert np.allclose(vector, expected, rtol=1e-6, atol=1e-7)
    for chunks in ([1] * LENGTH, [16, 16, 5], [30, 6, 1]):
        *chunked, last = pooled(runner, params, chunks)
        assert not any(result.pooled for result in chunked)
        assert last.pooled[0].tobytes() == vector.tobytes()


def test_the_vector_is_the_same_in_company(loaded: tuple[Runner, DeviceFacts]) -> None:
    runner, facts = loaded
    other = Job(prompt(20, 5), SamplingParams(max_tokens=3, prompt_logprobs=1), 1)
    expected = outcomes(Driver(runner, facts).run([other.fresh()]))[0][0]
    tokens: list[int] = []

    def company(step: int, more: dict[str, Any]) -> tuple[int, int, int, int]:
        if step == 0:
            row = NewRow(5, "", np.array(other.prompt, np.int32), 20, other.params, 1, ())
            more |= {"new": [*more["new"], row], "blocks": [*more["blocks"], (5, 0, [40, 41])]}
            return (5, 0, 20, 1)
        return (5, 19 + step, 1, 1)

    (alone,) = pooled(runner, PoolingParams("mean"), [LENGTH])
    results = pooled(runner, PoolingParams("mean"), [16, 20, 1], company)
    tokens = [int(token) for result in results for token in result.token_ids]
    assert tokens == expected
    assert results[-1].pooled[1].tobytes() == alone.pooled[0].tobytes()


def test_a_slot_passes_no_sum_on(loaded: tuple[Runner, DeviceFacts]) -> None:
    runner, _ = loaded
    (expected,) = pooled(runner, PoolingParams("mean"), [LENGTH])
    row = NewRow(3, "", np.array(prompt(LENGTH, 2), np.int32), LENGTH, PoolingParams("mean"), 0, ())
    runner.execute(plan_of([(3, 0, 20, 0)], new=[row], blocks=[(3, 0, [24, 25, 26])]))  # and preempted
    (result,) = pooled(runner, PoolingParams("mean"), [LENGTH])
    assert result.pooled[0].tobytes() == expected.pooled[0].tobytes()


def test_a_vector_that_is_not_finite_is_flagged(
    loaded: tuple[Runner, DeviceFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = loaded
    forward = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda batch: forward(batch) * float("nan"))
    monkeypatch.setattr(runner.backend, "prompt_graphs", None, raising=False)
    (result,) = pooled(runner, PoolingParams("last"), [LENGTH])
    assert result.status.tolist() == [NOT_FINITE]
