"""The server's decoder under a model whose parameters someone else owns.

It is given the parameters at every call, packs those that changed, and computes a padded batch as the sequences that
are in it, common prefixes once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.models import load
from tokserve.models.decoder import DecoderSpec
from tokserve.models.provenance import HEAD
from tokserve.train import scores, scoring, tree
from tokserve.train.batch import PackedBatch
from tokserve.train.binding import Binding
from tokserve.train.byte_budget import ByteBudget
from tokserve.train.layers import functions, projections
from tokserve.train.layers.modules import DecoderModules
from tokserve.train.layers.projections import ModelWeights
from tokserve.train.padding import PaddedBatch
from tokserve.train.requests import ScoringRequest

PREFIX = "model."
Streams = list[Tensor]


@dataclass(frozen=True, slots=True)
class ServedOptions:
    """The server's options, and `PolicyModel`'s.  `activation_bytes` None: all activations are kept."""

    dtype: str
    head_dtype: str = "auto"
    max_model_len: int | None = None
    cpu_arithmetic: str = "auto"
    cpu_kernels: str | None = None
    ops: dict[str, str] | None = None
    max_tokens: int = 4096
    activation_bytes: int | None = None
    share_prefixes: bool = True
    device: str = "cpu"

    @property
    def kind(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]


class ServedDecoder:
    """A decoder of this spec, without weights at first; a copy begins so again."""

    def __init__(self, spec: DecoderSpec, options: ServedOptions) -> None:
        self.spec, self.options = spec, options
        self._binding = Binding(options.dtype, options.ops, options.cpu_arithmetic, options.cpu_kernels, options.device)
        decoder = load.build(
            spec, dtype=options.dtype, head_dtype=options.head_dtype, max_model_len=options.max_model_len
        )
        self.modules = DecoderModules(decoder, self._binding)
        self._adapter: dict[str, tuple[float, int]] = {}

    def __reduce__(self) -> Any:
        return ServedDecoder, (self.spec, self.options)

    @property
    def cpu_arithmetic(self) -> str | None:
        """How bfloat16 products are summed, as the server's option says it; None: by no compiled ops."""
        return self._binding.arithmetic

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._binding.device

    def collect(self, base: nn.Module) -> ModelWeights:
        """The parameters of a transformers backbone, but the head's, by the server's names.  A tensor for all experts
        becomes views of it, one for each name of an expert.  Raises TypeError, ValueError."""
        stacked = self.modules.decoder.stacked_parameters()
        covered = {name for one in stacked.values() for name in one.covers}
        names = [name for name in self.modules.names if name != HEAD and name not in covered]
        weights = projections.collect(base, [*names, *stacked], PREFIX, self.device, self.modules.renames)
        for name, one in stacked.items():
            weights.masters |= one.parts(weights.masters.pop(name))
        return weights

    def sync(self, weights: ModelWeights) -> None:
        """Pack what changed, and apply the adapter that there is."""
        everything = self._binding.activate()
        adapter = {module: (scale, weights.rank) for module, scale in weights.scales.items()}
        if adapter != self._adapter:
            self.modules.adapt(weights.scales, weights.rank)
            self._adapter = adapter
        self.modules.sync(weights.masters, everything=everything)

    def sync_head(self, weight: Tensor) -> None:
        """Pack the head's weight if it changed."""
        everything = self._binding.activate()
        self.modules.sync({self.modules.head_name: weight}, everything=everything)

    def hidden(
        self, masters: Mapping[str, Tensor], batch: PaddedBatch, cells: int, *, recompute: bool, streams: bool
    ) -> tuple[Tensor, Streams]:
        """Hidden states [cells, H] after the final norm, zero at padding; and the stream before each block likewise."""
        budget = ByteBudget(0 if recompute else self._activation_bytes())
        device = next(iter(masters.values())).device
        source = np.full(cells, -1, np.int64)  # of each cell, the token in the batches that follow one another
        parts: list[list[Tensor]] = []
        total = 0
        for group in tree.chunks(batch.sequences, self.options.max_tokens, share=self.options.share_prefixes):
            sequences = [batch.sequences[number] for number in group]
            packing = tree.pack(sequences, share=self.options.share_prefixes, block=self.modules.page)
            for number, index in zip(group, packing.index, strict=True):
                source[batch.cells[number]] = total + index
            tokens = len(packing.input_ids)
            before: Streams | None = [] if streams else None
            last = self.modules.hidden(
                PackedBatch(packing, device), torch.arange(tokens, device=device), masters, budget, before
            )
            parts.append([*(before or []), last])
            total += tokens
        if not parts:
            width = 1 + (len(self.spec.blocks) if streams else 0)
            empty = torch.zeros(0, self.spec.hidden, dtype=self.modules.decoder.dtype, device=device)
            parts = [[empty] * width]
        places = torch.from_numpy(source).to(device)
        *rest, whole = (spread(torch.cat(list(batches)), places) for batches in zip(*parts, strict=True))
        return whole, rest

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:  # [n, H] -> [n, V] float32
        """The head's.  `weight`: its parameter [V, H], packed already."""
        head = self.modules.decoder.head
        return functions.applied(scores.Logits, hidden, head, weight, self._binding.products)

    def rows(
        self, masters: Mapping[str, Tensor], requests: Sequence[ScoringRequest], *, mode: str, recompute: bool
    ) -> list[Tensor]:
        """Logprobs of each request, as `PolicyModel.logprobs`."""
        return scoring.rows(
            self.modules,
            masters,
            requests,
            mode=mode,
            share=self.options.share_prefixes,
            max_tokens=self.options.max_tokens,
            activation_bytes=0 if recompute else self._activation_bytes(),
        )

    def _activation_bytes(self) -> int:
        return 1 << 62 if self.options.activation_bytes is None else self.options.activation_bytes


def spread(x: Tensor, source: Tensor) -> Tensor:  # [T, H], [n] int64 -> [n, H]
    """Row source[i] of x at i, zeros where it is negative."""
    return functions.applied(_Spread, x, source)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor) -> Tensor:
        real = (source >= 0).nonzero()[:, 0]
        rows = source.index_select(0, real)
        ctx.save_for_backward(real, rows)
        ctx.tokens, ctx.dtype = len(x), x.dtype
        out = torch.zeros(len(source), x.shape[1], dtype=x.dtype, device=x.device)
        return out.index_copy_(0, real, x.index_select(0, rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        real, rows = ctx.saved_tensors
        return ops.sum_rows(grad.index_select(0, real).float(), rows, ctx.tokens).to(ctx.dtype), None
