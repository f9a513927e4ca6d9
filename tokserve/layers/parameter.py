"""Where a checkpoint tensor goes: its expected shape and the function that takes it.

Layers say what they want under their own short names; a model joins these into checkpoint names, and
`models/weights` pours tensors in.  A `load` copies (a checkpoint file may be mapped into memory and change
later) and converts to the layer's dtype; loading again replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve import ops


@dataclass(frozen=True, slots=True)
class Scaled:
    """A weight [N,K] stored as float8 (e4m3), each `group` of a row's inputs with a scale of its own."""

    values: Tensor  # [N,K] float8
    scales: Tensor  # [G,N] float32
    group: int

    @property
    def shape(self) -> torch.Size:
        """[N,K]."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of what it means."""
        return self.scales.dtype

    def dense(self) -> Tensor:
        """What it means: [N,K] float32."""
        spread = self.scales.t().repeat_interleave(self.group, 1)
        return self.values.float() * spread[:, : self.values.shape[1]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """`load` takes one tensor of `shape` in any floating dtype; it is kept as `dtype`.

    `load_scaled` takes one that is stored as float8; None: `load` is given what it means.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    dtype: torch.dtype
    load_scaled: Callable[[Scaled], None] | None = None

    def take(self, tensor: Tensor | Scaled) -> None:
        """Load it, however it is stored."""
        if not isinstance(tensor, Scaled):
            self.load(tensor)
        elif self.load_scaled is None:
            self.load(tensor.dense())
        else:
            self.load_scaled(tensor)


def under(prefix: str, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """The same with `prefix.` before each name."""
    return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}


def owned_copy(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous copy in own memory, on the device of the bound ops; ValueError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"expected a tensor of shape {list(shape)}, found {list(tensor.shape)}")
    return torch.empty(shape, dtype=dtype, device=ops.torch_device).copy_(tensor)
