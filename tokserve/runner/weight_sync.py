"""The device's side of a weight update: gathers a second set of weights, and hands it over when it is complete.

Its methods run in a background thread, one at a time and in order; only `take` and `interrupt` are called from another
thread.  After any failure nothing is staged.  The engine decides when an update begins and when it takes effect.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
from safetensors import SafetensorError

from tokserve import checkpoint
from tokserve.config import BACKENDS, PACKING, WeightsConfig
from tokserve.device import Device
from tokserve.errors import Conflict, RequestError, StartError
from tokserve.models import weights
from tokserve.models.checksums import checksums
from tokserve.models.decoder import Decoder
from tokserve.models.formats.pick import checkpoint_format
from tokserve.models.staging import Staging
from tokserve.rl import broadcast
from tokserve.rl.broadcast import TransferGroup
from tokserve.runner import weight_sources as sources

SPARE = 1.1  # free memory over the size of the weights that staging beside them needs


class GroupOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`init_info` of gloo and nccl; `rank_offset` is this server's rank.  An announcement may differ in the packing."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    backend: str | None = None


class WeightSync:
    """`blank` makes a decoder without weights; `num_bytes` says how large a set of weights is, `device` what memory
    there is for another one."""

    def __init__(
        self,
        config: WeightsConfig,
        blank: Callable[[], Decoder],
        num_bytes: Callable[[], int],
        device: Device,
    ) -> None:
        self._config = config
        chosen: dict[str, Any] = dict(config.weight_transfer_config or {})
        self._backend = chosen.pop("backend", "disk")
        self._chosen_packing = self._packing = chosen
        self._blank = blank
        self._num_bytes = num_bytes
        self._device = device
        self._staging: Staging | None = None
        self._complete: Decoder | None = None
        self._old: Decoder | None = None  # replaced, not yet given back
        self._group: TransferGroup | None = None
        self._meeting = threading.Event()  # set: the trainer is not waited for
        self._stream: tuple[str, sources.SafetensorsStream] | None = None

    # --- the backend ---

    def init(self, options: dict[str, Any]) -> dict[str, Any]:
        """Make the backend ready; with gloo and nccl that means to meet the trainer."""
        self._meeting = threading.Event()  # from here on an interrupt is meant for this trainer
        backend = options.get("backend", self._backend)
        if backend not in BACKENDS:
            raise RequestError(f"backend must be one of {', '.join(BACKENDS)}", field="init_info.backend")
        if backend not in broadcast.BACKENDS:
            if "master_address" in options:
                raise RequestError(
                    f"the backend is {backend}, which forms no process group: start the server with "
                    '--weight-transfer-config and {"backend": "gloo"} or "nccl"',
                    field="init_info.master_address",
                )
            return {"message": "Weight transfer initialized", "backend": backend}
        try:
            group = msgspec.convert(options, GroupOptions)
        except msgspec.ValidationError as error:
            raise RequestError(f"init_info: {error}", field="init_info") from None
        if not 0 < group.rank_offset < group.world_size:
            raise RequestError("rank_offset must be from 1 to world_size - 1", field="init_info.rank_offset")
        if not 0 < group.master_port < 1 << 16:
            raise RequestError("master_port must be from 1 to 65535", field="init_info.master_port")
        self.shutdown()
        try:
            address = socket.gethostbyname(group.master_address)
        except OSError as error:
            raise RequestError(f"master_address: {error.strerror or error}", field="init_info.master_address") from None
        self._group = TransferGroup(
            backend, address, group.master_port, group.rank_offset, group.world_size,
            self._config.weight_transfer_timeout, self._meeting,
        )  # fmt: skip
        packing = {name: value for name in PACKING if (value := getattr(group, name)) is not None}
        self._packing = self._chosen_packing | packing
        return {"message": "Weight transfer initialized", "backend": backend}

    def shutdown(self) -> dict[str, Any]:
        """Let go of the backend."""
        if self._group is not None:
            self._group.close()
            self._group = None
        return {"message": "Weight transfer shut down"}

    def interrupt(self) -> None:
        """From another thread: make what waits for a trainer fail, a meeting or a transfer."""
        self._meeting.set()
        if self._group is not None:
            self._group.interrupt()

    # --- the update ---

    def begin(self, have_weights: bool) -> bool:
        """Prepare for tensors; whether the weights that serve can stay where they are meanwhile."""
        where = self._config.weight_staging
        room = not have_weights or self._device.free_memory() > SPARE * self._num_bytes()
        config = self._config
        self._staging = Staging(
            self._blank(), checksums=config.weight_checksums, check_finite=config.check_weights == "finite"
        )
        return not have_weights or where == "beside" or (where == "auto" and room)

    def abort(self) -> None:
        """Drop what is staged."""
        self._staging = self._complete = self._stream = None
        self._device.give_back_memory()

    def receive(self, source: dict[str, Any]) -> str | None:
        """Stage the tensors of a source: {"weight_dir"}, or an announcement for the backend.  Of a directory, the stamp
        of its files: they are the same ones as long as it is."""
        whole = False
        staging = self._opened()
        try:
            stamp = None
            if "weight_dir" in source or "path" in source:
                stamp = self._read_directory(staging, source)
            else:
                self._take_announced(staging, source)
            whole = True
        finally:
            if not whole:
                self.abort()
        return stamp

    def _read_directory(self, staging: Staging, source: dict[str, Any]) -> str:
        [(field, name), *others] = source.items()
        if others or not isinstance(name, str):
            raise RequestError("weight_dir (or path) must be a string, and stand alone", field=field)
        allowed = self._config.allowed_weight_dirs
        directory = sources.allowed_directory(name, allowed, field)
        try:
            sources.check_files(directory, ("config.json",), allowed, field)
            hf = checkpoint.read_json(directory, "config.json") or {}
            catalogue = weights.catalogue(
                directory, lambda files: sources.check_files(directory, files, allowed, field)
            )
            stamp = weights.stamp(catalogue)
            entries = weights.by_weight(catalogue, checkpoint_format(hf))
            staging.announce(((name, e.shape, e.dtype) for name, e in entries.items()), whole=True)
            for name, weight in weights.stream(entries):
                staging.put(name, weight)
            staging.provenance.add_files(catalogue, stamp)
        except (StartError, OSError, SafetensorError) as error:  # they name it with links followed
            raise RequestError(str(error).replace(str(directory), name), field=field) from None
        return stamp

    def _take_announced(self, staging: Staging, source: dict[str, Any]) -> None:
        announced = sources.announcement(self._packing | source)
        declared = announced.declared()
        staging.announce((name, shape, dtype) for name, dtype, shape in declared)
        if announced.segment is not None:
            tensors = sources.shared_memory(announced, declared)
        elif self._group is not None:
            size = announced.packed_buffer_size_bytes
            tensors = broadcast.receive(self._group, declared, packed=announced.packed, buffer_bytes=size)
        else:
            raise Conflict("there is no transfer engine: call init_weight_transfer_engine first")
        for name, tensor in tensors:
            staging.push(name, tensor)

    def feed(self, stream: str, chunk: bytes, last: bool, broken: bool) -> None:
        """Stage a piece of a safetensors file."""
        whole = False
        staging = self._opened()
        if self._stream is not None and self._stream[0] != stream:
            raise Conflict("the tensors of another request are still coming")
        try:
            if self._stream is None:
                self._stream = stream, sources.SafetensorsStream(staging.announce, staging.push)
            if broken:
                raise RequestError("the sender left before the body's end")
            self._stream[1].feed(chunk)
            if last:
                self._stream[1].end()
                self._stream = None
            whole = True
        finally:
            if not whole:
                self.abort()

    def finish(self) -> None:
        """Make sure that every weight is there."""
        staging = self._opened()
        self._staging = None
        if self._stream is not None:
            self.abort()
            raise Conflict("tensors are still coming")
        self._complete = staging.finish()

    def is_same(self, current: Decoder) -> bool:
        """Whether the complete set has the bits of the one that serves."""
        return self._complete is not None and checksums(self._complete) == checksums(current)

    def take(self, old: Decoder) -> Decoder:
        """The complete set, once, for the old one, which `forget` gives back: that takes longer than a step."""
        self._old = old
        complete, self._complete = self._complete, None
        if complete is None:
            raise RuntimeError("no complete set of weights is staged")
        return complete

    def forget(self) -> None:
        """Give back the memory of replaced weights."""
        self._old = None
        self._device.give_back_memory()

    def _opened(self) -> Staging:
        if self._staging is None:
            raise Conflict("no weight update is open")
        return self._staging
