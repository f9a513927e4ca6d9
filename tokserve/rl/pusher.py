"""How weights are pushed: sent, or written to a directory that servers read; deltas where that works.

The transport is a `WeightChannel`, which has the calls of an update: HTTP with or without a process group or memory of
a GPU, or the engine of an `LLM`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from .delta_directory import WeightDirectory
from .deltas import DeltaLabel, Deltas, dtype_name, file_pieces, tensors_of
from .push import (
    Offered,
    PushedWeights,
    PushResult,
    ServerTensors,
    file_of,
    is_large,
    is_rounded,
    num_changed,
    sparse_broadcast,
)
from .reader import open_reader, read_whole
from .sums import Sums
from .weight_pairs import Pairs, Weights, copied_parts, in_parts, named_tensors, stay

T = TypeVar("T")
CURED_BY_FULL = ("base_mismatch", "delta_unsupported", "checksum_mismatch", "not_a_delta")  # codes of errors


class WeightChannel(Protocol):
    """The calls of a weight update.  `handle`: says which update is meant; what `start` returned of it.  `failures`:
    the errors that its methods raise.  `not_opened`: errors of `start` after which no update of ours is open."""

    @property
    def failures(self) -> tuple[type[Exception], ...]: ...

    @property
    def not_opened(self) -> tuple[type[Exception], ...]: ...

    def refusal(self, error: Exception) -> tuple[str | None, str]:
        """The code of one of `failures`, if the server refused with one, and the message."""

    async def served_weights(self, *, checksum: bool = False, tensors: bool = False) -> dict[str, Any]:
        """The reply of GET /weight_info."""

    async def start(self, base: dict[str, Any]) -> dict[str, Any]:
        """Open an update; `base`: of a delta, what must be served."""

    async def put_file(self, pieces: AsyncIterator[bytes], handle: dict[str, Any]) -> None:
        """Stage a safetensors file."""

    async def finish(self, body: dict[str, Any]) -> dict[str, Any]:
        """Commit: {"weight_version", "epoch"}."""

    async def abort(self, handle: dict[str, Any]) -> None:
        """Roll back."""

    async def load_dir(self, body: dict[str, Any]) -> dict[str, Any]:
        """An update from a directory: {"weight_version", "epoch"}."""

    @property
    def has_group(self) -> bool:
        """Whether there is a process group."""

    @property
    def sends_on_device(self) -> bool:
        """Whether `broadcast` sends all tensors of a part from where they are; else they go as files."""

    async def broadcast(
        self, announced: dict[str, Any], tensors: list[Tensor], *, packed: bool, handle: dict[str, Any]
    ) -> None:
        """Announce tensors and send them over the group, or from where they are."""


@asynccontextmanager
async def transaction(channel: WeightChannel, base: dict[str, str] | None = None) -> AsyncIterator[dict[str, Any]]:
    """A weight update around the block, which has to finish it; it is rolled back if the block raises.  Yields what the
    calls of the block say besides, so that they mean no other update, which took over from this one."""
    closed = False
    handle: dict[str, Any] = {}
    try:
        try:
            started = await channel.start(dict(base or {}))
        except channel.not_opened:
            closed = True  # not opened by this call; after any other error, it may have been
            raise
        handle = {name: started[name] for name in ("update_id",) if name in started}
        yield handle
        closed = True
    finally:
        if not closed:
            with suppress(*channel.failures):  # already rolled back, or the server has exited
                await channel.abort(handle)


def announcement(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The `update_info` of tensors that are sent packed, in this order."""
    return {
        "names": list(tensors),
        "dtype_names": [dtype_name(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "packed": True,
    }


class Pusher:
    """Pushes over one channel, and remembers what the server has got, where deltas are wanted."""

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel
        self._server: ServerTensors | None = None
        self._pushed: PushedWeights | None = None
        self._keeping: asyncio.Future[None] | None = None  # the kept copy is brought up to date
        self._epoch = 0
        self._commit: dict[str, Any] = {}  # options of the commit
        self._directories: dict[Path, tuple[WeightDirectory, PushedWeights | None]] = {}
        self._written: dict[tuple[Path, str], str] = {}  # checksums by directory and version

    async def push(
        self,
        weights: Weights,
        version: str | None,
        *,
        delta: bool,
        directory: str | Path | None,
        anchor_every: int,
        recompute_kv: bool = False,
    ) -> PushResult:
        """Push weights; the arguments are those of `AsyncClient.push`."""
        self._commit = {"recompute_kv": True} if recompute_kv else {}
        if self._keeping is not None:
            await asyncio.shield(self._keeping)  # a caller that gives up does not end it
        if directory is not None and version is None:
            raise ValueError("what is written to a directory needs a version")
        named = await self._named(weights)
        server = self._server if named is not None else None  # what is read once is for the server that is there
        server = server or await self._ask()
        if directory is not None and version is not None:
            target = Path(directory).resolve()
            return await self._push_by_directory(
                target, named or weights, version, delta=delta, anchor_every=anchor_every
            )
        if not delta:
            return await self._push_parts(named or weights, version)
        if named is None and self._pushed is not None and self._pushed.described != server.described:
            self._pushed = None
        offered = await self._offered(server, named or weights, self._pushed)
        reason = _obstacle(server, self._pushed, offered)
        if self._pushed is not None and reason is None:
            result = await self._push_delta(self._pushed, offered, version)
            if isinstance(result, PushResult):
                return result
            reason = result
        if named is not None:
            server = await self._ask()  # another server may have taken the place of the last one
            offered = Offered(*server.collected(named))
        return await self._push_kept(server, offered, version, reason)

    async def _named(self, weights: Weights) -> dict[str, Tensor] | None:
        """All tensors, if they stay."""
        return await asyncio.to_thread(named_tensors, weights) if stay(weights) else None

    async def _offered(self, server: ServerTensors, weights: Weights, pushed: PushedWeights | None) -> Offered:
        """What is to be pushed; of weights that do not stay, copies, or the changes from what was pushed."""
        if isinstance(weights, dict):
            return Offered(*server.collected(weights))
        if pushed is not None:
            return await read_whole(weights, partial(pushed.found, server))
        return Offered(*await read_whole(weights, server.copied), copied=True)

    async def update(self, weights: Weights, version: str | None, *, recompute_kv: bool) -> dict[str, Any]:
        """Replace all weights by these, as they are: {"weight_version", "epoch"}."""
        self._commit = {"recompute_kv": True} if recompute_kv else {}
        named = await self._named(weights)
        device = None if self._channel.sends_on_device else "cpu"
        async with open_reader(named or weights, partial(copied_parts, device=device)) as parts:
            return (await self._send(parts, version))[0]

    async def _ask(self) -> ServerTensors:
        self._server = ServerTensors.read(await self._channel.served_weights(tensors=True))
        return self._server

    async def _push_delta(self, pushed: PushedWeights, offered: Offered, version: str | None) -> PushResult | str:
        """The result, or why all weights have to be pushed."""
        part_label = pushed.label_of_part(str(self._epoch + 1) if version is None else version)
        base = {"base_version": part_label.base_version, "base_checksum": part_label.base_checksum}
        deltas, size = Deltas(), 0
        known_changes, sums = offered.changes or (None, dict(pushed.sums))
        try:
            async with transaction(self._channel, base) as handle:
                parts = pushed.parts(offered.known, sums) if known_changes is None else iter([known_changes])
                while (part := await asyncio.to_thread(next, parts, None)) is not None:
                    deltas |= part
                    if is_large(deltas, pushed):
                        raise _DeltaTooLarge
                    size += await self._send_delta(pushed, part, part_label, handle)
                label = pushed.label(sums, part_label.version)
                finish = {"weight_version": label.version, "checksum": label.checksum} | self._commit | handle
                done = await self._channel.finish(finish)
        except _DeltaTooLarge:
            return "more than a quarter of the weights changed"
        except self._channel.failures as error:
            code, message = self._channel.refusal(error)
            if code not in CURED_BY_FULL:
                raise
            return message
        # at once: the caller may go on without the event loop
        self._keeping = asyncio.get_running_loop().run_in_executor(None, pushed.commit, deltas, sums, label)
        self._epoch = done["epoch"]
        return _result(done, "delta", (size, num_changed(deltas), pushed.num_elements), None)

    async def _send_delta(
        self, pushed: PushedWeights, deltas: Deltas, label: DeltaLabel, handle: dict[str, Any]
    ) -> int:
        if not self._channel.has_group:
            size, pieces = await asyncio.to_thread(file_of, deltas, label)
            await self._channel.put_file(each_piece(pieces), handle)
            return size
        announced, tensors = sparse_broadcast(deltas, {name: pushed.described[name][1] for name in deltas})
        if announced["names"]:
            await self._channel.broadcast(announced, tensors, packed=False, handle=handle)
        return sum(tensor.nbytes for tensor in tensors)

    async def _push_kept(
        self, server: ServerTensors, offered: Offered, version: str | None, reason: str | None
    ) -> PushResult:
        """Push everything, and keep a copy."""
        self._pushed, pushed = None, None
        if offered.known.keys() == server.described.keys():
            pushed = await asyncio.to_thread(PushedWeights.of, server, offered.known, copied=offered.copied)
        sent = dict(offered.others) | dict(offered.known if pushed is None else pushed.tensors)
        done, size, elements = await self._send(each_piece(in_parts(RoundedTensors(server, sent).items())), version)
        self._epoch = done["epoch"]
        if pushed is not None:
            pushed.version = done["weight_version"]
            self._pushed = pushed
        return _result(done, "full", (size, elements, elements), reason)

    async def _push_parts(self, weights: Weights, version: str | None) -> PushResult:
        """Push everything, a part at a time, and keep nothing."""
        self._pushed = None
        server = await self._ask()  # another server may have taken the place of the last one
        device = None if self._channel.sends_on_device else "cpu"

        def parts(pairs: Pairs) -> Iterator[dict[str, Tensor]]:
            return in_parts((name, tensor) for name, tensor, _ in server.copies(pairs, device))

        async with open_reader(weights, parts) as reader:
            done, size, elements = await self._send(reader, version)
        self._epoch = done["epoch"]
        return _result(done, "full", (size, elements, elements), None)

    async def _send(
        self, parts: AsyncIterator[dict[str, Tensor]], version: str | None
    ) -> tuple[dict[str, Any], int, int]:
        """An update of these: the reply to its commit, and the bytes and elements that were sent."""
        size = elements = 0
        part = await anext(parts, None)  # before the update is opened, so that what is wrong with it is told first
        async with transaction(self._channel) as handle:
            while part is not None:
                size += await self._send_part(part, handle)
                elements += sum(tensor.numel() for tensor in part.values())
                part = await anext(parts, None)
            return await self._channel.finish({"weight_version": version} | self._commit | handle), size, elements

    async def _send_part(self, part: Mapping[str, Tensor], handle: dict[str, Any]) -> int:
        if self._channel.sends_on_device:
            await self._channel.broadcast(announcement(part), list(part.values()), packed=True, handle=handle)
            return sum(tensor.nbytes for tensor in part.values())
        size = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal size
            for piece in file_pieces(part):
                size += len(piece)
                yield piece

        await self._channel.put_file(body(), handle)
        return size

    async def _push_by_directory(
        self, target: Path, weights: Weights, version: str, *, delta: bool, anchor_every: int
    ) -> PushResult:
        server = self._server or await self._ask()
        directory, pushed = self._directories.get(target) or (WeightDirectory(target, anchor_every), None)
        if pushed is not None and (not delta or pushed.described != server.described):
            pushed = None
        offered = await self._offered(server, weights, pushed)
        known, others = offered.known, offered.others
        if others or known.keys() != server.described.keys():
            lost = sorted([*others, *(server.described.keys() - known.keys())])
            raise ValueError(f"the server has other tensors: {', '.join(lost[:5])}")
        directory.anchor_every = anchor_every
        self._directories[target] = directory, None  # until it is written
        if pushed is None:
            reason = "nothing was written before" if delta else None
            fresh = await asyncio.to_thread(PushedWeights.of, server, known, copied=offered.copied)
            fresh.version = version
            size = await asyncio.to_thread(directory.write, (version, fresh.checksum), fresh.tensors, None)
            mode, count, pushed = "full", fresh.num_elements, fresh
        else:
            changes = offered.changes
            if changes is None:
                changes = await asyncio.to_thread(pushed.changes, known)
            deltas, sums = changes
            label, reason = pushed.label(sums, version), None
            size = await asyncio.to_thread(_write, directory, pushed, (deltas, sums, label))
            mode, count = "delta", num_changed(deltas)
        self._directories[target] = directory, pushed
        # not by its version, which earlier files may have too
        done = await self._channel.load_dir({"weight_dir": str(target), "weight_version": None} | self._commit)
        self._epoch = done["epoch"]
        is_reused = self._written.setdefault((target, version), pushed.checksum) != pushed.checksum
        self._written[target, version] = pushed.checksum
        elements = pushed.num_elements
        return PushResult(done["weight_version"], done["epoch"], mode, size, count, elements, reason, is_reused)


def _result(done: Mapping[str, Any], mode: str, counts: tuple[int, int, int], reason: str | None) -> PushResult:
    """The result of an update whose commit was replied to with `done`; `counts`: bytes, changed elements, elements."""
    is_reused: bool = done.get("version_reused", False)
    return PushResult(done["weight_version"], done["epoch"], mode, *counts, reason, is_reused)


class RoundedTensors(Mapping[str, Tensor]):
    """Tensors as a server rounds them, one at a time."""

    def __init__(self, server: ServerTensors, tensors: Mapping[str, Tensor]) -> None:
        self._server, self._tensors = server, tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        rounds = name in self._server.described and is_rounded(tensor)
        dtype = self._server.described[name][0] if rounds else tensor.dtype
        return tensor.to("cpu", dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _write(directory: WeightDirectory, pushed: PushedWeights, delta: tuple[Deltas, Sums, DeltaLabel]) -> int:
    """Write a delta, and a full file if its turn has come."""
    deltas, sums, label = delta
    written = tensors_of(deltas)
    pushed.commit(deltas, sums, label)
    full = pushed.tensors if directory.needs_anchor else None
    return directory.write((label.version, label.checksum), full, (label, written))


def _obstacle(server: ServerTensors, pushed: PushedWeights | None, offered: Offered) -> str | None:
    """Why no delta can be sent."""
    if server.refusal is not None:
        return server.refusal
    if offered.others:
        return f"{min(offered.others)} is none of the tensors that a delta can change"
    if pushed is None:
        return "nothing was pushed before with delta=True"
    if offered.known.keys() != pushed.tensors.keys():
        return "other tensors were pushed before"
    return None


class _DeltaTooLarge(Exception):
    """Raised when so much changed that all weights are pushed instead."""


async def each_piece(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
