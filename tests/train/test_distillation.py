"""Divergences over candidates: equal to those over the vocabulary where the candidates are all of it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tokserve.train import candidate_kl, candidate_logprobs

VOCAB = 50
DIRECTIONS: tuple[Literal["reverse", "forward"], ...] = ("reverse", "forward")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def with_gradient(logits: Tensor, compute: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    values: Tensor = compute(leaf)
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return values.detach(), leaf.grad


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_all_ids_as_candidates_have_the_divergence_of_the_vocabulary(
    direction: Literal["reverse", "forward"], temperature: float
) -> None:
    logits, teacher = drawn(1, 2, 5, VOCAB), drawn(2, 2, 5, VOCAB).log_softmax(-1)
    candidates = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3)).expand(2, 5, VOCAB)

    def over_vocabulary(student: Tensor) -> Tensor:
        student = (student / temperature).log_softmax(-1)
        p, q = (student, teacher) if direction == "reverse" else (teacher, student)
        return (p.exp() * (p - q)).sum(-1)

    def over_candidates(student: Tensor) -> Tensor:
        rest = torch.full((2, 5), -torch.inf)
        scores = teacher.gather(-1, candidates)
        return candidate_kl(student, candidates, scores, rest, direction=direction, temperature=temperature)

    for actual, expected in zip(
        with_gradient(logits, over_candidates), with_gradient(logits, over_vocabulary), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_some_candidates_have_the_divergence_of_the_sums(direction: Literal["reverse", "forward"]) -> None:
    logits, full = drawn(4, 3, VOCAB), drawn(5, 3, VOCAB).log_softmax(-1)
    sets = [[4, 9, 30], [7], []]
    candidates = torch.tensor([[4, 9, 30], [7, -1, -1], [-1, -1, -1]])

    def outcomes(logprobs: Tensor, row: int) -> Tensor:
        p = logprobs[row].exp()
        return torch.stack([*p[sets[row]], 1 - p[sets[row]].sum()])

    def over_sums(student: Tensor) -> Tensor:
        rows = []
        for row in range(3):
            p, q = outcomes(student.log_softmax(-1), row), outcomes(full, row)
            p, q = (p, q) if direction == "reverse" else (q, p)
            rows.append((p * (p / q).log()).sum())
        return torch.stack(rows)

    scores, rest = candidate_logprobs(full, candidates)
    assert scores.isneginf().tolist() == (candidates < 0).tolist()
    actual = with_gradient(logits, lambda student: candidate_kl(student, candidates, scores, rest, direction=direction))
    for value, expected in zip(actual, with_gradient(logits, over_sums), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)
    assert actual[0][2] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_a_teacher_forbids_has_finite_gradients(direction: Literal["reverse", "forward"]) -> None:
    candidates = torch.tensor([[1, 2]])
    teacher, rest = torch.tensor([[0.0, -torch.inf]]), torch.tensor([-torch.inf])
    values, gradient = with_gradient(
        drawn(6, 1, VOCAB), lambda student: candidate_kl(student, candidates, teacher, rest, direction=direction)
    )
    assert values.isfinite().all() and gradient.isfinite().all() and gradient.abs().sum() > 0


def test_without_a_rest_its_term_is_left_out() -> None:
    logits, candidates = drawn(7, 1, VOCAB), torch.tensor([[3]])
    scores = torch.tensor([[-1.0]], dtype=torch.float64)
    logprob = logits.log_softmax(-1)[0, 3]
    expected = logprob.exp() * (logprob + 1.0)
    torch.testing.assert_close(candidate_kl(logits, candidates, scores, None)[0], expected)


def test_shapes_and_directions_are_checked() -> None:
    logits, candidates = torch.zeros(2, VOCAB), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="direction"):
        candidate_kl(logits, candidates, torch.zeros(2, 3), None, direction="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="teacher_logprobs"):
        candidate_kl(logits, candidates, torch.zeros(2, 2), None)
