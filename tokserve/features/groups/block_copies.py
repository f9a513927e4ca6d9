"""Copies of blocks of the KV cache for requests that enter a slot."""

from __future__ import annotations

import torch

from tokserve.models.decoder import Decoder
from tokserve.protocol.plan import StepPlan
from tokserve.runner.backend import Backend, FeatureRows
from tokserve.runner.features import RunnerContext, RunnerFeature


def make(context: RunnerContext) -> RunnerFeature:
    return BlockCopies(context.runner.backend)


class BlockCopies(RunnerFeature):
    """Copies blocks before the step that writes behind what they hold."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def before(self, plan: StepPlan, model: Decoder) -> FeatureRows | None:
        copies = [row.copied_block for row in plan.new if row.copied_block is not None]
        if copies:
            self._copy([source for source, _ in copies], [target for _, target in copies])
        return None

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        device = self._backend.device.torch_device
        source_index, target_index = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensors in self._backend.kv:
            for blocks in tensors:
                content = blocks.view(torch.uint8)  # some dtypes cannot be indexed on some devices
                content.index_copy_(0, target_index, content.index_select(0, source_index))
        if self._backend.routed is not None:
            self._backend.routed.copy_blocks(sources, targets)
