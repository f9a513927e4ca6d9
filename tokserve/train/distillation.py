"""Losses of distillation over candidates: the student's logits against a teacher's logprobs of a few ids.

Each position has the probabilities of its candidates, and as one outcome more that of all other ids together.  The
divergence of these is at most that of the distributions over the vocabulary, and equal if the candidates are all of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FLOOR = -100.0  # the least logprob of what is divided by


def candidate_logprobs(logits: Tensor, candidates: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Logprobs [..., K] of `candidates` int64 [..., K] in the rows of `logits` [..., V] / temperature, and [...] of all
    other ids together; -inf for the candidate -1, which is none, and where there are no others.  Differentiable.
    `temperature`: a number, or one for each row; 0 counts as 1.
    """
    divisor = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device)
    logits = logits / divisor.where(divisor != 0.0, 1.0).unsqueeze(-1)
    vocab, is_none = logits.shape[-1], candidates < 0
    total = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(-1, candidates.clamp(min=0)) - total).masked_fill(is_none, -torch.inf)
    taken = torch.zeros(*logits.shape[:-1], vocab + 1, dtype=torch.bool, device=logits.device)
    taken = taken.scatter(-1, candidates.where(~is_none, vocab), value=True)[..., :vocab]
    is_empty = taken.all(-1)
    others = logits.masked_fill(taken & ~is_empty.unsqueeze(-1), -torch.inf).logsumexp(-1)
    return chosen, (others - total.squeeze(-1)).clamp(max=0.0).masked_fill(is_empty, -torch.inf)


def candidate_kl(
    logits: Tensor,
    candidates: Tensor,
    teacher_logprobs: Tensor,
    teacher_rest: Tensor | None,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """The divergence [...] of each row, differentiable in the student's `logits` [..., V].

    `candidates`: int64 [..., K], different ids, -1 for none.  `teacher_logprobs` [..., K], `teacher_rest` [...]: the
    server's `prompt_token_id_logprobs` and `prompt_rest_logprobs`, of the temperature that `temperature` divides the
    student's logits by; without a rest the term of all other ids is left out, and the sum is no divergence.
    `direction`: "reverse" is KL(student || teacher), "forward" KL(teacher || student).  Raises ValueError.
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be 'reverse' or 'forward', got {direction!r}")
    if candidates.shape != teacher_logprobs.shape or candidates.shape[:-1] != logits.shape[:-1]:
        shapes = [list(tensor.shape) for tensor in (logits, candidates, teacher_logprobs)]
        raise ValueError(f"logits, candidates and teacher_logprobs must be [..., V], [..., K], [..., K], got {shapes}")
    student, student_rest = candidate_logprobs(logits, candidates, temperature)
    teacher = teacher_logprobs.to(student)
    teacher = teacher.masked_fill(candidates < 0, -torch.inf)
    if teacher_rest is not None:
        student = torch.cat([student, student_rest.unsqueeze(-1)], -1)
        teacher = torch.cat([teacher, teacher_rest.to(student).unsqueeze(-1)], -1)
    weights, others = (student, teacher) if direction == "reverse" else (teacher, student)
    has_mass = weights > -torch.inf
    weights = weights.where(has_mass, 0.0)
    terms = weights.exp() * (weights - others.clamp(min=FLOOR))
    return terms.where(has_mass, 0.0).sum(-1)
