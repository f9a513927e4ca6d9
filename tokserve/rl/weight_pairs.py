"""Weights as a trainer gives them: pairs of (name, tensor), each of which is read before the next one is requested.

What makes the pairs may merge an adapter and take it out again, gather shards and free them, or write one buffer again
and again: a tensor is its own only until then.  So tensors are copied as they come, in parts of a bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .deltas import SAFETENSORS, file_pieces
from .module_tensors import adds_adapters, checkpoint_name, is_of_adapter, module_tensors

Weights = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Pairs = Iterable[tuple[str, Tensor]]
PART_BYTES = 1 << 28  # of tensors that are copied and sent together: a part ends with the one that reaches this
WHAT = "weights are a module, a mapping or pairs of (name, tensor)"


@contextmanager
def reading(weights: Weights) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Pairs of (name of the checkpoint, plain tensor), each valid until the next one is requested.

    They raise TypeError that names the tensor for what is none of `Weights` or has no values in memory, ValueError for
    a name that comes twice.  If the block fails, what the caller iterates over is not left half way: it may have to
    undo something at its end, and other processes may be gathering the same tensors.
    """
    if isinstance(weights, nn.Module):
        tensors = module_tensors(weights)
        try:
            yield _checked(tensors)
        finally:
            tensors.close()
        return
    if not isinstance(weights, Iterable) or isinstance(weights, str | bytes | Tensor):
        raise TypeError(f"{WHAT}, not {type(weights).__name__}")
    pairs = iter(weights.items() if isinstance(weights, Mapping) else weights)
    complete = False
    try:
        yield _checked(pairs, checkpoint_name)
        complete = True
    finally:
        if not complete:
            for _ in pairs:
                pass


def stay(weights: Weights) -> bool:
    """Whether tensors keep their values while others are read, so that several may be read at once, and again."""
    if isinstance(weights, nn.Module):
        return not adds_adapters(weights)
    return isinstance(weights, dict | list | tuple)


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """All tensors at once, of weights that stay.  Raises as `reading`."""
    with reading(weights) as pairs:
        return dict(pairs)


def _checked(pairs: Iterator[Any], rename: Callable[[str], str] = str) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{WHAT}, not of {type(pair).__name__}")
        name = rename(pair[0])
        if is_of_adapter(name):
            raise TypeError(
                f"{pair[0]} is a part of an adapter: push peft's module itself, which is merged then, or the "
                "adapter alone with push_adapter"
            )
        if name in names:
            raise ValueError(f"{name} comes twice")
        names.add(name)
        yield name, plain_tensor(name, pair[1])


def plain_tensor(name: str, given: Any) -> Tensor:
    """A dense tensor in memory without a gradient.  Raises TypeError."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is no tensor, but of type {type(given).__name__}")
    if hasattr(given, "ds_shape") and tuple(given.ds_shape) != tuple(given.shape):
        raise TypeError(f"{name} is partitioned by DeepSpeed: push inside of GatheredParameters")
    tensor = given.detach()
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local"):
        tensor = _whole(name, tensor)
    reason = ""
    if tensor.is_meta:
        reason = "is a meta tensor, which has no values"
    elif tensor.layout != torch.strided or tensor.is_nested:
        reason = f"has the layout {str(tensor.layout).removeprefix('torch.')}: make it dense"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        reason = f"is a {type(given).__name__}, which keeps its values in another way: make it a plain tensor"
    elif tensor.dtype not in SAFETENSORS:
        reason = f"has dtype {tensor.dtype}, which weights and their parts do not have"
    elif not _is_in_memory(tensor):
        reason = "has no memory any more, as a shard that was gathered and freed again: read it while it is gathered"
    if reason:
        raise TypeError(f"{name} {reason}")
    return tensor.as_subclass(Tensor)


def _whole(name: str, tensor: Any) -> Tensor:
    """A DTensor as a tensor, if this process has all of it: to gather it, all processes would have to be here."""
    if tensor.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in tensor.placements):
        raise TypeError(
            f"{name} is sharded over {tensor.device_mesh.size()} processes: push pairs of (name, tensor.full_tensor()),"
            " and go through the same pairs in the other processes"
        )
    local: Tensor = tensor.to_local()
    return local.detach()


def _is_in_memory(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last + 1) * tensor.element_size()


def own_copy(tensor: Tensor, dtype: torch.dtype | None = None, device: str | None = "cpu") -> Tensor:
    """A contiguous copy of that dtype (None: the tensor's); `device` None: where the tensor is."""
    return tensor.to(device or tensor.device, dtype or tensor.dtype, copy=True).contiguous()


def in_parts(pairs: Pairs) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, as many at a time as reach PART_BYTES; `pairs` are tensors that stay."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in pairs:
        part[name] = tensor
        size += tensor.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def copied_parts(pairs: Pairs, device: str | None = "cpu") -> Iterator[dict[str, Tensor]]:
    """Likewise of tensors that do not stay: copies of them."""
    return in_parts((name, own_copy(tensor, device=device)) for name, tensor in pairs)


def weight_files(weights: Weights) -> Generator[Iterator[bytes], None, None]:
    """safetensors files with all of them, each in pieces, to be read one after the other.  Raises as `reading`, and
    TypeError for no tensors at all."""
    with reading(weights) as pairs:
        parts = copied_parts(pairs)
        first = next(parts, None)
        if first is None:
            raise TypeError(f"{WHAT}, and here there are none")
        yield file_pieces(first)
        for part in parts:
            yield file_pieces(part)
