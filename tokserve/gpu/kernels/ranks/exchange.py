"""Ranks exchange tensors through memory that each has of its own and the others have mapped.

**One launch is one exchange.** A rank writes its part into the slots that the others have for it, says so with a store
that other GPUs see after what was written before (release, system scope), waits until all others have said the same
(acquire), and reads what lies in its own memory: adds it in the order of the ranks, or puts it side by side.  The host
takes no part, so a launch can be recorded in a graph.

**Programs are independent.** Program p of a rank exchanges with the programs p of the others: it has slots, flags and a
counter of its own.  The counter is in memory and is raised by each exchange, so that a replayed graph goes on counting.
All ranks make the same exchanges in the same order, and so the counters of the programs p are equal: the number of an
exchange, its epoch.  A rank's program p waits only for programs p of the same epoch, which wait for nothing else, and
the programs of a launch are few enough to be on a GPU at once, so no program waits for ever.

**Two sets of slots suffice**, which odd and even epochs take in turns.  Rank a writes in epoch e over what it has
written to rank b in epoch e - 2.  Before, a has finished epoch e - 1, for which it has seen b's flag; b sets that flag
after all its launches before, those of epoch e - 2 and their reads among them.  So no rank waits for slots to be free.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, cdiv

Reading = Literal["nothing", "sum", "side by side", "copy"]

BLOCK = 1024  # words of 4 bytes that a program takes at once
COUNT_BYTES = 8  # of a flag and of a counter


class Inboxes(NamedTuple):
    """Memory of `size` ranks, equally divided: this is rank `rank`; `addresses` [size] int64, as this rank sees them.

    Each has counters [programs] and flags [programs, size], int64, zero at first, then slots [2, size, programs,
    capacity] of words of 4 bytes.
    """

    rank: int
    size: int
    addresses: Tensor
    programs: int
    capacity: int

    @property
    def words(self) -> int:
        """The most that one launch exchanges."""
        return self.programs * self.capacity


def header_bytes(size: int, programs: int) -> int:
    """Bytes of counters and flags, which are in front."""
    return cdiv(COUNT_BYTES * programs * (1 + size), 16) * 16


def inbox_bytes(size: int, programs: int, capacity: int) -> int:
    """Bytes of a rank's memory; `capacity` words of a program, a multiple of BLOCK."""
    assert capacity % BLOCK == 0
    return header_bytes(size, programs) + 4 * 2 * size * programs * capacity


@triton.jit
def publish(flag_ptr, epoch, INTERPRETED: tl.constexpr):
    """Set a flag of another rank; who sees it, sees what this program has written.  A plain store, as a GPU that is
    reached over PCIe has no atomic operations for others."""
    if INTERPRETED:
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [flag_ptr, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def published(flag_ptr, INTERPRETED: tl.constexpr):
    """The value of a flag of this rank."""
    if INTERPRETED:
        value = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    else:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [flag_ptr], dtype=tl.int64, is_pure=False, pack=1
        )
    return value


@triton.jit
def counts_at(address):
    """The counters and flags of a rank, in memory that begins at `address`."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def slot_at(address, odd, writer, program, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr):
    """The words that a rank has written for a program, in memory that begins at `address`."""
    header: tl.constexpr = (8 * PROGRAMS * (1 + SIZE) + 15) // 16 * 16
    slots = (address + header).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(slots + ((odd * SIZE + writer) * PROGRAMS + program) * CAPACITY, 16)


@triton.jit
def exchange_kernel(
    part_ptr,  # [count] words
    out_ptr,
    addresses_ptr,
    count,
    share,  # words of a program, a multiple of BLOCK
    width,  # of a row of the part, where rows are put side by side
    rank,
    root,  # the rank that is written to, or copied from
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITES: tl.constexpr,  # to "all", "root", "no rank"
    READS: tl.constexpr,  # "nothing", "sum", "side by side", "copy"
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    inbox = tl.load(addresses_ptr + rank)
    epoch = tl.load(counts_at(inbox) + program) + 1
    odd = epoch % 2
    first = program * share
    for start in range(0, share, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = first + words < count
        if WRITES == "all":
            part = tl.load(part_ptr + first + words, inside)
            for reader in tl.static_range(SIZE):
                address = tl.load(addresses_ptr + reader)
                tl.store(slot_at(address, odd, rank, program, SIZE, PROGRAMS, CAPACITY) + words, part, inside)
        if WRITES == "root":
            part = tl.load(part_ptr + first + words, inside)
            address = tl.load(addresses_ptr + root)
            tl.store(slot_at(address, odd, rank, program, SIZE, PROGRAMS, CAPACITY) + words, part, inside)
    tl.debug_barrier()  # of this program: what all its threads have written comes before the flags
    for reader in tl.static_range(SIZE):
        flags = counts_at(tl.load(addresses_ptr + reader)) + PROGRAMS
        publish(flags + program * SIZE + rank, epoch, INTERPRETED)
    for writer in tl.static_range(SIZE):
        flags = counts_at(inbox) + PROGRAMS
        while published(flags + program * SIZE + writer, INTERPRETED) < epoch:
            pass
    tl.debug_barrier()
    for start in range(0, share, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = first + words < count
        if READS == "sum":
            slot = slot_at(inbox, odd, 0, program, SIZE, PROGRAMS, CAPACITY)
            total = tl.load(slot + words, inside, cache_modifier=".cg").to(tl.float32, bitcast=True)
            for writer in tl.static_range(1, SIZE):
                slot = slot_at(inbox, odd, writer, program, SIZE, PROGRAMS, CAPACITY)
                total += tl.load(slot + words, inside, cache_modifier=".cg").to(tl.float32, bitcast=True)
            tl.store(out_ptr + first + words, total.to(tl.int32, bitcast=True), inside)
        if READS == "side by side":
            row, column = (first + words) // width, (first + words) % width
            for writer in tl.static_range(SIZE):
                slot = slot_at(inbox, odd, writer, program, SIZE, PROGRAMS, CAPACITY)
                part = tl.load(slot + words, inside, cache_modifier=".cg")
                tl.store(out_ptr + (row.to(tl.int64) * SIZE + writer) * width + column, part, inside)
        if READS == "copy":
            slot = slot_at(inbox, odd, root, program, SIZE, PROGRAMS, CAPACITY)
            tl.store(out_ptr + first + words, tl.load(slot + words, inside, cache_modifier=".cg"), inside)
    tl.store(counts_at(inbox) + program, epoch)


def exchange(
    inboxes: Inboxes,
    part: Tensor,
    out: Tensor,
    *,
    writes: Literal["all", "root", "no rank"],
    reads: Reading,
    root: int = 0,
    width: int = 1,
) -> None:
    """One exchange of all ranks: `part` and `out` are flat words (int32) of equal numbers, but where rows of `width`
    words are put side by side in `out`.  What is not written or read may be any tensor."""
    words = part.numel()
    assert words <= inboxes.words, "more than fits into one exchange"
    share = cdiv(cdiv(words, inboxes.programs), BLOCK) * BLOCK
    exchange_kernel[(max(1, cdiv(words, max(1, share))),)](
        part,
        out,
        inboxes.addresses,
        words,
        share,
        width,
        inboxes.rank,
        root,
        SIZE=inboxes.size,
        PROGRAMS=inboxes.programs,
        CAPACITY=inboxes.capacity,
        BLOCK=BLOCK,
        WRITES=writes,
        READS=reads,
        INTERPRETED=triton.knobs.runtime.interpret,
        **EXACT,
    )


def as_words(tensor: Tensor) -> Tensor:
    """A contiguous tensor as flat words of 4 bytes."""
    flat = tensor.view(-1)
    assert flat.numel() * flat.element_size() % 4 == 0, "tensors of ranks have whole words"
    return flat.view(torch.int32)
