"""How weights are pushed: sent, or written to a directory that servers read; deltas where that works.

The transport is a `WeightChannel`, which has the calls of an update: HTTP with or without a process group, or the
engine of an `LLM`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .delta_directory import WeightDirectory
from .deltas import DeltaLabel, Deltas, dtype_name, file_pieces, tensors_of
from .push import (
    PushedWeights,
    PushResult,
    ServerTensors,
    Weights,
    file_of,
    is_large,
    is_rounded,
    named_tensors,
    num_changed,
    sparse_broadcast,
)
from .sums import Sums

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

    async def broadcast(
        self, announced: dict[str, Any], tensors: list[Tensor], *, packed: bool, handle: dict[str, Any]
    ) -> None:
        """Announce tensors and send them over the group."""


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
        "names": list(tensors), "dtype_names": [dtype_name(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()], "packed": True,
    }  # fmt: skip


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

    async def push(
        self, weights: Weights, version: str | None, *, delta: bool, directory: str | Path | None, anchor_every: int,
        recompute_kv: bool = False,
    ) -> PushResult:  # fmt: skip
        """Push weights; the arguments are those of `AsyncClient.push`."""
        self._commit = {"recompute_kv": True} if recompute_kv else {}
        if self._keeping is not None:
            await asyncio.shield(self._keeping)  # a caller that gives up does not end it
        named = await asyncio.to_thread(named_tensors, weights)
        server = self._server or await self._ask()
        if directory is not None:
            if version is None:
                raise ValueError("what is written to a directory needs a version")
            target = Path(directory).resolve()
            return await self._push_by_directory(target, named, version, delta=delta, anchor_every=anchor_every)
        reason = None
        if delta:
            known, others = server.collected(named)
            reason = _obstacle(server, self._pushed, known, others)
            if self._pushed is not None and reason is None:
                result = await self._push_delta(self._pushed, known, version)
                if isinstance(result, PushResult):
                    return result
                reason = result
        return await self._push_full(named, version, keep=delta, reason=reason)

    async def update(self, weights: Weights, version: str | None, *, recompute_kv: bool) -> dict[str, Any]:
        """Replace all weights by these, as they are: {"weight_version", "epoch"}."""
        named, channel = named_tensors(weights), self._channel
        async with transaction(channel) as handle:
            if channel.has_group:
                await channel.broadcast(announcement(named), list(named.values()), packed=True, handle=handle)
            else:
                await channel.put_file(body_of(file_pieces(named)), handle)
            finish = {"weight_version": version} | ({"recompute_kv": True} if recompute_kv else {})
            return await channel.finish(finish | handle)

    async def _ask(self) -> ServerTensors:
        self._server = ServerTensors.read(await self._channel.served_weights(tensors=True))
        return self._server

    async def _push_delta(
        self, pushed: PushedWeights, known: Mapping[str, Tensor], version: str | None
    ) -> PushResult | str:
        """The result, or why all weights have to be pushed."""
        part_label = pushed.label_of_part(str(self._epoch + 1) if version is None else version)
        base = {"base_version": part_label.base_version, "base_checksum": part_label.base_checksum}
        deltas, sums, size = Deltas(), dict(pushed.sums), 0
        try:
            async with transaction(self._channel, base) as handle:
                parts = pushed.parts(known, sums)
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
        return PushResult(
            done["weight_version"], done["epoch"], "delta", size, num_changed(deltas), pushed.num_elements
        )

    async def _send_delta(
        self, pushed: PushedWeights, deltas: Deltas, label: DeltaLabel, handle: dict[str, Any]
    ) -> int:
        if not self._channel.has_group:
            size, pieces = await asyncio.to_thread(file_of, deltas, label)
            await self._channel.put_file(body_of(pieces), handle)
            return size
        announced, tensors = sparse_broadcast(deltas, {name: pushed.described[name][1] for name in deltas})
        if announced["names"]:
            await self._channel.broadcast(announced, tensors, packed=False, handle=handle)
        return sum(tensor.nbytes for tensor in tensors)

    async def _push_full(
        self, named: Mapping[str, Tensor], version: str | None, *, keep: bool, reason: str | None
    ) -> PushResult:
        self._pushed = None
        server = await self._ask()  # another server may have taken the place of the last one
        known, others = server.collected(named)
        pushed = None
        if keep and known.keys() == server.described.keys():
            pushed = await asyncio.to_thread(PushedWeights.of, server, known)
        sent: dict[str, Tensor] = dict(others) | (known if pushed is None else pushed.tensors)
        async with transaction(self._channel) as handle:
            size = await self._send_full(server, sent, handle)
            done = await self._channel.finish({"weight_version": version} | self._commit | handle)
        self._epoch = done["epoch"]
        if pushed is not None:
            pushed.version = done["weight_version"]
            self._pushed = pushed
        elements = sum(tensor.numel() for tensor in sent.values())
        return PushResult(done["weight_version"], done["epoch"], "full", size, elements, elements, reason)

    async def _send_full(self, server: ServerTensors, sent: Mapping[str, Tensor], handle: dict[str, Any]) -> int:
        rounded = RoundedTensors(server, sent)
        if self._channel.has_group:
            tensors = list(rounded.values())
            await self._channel.broadcast(
                announcement(dict(zip(rounded, tensors, strict=True))), tensors, packed=True, handle=handle
            )
            return sum(tensor.nbytes for tensor in tensors)
        size = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal size
            for piece in file_pieces(rounded):
                size += len(piece)
                yield piece

        await self._channel.put_file(body(), handle)
        return size

    async def _push_by_directory(
        self, target: Path, named: Mapping[str, Tensor], version: str, *, delta: bool, anchor_every: int
    ) -> PushResult:
        server = self._server or await self._ask()
        known, others = server.collected(named)
        if others or known.keys() != server.described.keys():
            lost = sorted([*others, *(server.described.keys() - known.keys())])
            raise ValueError(f"the server's tensors are other ones: {', '.join(lost[:5])}")
        directory, pushed = self._directories.get(target) or (WeightDirectory(target, anchor_every), None)
        directory.anchor_every = anchor_every
        self._directories[target] = directory, None  # until it is written
        if pushed is None or not delta:
            reason = "nothing was written before" if delta else None
            fresh = await asyncio.to_thread(PushedWeights.of, server, known)
            fresh.version = version
            size = await asyncio.to_thread(directory.write, (version, fresh.checksum), fresh.tensors, None)
            mode, count, pushed = "full", fresh.num_elements, fresh
        else:
            deltas, sums = await asyncio.to_thread(pushed.changes, known)
            label, reason = pushed.label(sums, version), None
            size = await asyncio.to_thread(_write, directory, pushed, (deltas, sums, label))
            mode, count = "delta", num_changed(deltas)
        self._directories[target] = directory, pushed
        body = {"weight_dir": str(target), "weight_version": version} | self._commit
        done = await self._channel.load_dir(body)
        self._epoch = done["epoch"]
        return PushResult(done["weight_version"], done["epoch"], mode, size, count, pushed.num_elements, reason)


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


def _obstacle(
    server: ServerTensors, pushed: PushedWeights | None, known: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> str | None:
    """Why no delta can be sent."""
    if server.refusal is not None:
        return server.refusal
    if others:
        return f"{min(others)} is none of the tensors that a delta can change"
    if pushed is None:
        return "nothing was pushed before with delta=True"
    if known.keys() != pushed.tensors.keys():
        return "other tensors were pushed before"
    return None


class _DeltaTooLarge(Exception):
    """Raised when so much changed that all weights are pushed instead."""


async def body_of(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Pieces of a body as the HTTP client takes them."""
    for piece in pieces:
        yield piece
