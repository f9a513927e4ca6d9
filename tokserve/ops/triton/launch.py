"""How every kernel here is launched: floating point fusion off, warps by the size of a block, programs by the card.

Whether a product and a sum become one rounding is part of a kernel's arithmetic, so it is never left to a compiler's
default.  This file must not know what a kernel computes.
"""

from __future__ import annotations

from functools import cache

import torch
import triton

EXACT = {"enable_fp_fusion": False}
PER_WARP = 256  # elements of a block that a warp of 32 threads takes
PER_MULTIPROCESSOR = 2  # programs of a kernel that takes its work items one after the other


def warps(block: int) -> int:
    """Warps for a block of that many elements: a power of two, 1 to 16."""
    return max(1, min(16, block // PER_WARP))


@cache
def programs(device: int | None) -> int:
    """Programs that keep GPU number `device` busy; None is a CPU, where the interpreter has them one by one."""
    if device is None:
        return 2
    return PER_MULTIPROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def home() -> torch.device:
    """Where the kernels' tensors lie: the current GPU, or the CPU under the interpreter."""
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
