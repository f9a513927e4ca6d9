"""Sample inputs of the ops on logits."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.samples.common import Samples

NEVER = float("-inf")


def _logits(seed: int, rows: int, width: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def sample(dtype: torch.dtype) -> Samples:
    for rows, width in ((1, 1), (5, 7), (64, 1000), (2, 5003)):
        logits = _logits(width, rows, width)
        logits[:, 1::3] = NEVER
        generator = torch.Generator().manual_seed(rows)
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
        positions = torch.randint(0, 1 << 40, (rows,), generator=generator)
        yield logits, seeds, positions, torch.arange(rows) % 4 == 3
    yield torch.zeros(3, 9), torch.arange(3), torch.arange(3), torch.ones(3, dtype=torch.bool)


def filter_logits(dtype: torch.dtype) -> Samples:
    for width in (1, 17, 1000, 5003):
        logits = _logits(width, 8, width)
        top_k = torch.tensor([0, 1, 5, 0, 0, 40, 0, 2000], dtype=torch.int32)
        top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.5, 0.999, 0.8])
        min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 0.2])
        yield logits, top_k, top_p, min_p
        yield logits.round(), top_k, torch.ones(8), min_p


def sample_few(dtype: torch.dtype) -> Samples:
    """A row that is not finite, ties, forbidden ids, greedy rows; temperatures of 0."""
    for width, rows, k in ((90, 9, 2), (4200, 2, -1)):
        logits = _logits(width, 9, width)
        logits[::2] = logits[::2].round()
        logits[1, 3:], logits[4, 5] = NEVER, float("nan")
        index = torch.arange(9)
        top_k = torch.tensor([1, 20, 64, 0, 7, 3, 4, 11, 5], dtype=torch.int32)
        top_p = torch.tensor([1.0, 0.9, 0.99, 1.0, 0.5, 1.0, 0.95, 1.0, 0.01])
        min_p = torch.tensor([0.0, 0.0, 0.01, 0.0, 0.0, 0.3, 0.0, 0.05, 0.0])
        temperature = index % 3 * 0.6
        columns = (logits, index * 7919 - 9, index * 3, index == 3, temperature, top_k, top_p, min_p)
        yield *(column[:rows] for column in columns), k > 0, k


def penalize(dtype: torch.dtype) -> Samples:
    for rows, width, length in ((1, 5, 1), (6, 50, 30), (3, 5003, 200)):
        generator = torch.Generator().manual_seed(width)
        history = torch.randint(0, width, (rows, length), generator=generator, dtype=torch.int32)
        lens = torch.randint(1, length + 1, (rows,), generator=generator, dtype=torch.int32)
        history[torch.arange(length) >= lens[:, None]] = -1
        presence = torch.arange(rows) % 3 * 0.7 - 0.3
        frequency = torch.arange(rows) % 2 * 0.4
        repetition = 1.0 + torch.arange(rows) % 4 * 0.2 - 0.2
        yield _logits(width, rows, width), history, lens // 2, lens, presence, frequency, repetition
    yield _logits(1, 2, 9), torch.full((2, 3), -1, dtype=torch.int32), lens[:2] * 0, lens[:2] * 0, *torch.ones(3, 2)


def logprobs(dtype: torch.dtype) -> Samples:
    for rows, width, k in ((1, 1, 1), (4, 50, 5), (3, 5003, 0), (2, 5003, 20), (2, 9000, 9000)):
        logits = _logits(width, rows, width)
        ids = torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(k))
        named = torch.arange(rows * 3).view(rows, 3) % width
        yield logits, ids, k, None, None
        yield logits.round(), ids, k, named, torch.arange(rows) * 0.5
    yield torch.tensor([[NEVER, 1.0, NEVER, 2.0, NEVER]]), torch.tensor([0]), 4, None, None


def sample_fused(dtype: torch.dtype) -> Samples:
    for number, (logits, seeds, positions, greedy) in enumerate(sample(dtype)):
        rows, width = logits.shape
        temperature = torch.arange(rows) % 5 * 0.4
        yield logits, seeds, positions, greedy, None, False, -1
        yield logits, seeds, positions, greedy, None, False, min(number, width)
        yield logits, seeds, positions, greedy, temperature, False, min(number, width)
        yield logits, seeds, positions, greedy, temperature, True, 0
    broken = torch.tensor([[1.0, float("nan"), 2.0], [0.5, 1.0, -NEVER], [NEVER] * 3, [NEVER, 3.0, NEVER]])
    yield broken, torch.arange(4), torch.arange(4), torch.arange(4) % 2 == 0, None, False, 1


def sampling_mask(dtype: torch.dtype) -> Samples:
    for rows, width, limit in ((1, 1, 1), (6, 7, 3), (9, 50, 40), (12, 1000, 128), (4, 5003, 600)):
        logits = _logits(width, rows, width)
        temperature = torch.arange(rows) % 4 * 0.5
        processed = logits / temperature.where(temperature != 0.0, 1.0)[:, None]
        for row in range(1, rows):  # row 0 is whole
            keep = torch.randperm(width, generator=torch.Generator().manual_seed(row))[: 1 + (row - 1) * limit // 4]
            processed[row] = torch.full((width,), NEVER).index_copy(0, keep, processed[row, keep])
        processed[rows // 2 + 1 :] *= 1.5  # as penalties change what is drawn from
        logits[rows // 2 :, :: width // 2 + 1] -= 30.0
        yield logits, processed, processed.argmax(-1), torch.arange(rows) % 5 == 4, temperature, limit
    impossible = torch.tensor([[NEVER, 1.0, NEVER, 2.0, NEVER]]).repeat(2, 1)  # as the model gives them
    one = torch.tensor([[NEVER, 1.0, NEVER, NEVER, NEVER]])
    yield impossible, torch.cat((impossible[:1], one)), torch.tensor([3, 1]), torch.zeros(2) > 0, torch.ones(2), 5
