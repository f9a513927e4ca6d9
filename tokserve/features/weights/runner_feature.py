"""Weight updates in the runner: tensors are received beside the steps, and take effect between two of them."""

from __future__ import annotations

from typing import Any

import torch

from tokserve.features.weights import extension
from tokserve.features.weights.checksums import checksums
from tokserve.features.weights.coordinates import of_one_rank
from tokserve.features.weights.weight_sync import WeightSync
from tokserve.models.decoder import Decoder
from tokserve.models.in_place import copy_weights
from tokserve.rl.deltas import dtype_name
from tokserve.runner.features import Calls, RunnerContext, RunnerFeature


class RunnerUpdates(RunnerFeature):
    """Offers `consistent`, which computes something of weights that do not change meanwhile, and `stage_adapter`, which
    makes an adapter's staging the target of what is received."""

    def __init__(self, context: RunnerContext) -> None:
        runner, weights = context.runner, context.config.weights
        self._runner, self._admin, self._backend = runner, runner.admin, runner.backend
        self.sync = WeightSync(
            weights,
            self._admin.blank,
            lambda: self._admin.memory()["weight_bytes"],
            runner.backend.device,
            runner.ranks.total or of_one_rank,
        )
        self._extension = extension.make(weights.worker_extension_cls, runner)
        context.offers["consistent"] = self.sync.sums.consistent
        context.offers["stage_adapter"] = self.sync.begin_adapter

    def calls(self) -> Calls:
        return {
            "commit_update": self._commit,
            "collective_rpc": self._collective_rpc,
            "apply_model": self._apply_model,
        }

    def background_calls(self) -> Calls:
        sync, runner = self.sync, self._runner
        return {
            "init_weight_transfer": sync.init,
            "shutdown_weight_transfer": sync.shutdown,
            "begin_update": sync.begin,
            "begin_delta": lambda **args: sync.begin_delta(runner.model, **args),
            "plan_chain": self._plan_chain,
            "receive_update": sync.receive,
            "feed_update": sync.feed,
            "finish_update": sync.finish,
            "is_same_update": lambda: sync.is_same(runner.model),
            "abort_update": sync.abort,
            "forget_weights": sync.forget,
            "checksums": lambda: sync.sums.consistent(lambda: checksums(runner.model)),
            "weights_checksum": lambda: sync.checksum(runner.model),
            "weight_coordinates": self._coordinates,
            "checkpoint_checksums": self._checkpoint_checksums,
        }

    def interrupt(self) -> None:
        """Make what waits for a trainer fail, a meeting or a transfer."""
        self.sync.interrupt()

    def _checkpoint_checksums(self) -> dict[str, Any]:
        model = self._runner.model
        digests, aliases = self.sync.sums.consistent(
            lambda: model.provenance.checksums(model.spec.renames, tied=model.spec.tied)
        )
        return {"checkpoint": digests, "tied": aliases}

    def _coordinates(self) -> dict[str, Any]:
        """The tensors in which deltas count elements, plainly, and why there can be none."""
        coordinates = self.sync.coordinates(self._runner.model)
        tensors = {name: [dtype_name(dtype), list(shape)] for name, (dtype, shape) in coordinates.described.items()}
        return {
            "tensors": tensors,
            "tied": coordinates.tied,
            "renames": [list(pair) for pair in coordinates.renames],
            "delta_refusal": coordinates.refusal() if self._admin.has_weights else "there are no weights now",
        }

    def _plan_chain(self, **args: Any) -> dict[str, Any] | None:
        return self.sync.plan_chain(self._runner.model if self._admin.has_weights else None, **args)

    def _commit(self) -> None:
        self._admin.join_device()
        before = self._runner.model
        complete = self.sync.take(before)
        if complete is not before and self._copied(complete, before):
            self.sync.retire(complete)
            self._admin.announce_weights()
        else:
            self._admin.replace(complete)

    def _copied(self, complete: Decoder, before: Decoder) -> bool:
        """Copy the complete set to where the one that serves is, if that is worth while: a millisecond for each 2 GB
        on a GPU, where to capture all steps anew takes a second."""
        if not (self._backend.keeps_memory and self._admin.has_weights and not self._runner.hooks.draw):
            return False
        with torch.inference_mode(), self.sync.sums.replacing():
            return copy_weights(complete, before)

    def _collective_rpc(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return extension.call(self._extension, method, args, kwargs)
        finally:
            self._on_foreign_code()

    def _apply_model(self, function: str) -> Any:
        try:
            return extension.plain(extension.named(function)(self._runner.model))
        finally:
            self._on_foreign_code()

    def _on_foreign_code(self) -> None:
        self.sync.sums.forget()
        self._admin.announce_weights()
        self._backend.on_foreign_code(self._runner.model)
