"""The entropy of a token's distribution: its value, and that it depends on its own row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokserve.features.entropy.source import EntropySource, entropies_of
from tokserve.runner.columns import SampledLogits

VOCAB = 6000


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 5)


def reference(logits: torch.Tensor) -> list[float]:
    """The entropies that torch computes in float64."""
    entropy: list[float] = torch.distributions.Categorical(logits=logits.double()).entropy().tolist()
    return entropy


def computed(logits: torch.Tensor, temperature: list[float], greedy: list[bool]) -> list[float]:
    columns = torch.zeros(len(logits), dtype=torch.int64), torch.tensor(greedy), torch.tensor(temperature)
    source = EntropySource(1)
    [values] = source.compute(SampledLogits(logits, logits, *columns))
    rows = source.rows([values.numpy()], len(logits), np.arange(len(logits)))
    result: list[float] = rows.records.view(np.float32)[:, 0].tolist()
    return result


def test_a_value_is_the_entropy_at_the_temperature() -> None:
    logits = random_logits(3)
    expected = [*reference(logits[:1]), *reference(logits[1:2] / 0.5), *reference(logits[2:])]
    assert computed(logits, [1.0, 0.5, 0.7], [False, False, True]) == pytest.approx(expected, rel=1e-6)


def test_a_value_depends_on_its_own_row_alone() -> None:
    logits = random_logits(17, seed=1)
    together = entropies_of(logits).tolist()
    assert together == pytest.approx(reference(logits), rel=1e-6)
    for start in range(17):
        assert entropies_of(logits[start:].contiguous()).tolist() == together[start:]


@pytest.mark.parametrize("size", [1, 2, 3, 1023, 1024, 1025, 3000, 5003])
def test_vocabularies_of_any_size(size: int) -> None:
    logits = random_logits(4)[:, :size].contiguous()
    assert entropies_of(logits).tolist() == pytest.approx(reference(logits), rel=1e-6, abs=1e-12)


def test_ids_without_probability_add_nothing() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [5.0, -torch.inf, -torch.inf], [0.0, -900.0, 0.0]])
    expected = [np.float32(np.log(2)), 0.0, np.float32(np.log(2))]
    assert entropies_of(logits).tolist() == expected


def test_rows_that_did_not_ask_have_zeros() -> None:
    rows = EntropySource(1).rows([np.array([2.5], np.float32)], 3, np.array([1]))
    assert rows.records.view(np.float32)[:, 0].tolist() == [0.0, 2.5, 0.0]
