"""Copies of KV blocks outside of the KV cache: slots in host memory, and files behind them.

The engine decides which block goes to which slot and which slot to a file; this file moves bytes.  A slot holds the
pages of one block of all layers, one tensor after the other.  Methods of different lanes run in different threads: a
slot is in the hands of one of them at a time, which the engine sees to as well.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy import copyto, frombuffer, uint8
from numpy.typing import NDArray

from tokserve.base.errors import NotFound, StartError
from tokserve.base.rooms import part
from tokserve.config import KVStorePlan
from tokserve.features.kv.kv_files import BlockFiles, FileError
from tokserve.features.kv.kv_identity import identity_parts
from tokserve.models.decoder import Decoder
from tokserve.protocol.kv_spec import KVSpec
from tokserve.runner import kvcache
from tokserve.runner.backend import Backend
from tokserve.runner.device import Accelerator
from tokserve.runner.features import Calls, RunnerContext, RunnerFeature

Bytes = NDArray[uint8]


class BlockContents(Protocol):
    """The bytes of KV blocks: of all tensors of the KV cache, one after the other."""

    def read(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        """Copy each block into its array."""

    def write(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        """Copy each array into its block."""


class HostBlocks:
    """`BlockContents` of a KV cache in the host's memory."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def read(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        for pages, place in self._tensors():
            for block, content in zip(blocks, contents, strict=True):
                copyto(content[place], pages[block])

    def write(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        for pages, place in self._tensors():
            for block, content in zip(blocks, contents, strict=True):
                copyto(pages[block], content[place])

    def _tensors(self) -> Iterator[tuple[Bytes, slice]]:
        """Every tensor of the KV cache as bytes [blocks, n], and where its blocks lie in a content."""
        start = 0
        for caches in self._backend.kv:
            for cache in caches:
                pages: Bytes = cache.view(cache.shape[0], -1).view(torch.uint8).numpy()
                end = start + pages.shape[1]
                yield pages, slice(start, end)
                start = end


class KVCopies:
    """`identify` computes the parts of what the KV depends on now.  Raises StartError."""

    def __init__(self, plan: KVStorePlan, backend: Backend, identify: Callable[[], dict[str, str]]) -> None:
        layout = backend.layout
        if not all(isinstance(spec, KVSpec) for spec in layout.specs):
            raise StartError("option kv_offloading_size: a model with recurrent states is not supported")
        self._identify = identify
        self.slot_bytes = sum(spec.block_bytes(layout.block_size) for spec in layout.specs)
        self.num_slots = plan.memory_bytes // self.slot_bytes
        if not self.num_slots:
            raise StartError(
                f"option kv_offloading_size: one KV block has {self.slot_bytes} bytes, and {plan.memory_bytes} are "
                "given"
            )
        try:
            memory = mmap.mmap(-1, self.num_slots * self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise StartError(
                f"option kv_offloading_size: {plan.memory_bytes} bytes cannot be allocated: {error}"
            ) from None
        self._slots: Bytes = frombuffer(memory, uint8).reshape(self.num_slots, self.slot_bytes)
        self._blocks: BlockContents = HostBlocks(backend)
        if isinstance(backend.device, Accelerator):
            self._blocks = part("gpu", "blocks")(backend, backend.device, self._slots)
        self._files = None
        if plan.directory is not None:
            self._files = BlockFiles(plan.directory, plan.disk_bytes, self.slot_bytes)
        self.methods: Calls = {
            "save_blocks": self._save,
            "load_blocks": self._load,
            "write_files": self._write,
            "read_files": self._read,
            "use_identity": self._use,
            "clear_files": self._clear,
            "read_blocks": self._read_blocks,
            "write_blocks": self._write_blocks,
        }

    def identity_parts(self) -> dict[str, str]:
        """What KV that is computed now depends on."""
        return self._identify()

    # --- between pages and slots ---

    def _save(self, blocks: list[int], slots: list[int]) -> float:
        """Pages to slots; the seconds that it took."""
        began = time.monotonic()
        self._blocks.read(blocks, [self._slots[slot] for slot in slots])
        return time.monotonic() - began

    def _load(self, blocks: list[int], slots: list[int]) -> float:
        """Slots to pages; the seconds that it took."""
        began = time.monotonic()
        self._blocks.write(blocks, [self._slots[slot] for slot in slots])
        return time.monotonic() - began

    # --- between pages and other servers ---

    def _read_blocks(self, blocks: list[int]) -> list[bytes]:
        """The content of pages, as a slot would hold it."""
        contents = [bytearray(self.slot_bytes) for _ in blocks]
        self._blocks.read(blocks, [frombuffer(content, uint8) for content in contents])
        return [bytes(content) for content in contents]

    def _write_blocks(self, blocks: list[int], contents: list[bytearray]) -> None:
        """Put these contents into pages."""
        self._blocks.write(blocks, [frombuffer(content, uint8) for content in contents])

    # --- between slots and files ---

    def _use(self, identity: bytes, parts: dict[str, str]) -> list[bytes]:
        """The keys of this identity that have files."""
        return [] if self._files is None else self._files.use(identity, parts)

    def _write(self, identity: bytes, keys: Sequence[bytes], slots: Sequence[int]) -> dict[str, Any]:
        """Slots to files: {"written", "deleted": keys, "failed": how many, "seconds"}."""
        files, began = self._files, time.monotonic()
        written, deleted = [], []
        if files is not None:
            for key, slot in zip(keys, slots, strict=True):
                is_written, evicted = files.write(identity, key, self._slots[slot].data)
                written += [key] if is_written else []
                deleted += evicted
        failed = len(keys) - len(written)
        return {"written": written, "deleted": deleted, "failed": failed, "seconds": time.monotonic() - began}

    def _read(self, identity: bytes, keys: Sequence[bytes], slots: Sequence[int]) -> dict[str, Any]:
        """Files to slots, up to the first that is not to be had: {"count", "damaged", "seconds"}."""
        began, count, damaged = time.monotonic(), 0, 0
        if self._files is not None:
            for key, slot in zip(keys, slots, strict=True):
                try:
                    if not self._files.read(identity, key, self._slots[slot].data):
                        break
                except FileError:
                    damaged += 1
                    break
                count += 1
        return {"count": count, "damaged": damaged, "seconds": time.monotonic() - began}

    def _clear(self) -> None:
        if self._files is not None:
            self._files.clear()


class RunnerCopies(RunnerFeature):
    """`copies` is None before the end of the start, whose facts identify what the blocks hold."""

    def __init__(self, context: RunnerContext, plan: KVStorePlan) -> None:
        self._context, self._plan = context, plan
        self.copies: KVCopies | None = None

    def on_start(self, facts: dict[str, Any]) -> None:
        """Take the memory.  Raises StartError."""
        runner, config, plan = self._context.runner, self._context.config, self._plan
        layout = runner.backend.layout
        _check(self._context)
        if (ranks := runner.ranks).size > 1:  # each keeps its part of the blocks
            directory = plan.directory and str(Path(plan.directory) / f"rank{ranks.rank}")
            memory, disk = (number // ranks.size for number in (plan.memory_bytes, plan.disk_bytes))
            plan = KVStorePlan(memory_bytes=memory, directory=directory, disk_bytes=disk)
        copies = KVCopies(plan, runner.backend, lambda: identity_parts(runner.model, layout, config, facts))
        facts |= {"kv_store_slots": copies.num_slots, "kv_block_bytes": copies.slot_bytes}
        self.copies = copies

    def background_calls(self) -> Calls:
        return {"kv_identity": self._identity}

    def copy_calls(self) -> Calls:
        return {} if self.copies is None else self.copies.methods

    def _identity(self) -> Any:
        if self.copies is None:
            raise NotFound("the runner keeps no copies of KV blocks")
        parts = self.copies.identity_parts
        consistent = self._context.offers.get("consistent")
        return parts() if consistent is None else consistent(parts)


def make(context: RunnerContext) -> RunnerCopies | None:
    plan = context.config.kv.store()
    return None if plan is None else RunnerCopies(context, plan)


def _check(context: RunnerContext) -> None:
    """Raise StartError for a model or options whose blocks cannot be copied."""
    runner = context.runner
    if not isinstance(runner.model, Decoder) or runner.model.implementation != "tokserve":
        raise StartError("option kv_offloading_size: is not supported with --model-impl transformers")
    if not context.config.cache.enable_prefix_caching:
        raise StartError("option kv_offloading_size: needs enable_prefix_caching")
    if runner.backend.routed is not None:
        raise StartError("options kv_offloading_size and enable_return_routed_experts exclude each other")
    if any(spec.dtype == kvcache.FLOAT8 for spec in runner.backend.layout.specs):
        raise StartError("option kv_offloading_size: a KV cache of float8 is not supported")
