"""The device's side of a weight update: gathers a second set of weights, and hands it over when it is complete.

Its methods run in a background thread, one at a time and in order; only `take` and `interrupt` are called from another
thread.  After any failure nothing is staged.  The engine decides when an update begins and when it takes effect.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from tokserve import checkpoint
from tokserve.base.errors import Conflict, RequestError, StartError, TransferFailed, invalid_value
from tokserve.config import BACKENDS, PACKING, WeightsConfig
from tokserve.features.lora.adapter_files import is_adapter
from tokserve.features.lora.pushed_adapter import AdapterStaging
from tokserve.features.weights import delta_sources
from tokserve.features.weights import weight_sources as sources
from tokserve.features.weights.checksums import checksums
from tokserve.features.weights.coordinates import Coordinates, Parts, of_one_rank
from tokserve.features.weights.delta_staging import DeltaStaging, check_base
from tokserve.features.weights.local_memory import local_tensors
from tokserve.features.weights.served_sums import ServedSums
from tokserve.features.weights.staging import Staging
from tokserve.models import weights
from tokserve.models.decoder import Decoder
from tokserve.models.formats import checkpoint_format
from tokserve.protocol.commands import RANDOM_SEED
from tokserve.protocol.params import INT32_MAX
from tokserve.rl import broadcast
from tokserve.rl.broadcast import TransferGroup
from tokserve.rl.delta_directory import VersionFile, chain, described, files_of, is_chain
from tokserve.rl.deltas import FORMAT
from tokserve.rl.errors import TransferError, WeightsConflict, WeightsError
from tokserve.rl.rendezvous import KINDS, Rendezvous
from tokserve.rl.sums import Sums
from tokserve.runner.device import Device

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
    rendezvous: str | None = None
    group_name: str = ""


@contextmanager
def request_errors() -> Iterator[None]:
    """Errors of the trainer's package, which knows nothing of requests, as those of a request."""
    try:
        yield
    except WeightsError as error:
        kind = {WeightsConflict: Conflict, TransferError: TransferFailed}.get(type(error), RequestError)
        raise kind(error.message, field=error.field, code=error.code) from None


class WeightSync:
    """`blank` makes a decoder without weights; `num_bytes` says how large a set of weights is, `device` what memory
    there is for another one; `total` adds up the sums of ranks."""

    def __init__(
        self,
        config: WeightsConfig,
        blank: Callable[[], Decoder],
        num_bytes: Callable[[], int],
        device: Device,
        total: Callable[[Callable[[], Sums], Parts], Sums] = of_one_rank,
    ) -> None:
        self._config = config
        chosen: dict[str, Any] = dict(config.weight_transfer_config or {})
        self._backend = chosen.pop("backend", "disk")
        self._chosen_packing = self._packing = chosen
        self._blank = blank
        self._num_bytes = num_bytes
        self._device = device
        self._total = total
        self._staging: Staging | DeltaStaging | AdapterStaging | None = None
        self._complete: Decoder | DeltaStaging | None = None
        self.sums = ServedSums()
        self._old: Decoder | None = None  # replaced, not yet given back
        self._group: TransferGroup | None = None
        self._meeting = threading.Event()  # set: the trainer is not waited for
        self._stream: tuple[str, sources.SafetensorsStream] | None = None

    # --- the backend ---

    @request_errors()
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
            raise invalid_value(error, "init_info") from None
        device = self._device.torch_device.type
        if backend in broadcast.ON_A_CARD and device != broadcast.BACKENDS[backend][1]:
            raise RequestError(
                f"the backend {backend} needs a CUDA device, and this server's is {device}: use gloo",
                field="init_info.backend",
            )
        if not 0 < group.rank_offset < group.world_size:
            raise RequestError("rank_offset must be from 1 to world_size - 1", field="init_info.rank_offset")
        if not 0 < group.master_port < 1 << 16:
            raise RequestError("master_port must be from 1 to 65535", field="init_info.master_port")
        rendezvous = self._rendezvous(backend, group)
        self.shutdown()
        try:
            address = socket.gethostbyname(group.master_address)
        except (OSError, ValueError, TypeError) as error:  # the last two: of what can be no name
            reason = error.strerror or error if isinstance(error, OSError) else "it is not the name of a host"
            raise RequestError(f"master_address: {reason}", field="init_info.master_address") from None
        self._group = TransferGroup(
            backend,
            address,
            group.master_port,
            group.rank_offset,
            group.world_size,
            self._config.weight_transfer_timeout,
            self._meeting,
            rendezvous,
        )
        packing = {name: value for name in PACKING if (value := getattr(group, name)) is not None}
        self._packing = self._chosen_packing | packing
        return {"message": "Weight transfer initialized", "backend": backend}

    def _rendezvous(self, backend: str, group: GroupOptions) -> Rendezvous:
        """How the trainer's group is met: as vLLM's is over nccl, which is where the backend's name comes from."""
        kind = group.rendezvous or ("vllm" if backend in broadcast.ON_A_CARD else "tokserve")
        if kind not in KINDS:
            raise RequestError(f"rendezvous must be one of {', '.join(KINDS)}", field="init_info.rendezvous")
        if kind == "vllm" and backend not in broadcast.ON_A_CARD:
            raise RequestError(
                "vLLM's rendezvous sends an NCCL id, and so needs the backend nccl and a CUDA device: over gloo, "
                "rendezvous must be tokserve or torch",
                field="init_info.rendezvous",
            )
        return Rendezvous(kind, group.group_name)

    def shutdown(self) -> dict[str, Any]:
        """Let go of the backend."""
        if self._group is not None:
            self._group.close()
            self._group = None
        return {"message": "Weight transfer shut down"}

    def interrupt(self) -> None:
        """Make what waits for a trainer fail, a meeting or a transfer; from another thread."""
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

    def begin_delta(self, model: Decoder, version: str, base_version: str, base_checksum: str) -> None:
        """Prepare for the changes of weights of that version and checksum; `version`: that of `model`, which serves.
        Raises Conflict, which names both, if they are not the same, or if no changes can be made."""
        coordinates = self.coordinates(model)

        def sums() -> Sums:
            self._check_delta(coordinates, "base_version")
            if self.sums.known(model) is None:  # to compute them takes long
                check_base(base_version, base_checksum, version, None)
            return self.sums.of(model, coordinates)

        checksum = coordinates.checksum(sums)
        check_base(base_version, base_checksum, version, checksum)
        is_finite = self._config.check_weights == "finite"
        served = self.sums.of(model, coordinates)
        self._staging = DeltaStaging(model, coordinates, (version, checksum), served, check_finite=is_finite)

    def begin_adapter(self, staging: AdapterStaging) -> None:
        """Prepare for the tensors of an adapter."""
        self._staging = staging

    def checksum(self, model: Decoder) -> str:
        """The checksum of the weights that serve.  Raises Conflict if they are quantized."""
        coordinates = self.coordinates(model)

        def sums() -> Sums:
            self._check_delta(coordinates, None)
            return self.sums.of(model, coordinates)

        return coordinates.checksum(sums)

    def coordinates(self, model: Decoder) -> Coordinates:
        """The coordinates of a model that this rank has, or a part of it."""
        return Coordinates(model, self._total)

    @staticmethod
    def _check_delta(coordinates: Coordinates, field: str | None) -> None:
        if why := coordinates.refusal():
            raise Conflict(why, field=field, code="delta_unsupported")

    @request_errors()
    def plan_chain(
        self, model: Decoder | None, weight_dir: str, version: str | None, served_version: str
    ) -> dict[str, Any] | None:
        """Which files of a directory lead to a version: {"files", "version", "checksum", "base": the checksum that a
        chain of deltas begins with, else None}.  None: the directory is an ordinary checkpoint.  {"adapter": True}: it
        is an adapter's.  `model`: what serves, if anything does.
        """
        if is_adapter(self._allowed(weight_dir)[0]):
            return {"adapter": True}
        files: list[VersionFile] | None = None
        has_base = False

        def sums(coordinates: Coordinates, model: Decoder) -> Sums:
            nonlocal files, has_base
            files = self._chain_files(weight_dir)
            versions = {version for file in files or [] for version in (file.identity[0], *(file.base or ())[:1])}
            has_base = served_version in versions and coordinates.refusal() is None
            return self.sums.of(model, coordinates) if has_base else {}

        if model is None:
            files = self._chain_files(weight_dir)
        else:
            coordinates = self.coordinates(model)
            served = coordinates.checksum(partial(sums, coordinates, model))
        if files is None:
            return None
        have = (served_version, served) if has_base else None
        way = chain(files, version, have)
        names = [file.path.name for file in way]
        if have is not None and (not way or way[0].base is not None):
            version, checksum = way[-1].identity if way else have
            return {"files": names, "version": version, "checksum": checksum, "base": have[1]}
        version, checksum = way[-1].identity
        return {"files": names, "version": version, "checksum": checksum, "base": None}

    def _chain_files(self, weight_dir: str) -> list[VersionFile] | None:
        """The files of a directory of deltas; None: it is an ordinary checkpoint."""
        directory, may_read = self._allowed(weight_dir)
        return files_of(directory, may_read) if is_chain(directory) else None

    def _allowed(self, weight_dir: str) -> tuple[Path, Callable[[Sequence[str]], None]]:
        """The directory, and what refuses its links to elsewhere."""
        allowed = self._config.allowed_weight_dirs
        directory = sources.allowed_directory(weight_dir, allowed, "weight_dir")
        return directory, lambda names: sources.check_files(directory, names, allowed, "weight_dir")

    def abort(self) -> None:
        """Drop what is staged."""
        if isinstance(self._staging, DeltaStaging):
            self._staging.close()
        self._staging = self._complete = self._stream = None
        self._device.give_back_memory()

    @request_errors()
    def receive(self, source: dict[str, Any]) -> str | None:
        """Stage the tensors of a source: {"weight_dir"}, {"random_seed"}, or an announcement for the backend.  Of a
        directory, the stamp of its files: they are the same ones as long as it is."""
        whole = False
        staging = self._opened()
        try:
            stamp = None
            if RANDOM_SEED in source:
                self._draw(staging, source)
            elif "files" in source and not isinstance(staging, AdapterStaging):
                stamp = self._read_chain(staging, **source)
            elif "weight_dir" not in source and "path" not in source:
                self._take_announced(staging, source)
            elif isinstance(staging, AdapterStaging):
                raise RequestError("an adapter's directory is loaded with load_lora_adapter, with no update open")
            elif isinstance(staging, DeltaStaging):
                raise RequestError("a directory of deltas is an update by itself: send weight_dir with no update open")
            else:
                stamp = self._read_directory(staging, source)
            whole = True
        finally:
            if not whole:
                self.abort()
        return stamp

    def _draw(self, staging: Staging | DeltaStaging | AdapterStaging, source: dict[str, Any]) -> None:
        """Random weights, which show what a push that follows leaves out."""
        seed = source[RANDOM_SEED]
        if not isinstance(staging, Staging):
            raise RequestError("random weights replace all weights: send no delta and no adapter", field=RANDOM_SEED)
        if type(seed) is not int or not 0 <= seed <= INT32_MAX or len(source) > 1:
            raise RequestError(f"{RANDOM_SEED} must be from 0 to {INT32_MAX}, and the only field", field=RANDOM_SEED)
        staging.draw(seed)

    def _read_directory(self, staging: Staging, source: dict[str, Any]) -> str:
        [(field, name), *others] = source.items()
        if others or not isinstance(name, str):
            raise RequestError("weight_dir (or path) must be a string, and the only field", field=field)
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

    def _read_chain(self, staging: Staging | DeltaStaging, weight_dir: str, files: list[str]) -> str | None:
        """The files of `plan_chain`; their stamp is the checksum of the result."""
        directory, may_read = self._allowed(weight_dir)
        may_read(files)
        try:
            way = [described(directory / name) for name in files]
            if isinstance(staging, DeltaStaging):
                delta_sources.from_files(staging, way)
            else:
                delta_sources.full_from_files(staging, way)
        except OSError as error:
            raise RequestError(f"{weight_dir} cannot be read: {error.strerror}", field="weight_dir") from None
        return way[-1].identity[1] if way else None

    def _take_announced(self, staging: Staging | DeltaStaging | AdapterStaging, source: dict[str, Any]) -> None:
        is_delta = isinstance(staging, DeltaStaging) or (isinstance(staging, AdapterStaging) and staging.is_delta)
        announced = sources.announcement(source if is_delta else self._packing | source)
        if is_delta and announced.is_local:
            return delta_sources.from_local_memory(staging, announced)
        if isinstance(staging, DeltaStaging):
            return delta_sources.from_group(staging, announced, self._joined())
        if is_delta:
            raise RequestError("a delta of an adapter comes as a file or in shared memory", field="update_info.names")
        declared = announced.declared()
        staging.announce((name, shape, dtype) for name, dtype, shape in declared)
        if announced.is_local:
            with local_tensors(announced, declared, self._device.torch_device) as tensors:
                for name, tensor in tensors:
                    staging.push(name, tensor)
            return
        size = announced.packed_buffer_size_bytes
        for name, tensor in broadcast.receive_tensors(
            self._joined(), declared, packed=announced.packed, buffer_bytes=size
        ):
            staging.push(name, tensor)

    def _joined(self) -> TransferGroup:
        if self._group is None:
            raise Conflict("no weight transfer is prepared: call init_weight_transfer_engine first")
        return self._group

    @request_errors()
    def feed(self, stream: str, chunk: bytes, last: bool, broken: bool) -> None:
        """Stage a piece of a safetensors file."""
        whole = False
        staging = self._opened()
        if self._stream is not None and self._stream[0] != stream:
            raise Conflict("the tensors of another request are still coming")
        try:
            if self._stream is None:
                self._stream = stream, _file_stream(staging)
            if broken:
                raise RequestError("the client closed the connection before the end of the body")
            self._stream[1].feed(chunk)
            if last:
                self._stream[1].end()
                self._stream = None
            whole = True
        finally:
            if not whole:
                self.abort()

    @request_errors()
    def finish(self, checksum: str | None = None) -> dict[str, Any]:
        """Make sure that every weight is there: {"num_bytes": of what came}.  Of a delta also {"version": as its file
        says, "checksum"}; `checksum`: what its result must have."""
        staging = self._opened()
        self._staging = None
        if self._stream is not None:
            self.abort()
            raise Conflict("tensors are still coming")
        if isinstance(staging, AdapterStaging):
            return staging.finish(checksum)
        if isinstance(staging, DeltaStaging):
            staging.finish(checksum)
            self._complete = staging
            version = None if staging.label is None else staging.label.version
            return {"version": version, "checksum": staging.checksum, "num_bytes": staging.num_bytes}
        self._complete = staging.finish()
        return {"num_bytes": staging.num_bytes}

    def is_same(self, current: Decoder) -> bool:
        """Whether the complete set has the bits of the one that serves."""
        if isinstance(self._complete, DeltaStaging):
            return self._complete.checksum == self._complete.base_checksum
        return self._complete is not None and checksums(self._complete) == checksums(current)

    def take(self, old: Decoder) -> Decoder:
        """The complete set, once, for the old one, which `forget` gives back: that takes longer than a step.  A delta
        changes the old one where it is."""
        complete, self._complete = self._complete, None
        if complete is None:
            raise RuntimeError("no complete set of weights is staged")
        if isinstance(complete, DeltaStaging):
            with self.sums.changing(old, complete.sums):
                return complete.apply()
        self._old = old
        return complete

    def retire(self, model: Decoder) -> None:
        """This set has no use any more; `forget` gives it back."""
        self._old = model

    def forget(self) -> None:
        self._old = None
        self._device.give_back_memory()

    def _opened(self) -> Staging | DeltaStaging | AdapterStaging:
        if self._staging is None:
            raise Conflict("no weight update is open")
        return self._staging


def _file_stream(staging: Staging | DeltaStaging | AdapterStaging) -> sources.SafetensorsStream:
    """A reader of safetensors bodies."""
    if not isinstance(staging, Staging):
        return sources.SafetensorsStream(staging.announce, staging.push, staging.begin_file, delta_sources.FILE_DTYPES)
    return sources.SafetensorsStream(staging.announce, staging.push, _refuse_delta)


def _refuse_delta(metadata: dict[str, str]) -> None:
    if metadata.get("format") == FORMAT:
        raise RequestError(
            "the body is a delta: start the update with its base_version and base_checksum", field="base_version"
        )
