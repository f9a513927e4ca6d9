"""The C++ implementation of `add_lora`."""

from __future__ import annotations

from torch import Tensor

from tokserve import _C
from tokserve.ops import lora


@lora.add_lora.implement("cpp", device="cpu")
def add_lora(out: Tensor, *rest: object) -> None:
    _C.add_lora(out, *rest)
