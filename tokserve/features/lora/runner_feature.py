"""Adapters in the runner: read or pushed beside the steps, put into slots between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.base.errors import RequestError
from tokserve.features.lora.adapter_slots import LoraTables
from tokserve.models.decoder import Decoder
from tokserve.runner.features import Calls, RunnerContext, RunnerFeature


class RunnerAdapters(RunnerFeature):
    """The slots of adapters, with --enable-lora."""

    def __init__(self, context: RunnerContext) -> None:
        self._runner, self._offers = context.runner, context.offers
        self._slots: LoraTables | None = context.loaded["lora"]
        draft = context.runner.backend.draft
        if draft is not None and draft.first_layer == 0:  # it has the served model's layers
            assert isinstance(draft.model, Decoder)
            self.attach(draft.model)

    def attach(self, model: Decoder) -> None:
        if self._slots is not None:
            self._slots.attach(model)

    def num_bytes(self) -> Mapping[str, int]:
        return {} if self._slots is None else {"lora_bytes": self._slots.num_bytes()}

    def calls(self) -> Calls:
        return {"place_adapter": self._place}

    def background_calls(self) -> Calls:
        return {
            "begin_adapter": lambda **args: self._offers["stage_adapter"](self._tables.begin_push(**args)),
            "read_adapter": lambda **args: self._tables.read(**args),
            "drop_adapter": lambda key: self._tables.drop(key),
        }

    @property
    def _tables(self) -> LoraTables:
        if self._slots is None:
            raise RequestError("this server runs without --enable-lora")
        return self._slots

    def _place(self, slot: int) -> Any:
        self._runner.admin.join_device()
        return self._tables.place(slot)
