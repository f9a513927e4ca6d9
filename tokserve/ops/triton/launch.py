"""Launch options of the kernels: floating point fusion off, warps by the size of a block, programs by the GPU.

Whether a product and a sum are rounded once is part of a kernel's arithmetic, so it is not left to the compiler's
default.  Options that change no bit are in a table, tuning.json, by GPU architecture and size.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EXACT = {"enable_fp_fusion": False}
PER_WARP = 256  # elements of a block that a warp of 32 threads takes
TABLE = Path(__file__).with_name("tuning.json")


@triton.jit
def is_last_of(count_ptr, amount, total):
    """Add `amount` to what the programs that came here before have; whether that makes `total`.

    The last one sees what all of them wrote before they came, if it loads with the cache modifier ".cg", and leaves
    zero behind.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(count_ptr, amount, sem="acq_rel") + amount == total
    if is_last:
        tl.store(count_ptr, 0)
    return is_last


def warps(block: int) -> int:
    """Warps for a block of that many elements: a power of two, 1 to 16."""
    return max(1, min(16, block // PER_WARP))


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """Entries by kernel; the first that fits is used."""
    entries: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return entries


@cache
def tuned(kernel: str, device: int | None, **sizes: int) -> dict[str, Any]:
    """The table's entry for GPU number `device` (None: a CPU, where the interpreter runs) and these sizes."""
    return next(entry for entry in table()[kernel] if _fits(entry, _architecture(device), sizes))


def _fits(entry: dict[str, Any], architecture: str, sizes: dict[str, int]) -> bool:
    known = entry.get("arch", architecture) == architecture
    return known and all(size <= entry.get(name, size) for name, size in sizes.items())


@cache
def _architecture(device: int | None) -> str:
    return "" if device is None else "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@cache
def multiprocessors(device: int | None) -> int:
    """The number that the GPU has; 1 on a CPU, where the interpreter runs programs one by one."""
    return 1 if device is None else int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=4096)
def addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """A table of addresses on the device; one that is known costs no transfer."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def torch_device() -> torch.device:
    """The device of the kernels' tensors: the current GPU, or the CPU under the interpreter."""
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
