"""Features of running requests: embeddings that take the place of placeholder ids in a forward pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokserve.features.images.encoder import ImageEncoder
from tokserve.models.decoder import Decoder
from tokserve.protocol.plan import NewRow, StepPlan
from tokserve.protocol.prompt import Feature
from tokserve.runner.backend import FeatureRows
from tokserve.runner.features import RunnerContext, RunnerFeature


class FeatureTable(RunnerFeature):
    """The embeddings of the features of each slot's request, of `hidden` numbers each.  An image is encoded by
    `encoder` when the first of its positions is computed."""

    def __init__(
        self, hidden: int, dtype: torch.dtype, device: torch.device, encoder: ImageEncoder | None = None
    ) -> None:
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self.encoder = encoder
        self._by_slot: dict[int, tuple[Feature, ...]] = {}
        self._embeddings: dict[tuple[int, int], Tensor] = {}  # of slot and start: [1 + layers, length, hidden]

    def assign(self, row: NewRow) -> None:
        """A request takes a slot; its features were checked at admission."""
        self.release(row.slot)
        if row.features:
            self._by_slot[row.slot] = row.features

    def release(self, slot: int) -> None:
        """The slot is free."""
        for feature in self._by_slot.pop(slot, ()):
            self._embeddings.pop((slot, feature.start), None)

    def on_weights(self) -> None:
        """The weights are others: images are encoded again."""
        if self.encoder is not None:
            self.encoder.forget()
            self._embeddings.clear()

    def before(self, plan: StepPlan, model: Decoder) -> FeatureRows | None:
        """What the plan's features bring, by index in its batch; None if it computes no position of one."""
        if not self._by_slot:
            return None
        index: list[Tensor] = []
        parts: list[Tensor] = []  # [1 + layers, some, hidden]
        begin = 0  # of the row in the batch
        columns = (plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist())
        for slot, computed, count in zip(*columns, strict=True):
            for feature in self._by_slot.get(slot, ()):
                start = feature.start
                first, last = max(start, computed), min(start + feature.length, computed + count)
                if first < last:
                    index.append(torch.arange(begin + first - computed, begin + last - computed))
                    parts.append(self._embedded(slot, feature, model)[:, first - start : last - start])
                if computed + count >= start + feature.length:
                    self._embeddings.pop((slot, start), None)  # the request's own; the encoder may keep it
            begin += count
        if not index:
            return None
        embeds = torch.cat(index).to(self._device), torch.cat([part[0] for part in parts])
        layered = [(at, part[1:]) for at, part in zip(index, parts, strict=True) if len(part) > 1]
        if not layered:
            return FeatureRows(embeds)
        added = torch.cat([at for at, _ in layered]).to(self._device), torch.cat([part for _, part in layered], dim=1)
        return FeatureRows(embeds, added)

    def _embedded(self, slot: int, feature: Feature, model: Decoder) -> Tensor:
        """The feature's embeddings [1 + layers, length, hidden]."""
        key = slot, feature.start
        if key not in self._embeddings:
            if feature.kind == "embeddings":
                numbers = np.frombuffer(feature.data, "<f4").astype(np.float32).reshape(1, feature.length, self._hidden)
                self._embeddings[key] = torch.from_numpy(numbers).to(self._device, self._dtype)
            else:
                assert self.encoder is not None
                self._embeddings[key] = self.encoder(model, feature)
        return self._embeddings[key]


def make(context: RunnerContext) -> RunnerFeature:
    """The table of a runner, with an encoder if its model reads images."""
    encoder = None
    if context.images is not None:
        encoder = ImageEncoder(context.images, context.config.media.mm_encoder_cache_bytes, context.threads)
    model = context.runner.model
    return FeatureTable(model.spec.hidden, model.dtype, context.runner.backend.device.torch_device, encoder)
