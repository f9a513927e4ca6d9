"""The weights of a model as a checkpoint has them: tensors by name, read back from where they lie packed.

A delta counts elements in these tensors.  Each has the dtype to which loading rounds it, so that a full set of weights
that is rounded like that, and a delta on top of it, lead to the same bits.  A rank of several has a part of each
tensor, and the sum of that part: the ranks' sums add up to the tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokserve.base.errors import Conflict
from tokserve.layers.parameter import Parameter
from tokserve.layers.places import NOWHERE, Indices, Place, TensorPart
from tokserve.models.decoder import Decoder
from tokserve.models.provenance import EMBEDDING, HEAD
from tokserve.rl.sums import COLUMNS, Sums, bits_of, in_threads, partial_sum, set_checksum, tensor_sum

CHUNK = 1 << 20  # elements that are read at a time
Parts = Mapping[str, tuple[TensorPart | None, tuple[int, ...]]]  # by name: what a rank has of a tensor of that shape


def of_one_rank(sums: Callable[[], Sums], parts: Parts) -> Sums:
    """The sums of whole tensors where no other rank has parts of them."""
    return sums()


@dataclass(frozen=True, slots=True)
class PartDelta:
    """What of a tensor's delta is here: elements by their number in the tensor, and in this rank's part of it."""

    indices: Indices
    local: Indices
    values: Tensor


class Coordinates:
    """`described`: dtype and shape of each tensor by its name in the model; a tied model's embedding is the one.

    `total`: the sums of whole tensors from those of this rank's parts, which it computes with the function that it is
    given; none if that returns none.  All ranks call it.
    """

    def __init__(self, decoder: Decoder, total: Callable[[Callable[[], Sums], Parts], Sums] = of_one_rank) -> None:
        self._total = total
        self._parameters = decoder.parameters_by_name()
        self.described = {name: (one.source_dtype, one.shape) for name, one in self._parameters.items()}
        self.tied = {HEAD: EMBEDDING} if decoder.spec.tied else {}
        self.renames = decoder.spec.renames
        self._has_experts = decoder.spec.has_experts
        self._quantized = decoder.quantization is not None

    def refusal(self) -> str | None:
        """Why single elements cannot be replaced; None: they can."""
        lost = [name for name, one in self._parameters.items() if one.held != NOWHERE and not one.places()]
        if not lost:
            return None
        if self._has_experts or not self._quantized:
            return (
                f"{len(lost)} of the weights ({lost[0]}, ...) are of experts or packed in parts, whose single elements "
                "are not replaced: push full weights"
            )
        return (
            f"{len(lost)} weights ({lost[0]}, ...) are quantized in memory, and their values before that are not kept: "
            "push full weights, or deltas by a directory that begins with full ones"
        )

    def places(self, name: str) -> list[Place]:
        """Where this rank's part of a tensor has to be written; the first can be read."""
        return list(self._parameters[name].places())

    def held(self, name: str, indices: Indices, values: Tensor) -> PartDelta:
        """The changed elements of a tensor that this rank has."""
        held = self._parameters[name].held
        if held is None:
            return PartDelta(indices, indices, values)
        inside, local = held.local(indices, self.described[name][1])
        return PartDelta(indices[inside], local, values[torch.from_numpy(inside)])

    def held_values(self, name: str, tensor: Tensor) -> tuple[Tensor, int]:
        """This rank's part of a whole tensor, and the sum of that part."""
        held = self._parameters[name].held
        if held is None:
            return tensor, tensor_sum(tensor)
        part = held.taken(tensor).contiguous()
        return part, tensor_sum(held.spread(lambda first, last: part[first:last], 0, torch.zeros_like(tensor)))

    def sums(self) -> Sums:
        """The sums of all parts, which are read: about a second for two gigabytes."""
        return in_threads((name, partial(self._sum, name)) for name in self._parameters)

    def checksum(self, sums: Callable[[], Sums]) -> str:
        """The checksum of the set whose parts here have these sums."""
        parts = {name: (one.held, one.shape) for name, one in self._parameters.items()}
        return set_checksum(self._total(sums, parts), self.described)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), in host memory.  Raises Conflict if this rank has only parts of them."""
        if any(one.share < 1.0 for one in self._parameters.values()):
            raise Conflict("after a delta no rank has whole tensors to compute checksums of; weight_info has the set's")
        for name, parameter in self._parameters.items():
            dtype, shape = self.described[name]
            yield name, torch.cat([part for _, part in self._parts(parameter)]).to(dtype).view(shape)

    def _sum(self, name: str) -> int:
        parts = self._parts(self._parameters[name])
        return sum(partial_sum(bits_of(part), start) for start, part in parts) % (1 << 64)

    def _parts(self, parameter: Parameter) -> Iterator[tuple[int, Tensor]]:
        """(first element, elements) of a tensor, in order, each part but the last a multiple of COLUMNS long; zeros for
        those that another rank has, or nothing."""
        held, rows = parameter.held, parameter.shape[0]
        width = math.prod(parameter.shape[1:])
        step = COLUMNS // math.gcd(width, COLUMNS)
        step *= max(1, CHUNK // (step * width))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            if held is None or held.meets(first, last):
                read = parameter.places()[0].read
                if held is None:
                    part = read(first, last)
                else:
                    empty = torch.zeros(last - first, *parameter.shape[1:], dtype=parameter.source_dtype)
                    part = held.spread(read, first, empty)
                yield first * width, part.to("cpu", parameter.source_dtype).contiguous().view(-1)
