"""What changes a running model between two steps: its weights, and the memory of weights and of the KV cache."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from tokserve.models.decoder import Decoder
from tokserve.runner import kvcache
from tokserve.runner.device import Accelerator
from tokserve.runner.features import Calls

if TYPE_CHECKING:
    from tokserve.runner.runner import Runner


class Admin:
    """`has_weights`: they have not been given up."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._backend = runner.backend
        self.has_weights = True

    def calls(self) -> Calls:
        """The core's admin methods by name."""
        return {"memory": self.memory, "release": self.release, "restore": self.restore}

    def memory(self) -> dict[str, int]:
        """The bytes by use."""
        parameters = self._runner.model.parameters_by_name().values()
        weights = sum(int(math.prod(one.shape) * one.share) * one.dtype.itemsize for one in parameters)
        sizes = {"weight_bytes": weights, "kv_bytes": self._backend.layout.bytes()}
        if self._backend.layout.states is not None:
            sizes["state_bytes"] = self._backend.layout.state_bytes()
        for feature in self._runner.hooks.features:
            sizes |= feature.num_bytes()
        return sizes

    def blank(self) -> Decoder:
        """A model like the one that serves, as features see it, without weights."""
        blank = self._runner.model.blank()
        for feature in self._runner.hooks.features:
            feature.attach(blank)
        return blank

    def replace(self, complete: Decoder) -> None:
        """Serve with this model from now on; it may be the one that serves, with other weights."""
        runner = self._runner
        before, scales = runner.model, runner.model.kv_scales()
        runner.model = complete
        self.announce_weights()
        if complete is before:  # its weights were changed where they are: what was captured reads the new ones
            return
        kvcache.rescale(self._backend.kv[: len(scales)], scales, complete.kv_scales())
        self.has_weights = True
        self.capture()

    def announce_weights(self) -> None:
        """Tell the features that the weights are others."""
        for on_weights in self._runner.hooks.on_weights:
            on_weights()

    def capture(self) -> None:
        """Captured steps name the memory of weights and pages: after a change of either they are captured anew."""
        self._backend.invalidate()
        if self.has_weights and self._backend.kv:
            with torch.inference_mode():
                self._backend.capture(self._runner.model)

    def release(self, tags: list[str]) -> None:
        """Give back the memory of the KV cache or of the weights; their contents are lost."""
        if "kv_cache" in tags:
            self._backend.release_kv()
            for on_pages_lost in self._runner.hooks.on_pages_lost:
                on_pages_lost()
        if "weights" in tags:
            self._runner.model = self.blank()
            self.has_weights = False
            self.announce_weights()
        self._backend.invalidate()
        self._backend.device.give_back_memory()

    def restore(self, tags: list[str]) -> None:
        """Take the memory of the KV cache again."""
        if "kv_cache" in tags and not self._backend.kv:
            self._backend.allocate_kv()
            self.capture()

    def join_device(self) -> None:
        """Wait for what the background thread has begun on the device: tensors that came meanwhile are used next."""
        if isinstance(self._backend.device, Accelerator):
            self._backend.device.join()

    def beside_steps(self) -> AbstractContextManager[object]:
        """A context in which the background thread uses the device."""
        device = self._backend.device
        return device.beside() if isinstance(device, Accelerator) else nullcontext()
