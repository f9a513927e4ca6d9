"""Registers the C++ implementations, named "cpp": they allocate outputs and pass tensors to the extension.

Importing this module raises ImportError where the extension was not built.  The extension checks its arguments: a wrong
shape or dtype raises ValueError, anything but a CPU tensor TypeError.  `new_empty` gets sizes as separate arguments and
a dtype only where it differs, which halves torch's time for it.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops.cpu import (  # noqa: F401 - they register their implementations
    attention,
    dense,
    elementwise,
    float8,
    gradients,
    latent,
    lora,
    mixture,
    quant,
    recurrent,
    sampling,
    wna16,
)

if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError("this torch has no DLPack exchange table for C")
_C.use_tensors(Tensor, Tensor.__dlpack_c_exchange_api__)
_C.set_threads(torch.get_num_threads())
atexit.register(_C.set_threads, 1)


def set_threads(count: int, cpus: Sequence[int] = ()) -> bool:
    """Compute with `count` threads, the calling one included; results do not depend on the number.

    `cpus`: one per thread; all but the calling thread are bound to theirs.  Returns False if the system refused that.
    """
    return bool(_C.set_threads(count, list(cpus)))
