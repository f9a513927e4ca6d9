"""Tensors that also exist in another form, which the next op may take instead.

Two ops that are one on a GPU are often called by layers that do not know each other: a norm and the product after it, a
product and the norm after it.  The first op returns a tensor of a subclass that holds the other form; an op that knows
the subclass takes it.  To everything else it is a tensor like others: whatever is done with it by torch, besides asking
for its shape, calls `materialize` first, and so does a launch of a kernel where the subclass asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_tensor: Any = Tensor  # whose properties stubs declare by their values
ASKING: frozenset[Any] = frozenset(  # functions that neither read nor change what a tensor holds
    {
        _tensor.shape.__get__,
        _tensor.dtype.__get__,
        _tensor.device.__get__,
        _tensor.ndim.__get__,
        Tensor.__len__,
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
        Tensor.element_size,
        Tensor.is_contiguous,
        Tensor.new_empty,
    }
)


class OtherForm(Tensor):
    """Base of these tensors.  What torch makes of one is a plain tensor."""

    ASKING = ASKING  # functions that are called without `materialize`

    def materialize(self) -> None:
        """Make the tensor one like others, before it is read or changed: the other form is no more."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in cls.ASKING:
                materialize((*args, *(kwargs or {}).values()))
            return func(*args, **(kwargs or {}))


def materialize(values: Iterable[Any]) -> None:
    """Materialize all tensors among these values, and among the elements of lists and tuples."""
    for value in values:
        if isinstance(value, OtherForm):
            value.materialize()
        elif isinstance(value, list | tuple):
            materialize(value)
