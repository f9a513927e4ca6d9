"""Runs a Decoder without a runner: one paged cache, pages handed out in a scrambled order."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tokserve.layers.batch import ForwardBatch, LogitsRows, StateRows
from tokserve.models.decoder import Decoder
from tokserve.protocol.kv_spec import StateSpec

PAGE = 16
SPARE = 3  # inputs in a ring beyond its taps


class Driver:
    """Rows of one decoder, each with its own pages; `step` computes the next tokens of some rows."""

    def __init__(self, decoder: Decoder, *, rows: int = 1, length: int = 512) -> None:
        self.decoder = decoder
        per_row = -(-length // PAGE)
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(0))
        self.tables = order.to(torch.int32).view(rows, per_row)
        self.lengths = [0] * rows
        self.kv: list[tuple[Tensor, ...]] = []
        for spec in decoder.kv_specs():
            if isinstance(spec, StateSpec):
                shapes = spec.state_shapes(SPARE)
                self.kv.append(tuple(torch.full((rows, *s), torch.nan, dtype=getattr(torch, d)) for s, d in shapes))
                continue
            dtype = getattr(torch, spec.dtype)
            self.kv.append(
                tuple(torch.full((rows * per_row, *shape), torch.nan, dtype=dtype) for shape in spec.shapes(PAGE))
            )

    def step(
        self,
        work: dict[int, Sequence[int]],
        ends: Sequence[int] | None = None,
        embeds: tuple[Tensor, Tensor] | None = None,
    ) -> list[Tensor]:
        """Append tokens to rows {row: ids}; the logits of each row's new positions [n, vocab].

        `ends`: of the last position of these rows only, by their index in `work`.  `embeds`: as in a `ForwardBatch`.
        """
        positions = [torch.arange(self.lengths[row], self.lengths[row] + len(ids)) for row, ids in work.items()]
        slots = [self.tables[row][p // PAGE].long() * PAGE + p % PAGE for row, p in zip(work, positions, strict=True)]
        starts_of_states = torch.tensor([self.lengths[row] for row in work], dtype=torch.int32)
        for row, ids in work.items():
            self.lengths[row] += len(ids)
        counts = [len(ids) for ids in work.values()]
        starts = torch.tensor([0, *counts]).cumsum(0)
        batch = ForwardBatch(
            input_ids=torch.tensor([token for ids in work.values() for token in ids]),
            positions=torch.cat(positions),
            query_start=starts.to(torch.int32),
            seq_lens=torch.tensor([self.lengths[row] for row in work], dtype=torch.int32),
            block_tables=self.tables[list(work)],
            slot_mapping=torch.cat(slots),
            kv=self.kv,
            embeds=embeds,
        )
        batch.states = StateRows(
            torch.tensor(list(work)), starts_of_states, batch.seq_lens, torch.empty(0, 3, dtype=torch.int32)
        )
        if ends is not None:
            index = torch.tensor(ends, dtype=torch.int64)
            batch.logits_rows = LogitsRows(
                starts[1:][index] - 1,
                torch.arange(len(ends) + 1).int(),
                batch.seq_lens[index],
                batch.block_tables[index],
            )
            counts = [1] * len(ends)
        with torch.inference_mode():
            logits = self.decoder.logits(self.decoder.forward(batch))
        return list(logits.split(counts))


def prefill(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    """Logits of all positions of one sequence [n, vocab]."""
    return Driver(decoder, length=len(ids)).step({0: ids})[0]


def random_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Reproducible token ids."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cache_argument(model: nn.Module) -> str:
    """transformers' name for the KV cache in arguments and outputs of this model; 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
