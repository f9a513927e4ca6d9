"""Admin calls of a running model: memory, weight updates, adapters and code of the operator's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tokserve.base.errors import NotFound, RequestError
from tokserve.config import WeightsConfig
from tokserve.features.lora.adapter_slots import LoraTables
from tokserve.features.profiler.recorder import RunnerProfiler
from tokserve.features.weights import extension
from tokserve.features.weights.checksums import checksums
from tokserve.features.weights.in_place import copy_weights
from tokserve.features.weights.weight_sync import WeightSync
from tokserve.models.decoder import Decoder
from tokserve.rl.deltas import dtype_name
from tokserve.runner import kvcache
from tokserve.runner.device import Accelerator

if TYPE_CHECKING:
    from tokserve.runner.runner import Runner


class Admin:
    """`call` runs between two steps, `background` beside them."""

    def __init__(self, runner: Runner, weights: WeightsConfig, lora: LoraTables | None) -> None:
        self._runner = runner
        self._backend = runner.backend
        self._lora = lora
        self._sync = WeightSync(
            weights, self._blank, lambda: self.memory()["weight_bytes"], runner.backend.device, runner.ranks.total
        )
        self._has_weights = True
        self._profiler = RunnerProfiler(runner, self._capture)
        self._extension = extension.make(weights.worker_extension_cls, runner)

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """A method by name.  Raises NotFound."""
        methods: dict[str, Callable[..., Any]] = {
            "memory": self.memory,
            "release": self._release,
            "place_adapter": lambda slot: self._adapters.place(slot),
            "restore": self._restore,
            "commit_update": self._commit,
            "collective_rpc": self._collective_rpc,
            "apply_model": self._apply_model,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
        }
        if method not in methods:
            raise NotFound(f"the runner has no method {method!r}")
        if isinstance(self._backend.device, Accelerator) and method in ("place_adapter", "commit_update"):
            self._backend.device.join()  # they use tensors that came meanwhile
        return methods[method](**args)

    def background(self, method: str, args: dict[str, Any]) -> Any:
        """A method by name that may take long."""
        methods: dict[str, Callable[..., Any]] = {
            "init_weight_transfer": self._sync.init,
            "shutdown_weight_transfer": self._sync.shutdown,
            "begin_update": self._sync.begin,
            "begin_delta": lambda **args: self._sync.begin_delta(self._runner.model, **args),
            "plan_chain": self._plan_chain,
            "receive_update": self._sync.receive,
            "feed_update": self._sync.feed,
            "finish_update": self._sync.finish,
            "is_same_update": lambda: self._sync.is_same(self._runner.model),
            "abort_update": self._sync.abort,
            "forget_weights": self._sync.forget,
            "checksums": lambda: self._sync.sums.consistent(lambda: checksums(self._runner.model)),
            "weights_checksum": lambda: self._sync.checksum(self._runner.model),
            "weight_coordinates": self._coordinates,
            "checkpoint_checksums": self._checkpoint_checksums,
            "write_profile": self._profiler.write,
            "begin_adapter": lambda **args: self._sync.begin_adapter(self._adapters.begin_push(**args)),
            "read_adapter": lambda **args: self._adapters.read(**args),
            "drop_adapter": lambda key: self._adapters.drop(key),
            "kv_identity": self._kv_identity,
        }
        device = self._backend.device
        with device.beside() if isinstance(device, Accelerator) else nullcontext():
            return methods[method](**args)

    def interrupt(self) -> None:
        """Make what waits for a trainer fail, a meeting or a transfer; from any thread."""
        self._sync.interrupt()

    def memory(self) -> dict[str, int]:
        """The bytes by use."""
        parameters = self._runner.model.parameters_by_name().values()
        weights = sum(int(math.prod(one.shape) * one.share) * one.dtype.itemsize for one in parameters)
        sizes = {"weight_bytes": weights, "kv_bytes": self._backend.layout.bytes()}
        if self._backend.layout.states is not None:
            sizes["state_bytes"] = self._backend.layout.state_bytes()
        if self._runner.draft_model is not None:
            sizes["draft_bytes"] = self._runner.draft_model.num_bytes()
        return sizes if self._lora is None else sizes | {"lora_bytes": self._lora.num_bytes()}

    @property
    def _adapters(self) -> LoraTables:
        if self._lora is None:
            raise RequestError("this server runs without --enable-lora")
        return self._lora

    def _checkpoint_checksums(self) -> dict[str, Any]:
        model = self._runner.model
        digests, aliases = self._sync.sums.consistent(
            lambda: model.provenance.checksums(model.spec.renames, tied=model.spec.tied)
        )
        return {"checkpoint": digests, "tied": aliases}

    def _kv_identity(self) -> dict[str, str]:
        copies = self._runner.copies
        if copies is None:
            raise NotFound("the runner keeps no copies of KV blocks")
        return self._sync.sums.consistent(copies.identity_parts)

    def _coordinates(self) -> dict[str, Any]:
        """The tensors in which deltas count elements, plainly, and why there can be none."""
        coordinates = self._sync.coordinates(self._runner.model)
        tensors = {name: [dtype_name(dtype), list(shape)] for name, (dtype, shape) in coordinates.described.items()}
        return {
            "tensors": tensors,
            "tied": coordinates.tied,
            "renames": [list(pair) for pair in coordinates.renames],
            "delta_refusal": coordinates.refusal() if self._has_weights else "there are no weights now",
        }

    def _plan_chain(self, **args: Any) -> dict[str, Any] | None:
        return self._sync.plan_chain(self._runner.model if self._has_weights else None, **args)

    def _blank(self) -> Decoder:
        """A model like the one that serves, with its adapters, without weights."""
        blank = self._runner.model.blank()
        if self._lora is not None:
            self._lora.attach(blank)
        return blank

    def _commit(self) -> None:
        runner = self._runner
        before, scales = runner.model, runner.model.kv_scales()
        complete = self._sync.take(before)
        if complete is not before and self._copied(complete, before):
            self._sync.retire(complete)
            for on_weights in runner.hooks.on_weights:
                on_weights()
            return
        runner.model = complete
        for on_weights in runner.hooks.on_weights:
            on_weights()
        if runner.draft_model is not None:
            runner.draft_model.on_weights(runner.model)
        if runner.model is before:  # its weights were changed where they are: what was captured reads the new ones
            return
        kvcache.rescale(self._backend.kv[: len(scales)], scales, runner.model.kv_scales())
        self._has_weights = True
        self._capture()

    def _copied(self, complete: Decoder, before: Decoder) -> bool:
        """Copy the complete set to where the one that serves is, if that is worth while: a millisecond for each 2 GB
        on a GPU, where to capture all steps anew takes a second."""
        if not (self._backend.keeps_memory and self._has_weights and self._runner.draft_model is None):
            return False
        with torch.inference_mode(), self._sync.sums.replacing():
            return copy_weights(complete, before)

    def _capture(self) -> None:
        """Captured steps name the memory of weights and pages: after a change of either they are captured anew."""
        self._backend.invalidate()
        if self._has_weights and self._backend.kv:
            with torch.inference_mode():
                self._backend.capture(self._runner.model)

    def _release(self, tags: list[str]) -> None:
        """Give back the memory of the KV cache or of the weights; their contents are lost."""
        if "kv_cache" in tags:
            self._backend.release_kv()
            if self._runner.draft_model is not None:
                self._runner.draft_model.on_pages_lost()
        if "weights" in tags:
            self._runner.model = self._blank()
            for on_weights in self._runner.hooks.on_weights:
                on_weights()
            self._has_weights = False
            if self._runner.draft_model is not None:
                self._runner.draft_model.on_weights_lost(self._runner.model)
        self._backend.invalidate()
        self._backend.device.give_back_memory()

    def _restore(self, tags: list[str]) -> None:
        if "kv_cache" in tags and not self._backend.kv:
            self._backend.allocate_kv()
            self._capture()

    def _collective_rpc(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return extension.call(self._extension, method, args, kwargs)
        finally:
            self._on_foreign_code()

    def _on_foreign_code(self) -> None:
        self._sync.sums.forget()
        for on_weights in self._runner.hooks.on_weights:
            on_weights()
        self._backend.on_foreign_code(self._runner.model)

    def _apply_model(self, function: str) -> Any:
        try:
            return extension.plain(extension.named(function)(self._runner.model))
        finally:
            self._on_foreign_code()
