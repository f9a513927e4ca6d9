"""A device whose tensors have shapes and dtypes but no values: torch's "meta"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokserve.base.errors import StartError
from tokserve.gpu.compile import targets
from tokserve.gpu.kernels.launch import Gpu

META = torch.device("meta")
MEMORY = 64 << 30  # bytes that seem to be free: enough for a KV cache of any model, which takes none here
READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__index__")


class ReadsZeros(TorchFunctionMode):
    """Tensors on "meta" read as zeros on the host, and are equal to any other; indexing by a mask selects nothing.
    Weights that would be drawn on the host are zeros, too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name == "normal_":
            return args[0].zero_()
        if args and isinstance(args[0], Tensor) and args[0].device == META:
            if name == "cpu":
                return zeros(args[0])
            if name in READS:
                return getattr(zeros(args[0]), name)()
            if name in ("equal", "allclose"):
                return True
            if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
                return args[0].new_empty(0)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Zeros:
    """What a step's results read as."""

    values: list[NDArray[Any]]

    def arrays(self) -> list[NDArray[Any]]:
        return self.values


class MetaDevice:
    """The Accelerator protocol, see `runner.device`, for a GPU that is not there: nothing is stored or computed."""

    torch_device = META

    def __init__(self, gpu: Gpu) -> None:
        self._architecture = gpu.architecture
        self.has_float8 = targets.has_float8(gpu)

    def require_float8(self, option: str) -> None:
        if not self.has_float8:
            raise StartError(f"option {option}: {self._architecture} is older than sm_{targets.FLOAT8}")

    def free_memory(self) -> int:
        return MEMORY

    def give_back_memory(self) -> None:
        pass

    def peak(self, run: Callable[[], object]) -> int:
        run()
        return 0

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(np.empty(array.shape, array.dtype)).to(META) for array in arrays]

    def fetch(self, tensors: Sequence[Tensor]) -> Zeros:
        return Zeros([zeros(tensor).numpy() for tensor in tensors])

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    def join(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def pin(self, memory: NDArray[Any]) -> None:
        pass

    def pool(self) -> None:
        pass

    def capture(self, run: Callable[[], Tensor], pool: object) -> Callable[[], Tensor]:
        run()
        return run


def zeros(tensor: Tensor) -> Tensor:
    """Zeros on the host of a tensor's shape and dtype."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
