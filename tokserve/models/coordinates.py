"""The weights of a model as a checkpoint has them: tensors by name, read back from where they lie packed.

A delta counts elements in these tensors.  Each has the dtype to which loading rounds it, so that a full set of weights
that is rounded like that, and a delta on top of it, lead to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tokserve.layers.parameter import Parameter
from tokserve.layers.places import Place
from tokserve.models.decoder import Decoder
from tokserve.models.provenance import EMBEDDING, HEAD
from tokserve.rl.sums import COLUMNS, Sums, bits_of, in_threads, partial_sum, set_checksum

CHUNK = 1 << 20  # elements that are read at a time


class Coordinates:
    """`described`: dtype and shape of each tensor by its name in the model; a tied model's embedding is the one."""

    def __init__(self, decoder: Decoder) -> None:
        self._parameters = decoder.parameters_by_name()
        self.described = {name: (one.source_dtype, one.shape) for name, one in self._parameters.items()}
        self.tied = {HEAD: EMBEDDING} if decoder.spec.tied else {}
        self.renames = decoder.spec.renames
        self._has_experts = bool(decoder.spec.mixtures)
        self._quantized = decoder.quantization is not None

    def refusal(self) -> str | None:
        """Why single elements cannot be replaced; None: they can."""
        lost = [name for name, parameter in self._parameters.items() if not parameter.places()]
        if not lost:
            return None
        if self._has_experts:
            return (
                f"{len(lost)} weights ({lost[0]}, ...) are of a mixture of experts, of which single elements are not "
                "replaced: push full weights"
            )
        if not self._quantized:
            return (
                f"{len(lost)} weights ({lost[0]}, ...) are packed in parts, of which single elements are not replaced: "
                "push full weights"
            )
        return (
            f"{len(lost)} weights ({lost[0]}, ...) are quantized in memory, and their values before that are not kept: "
            "push full weights, or deltas by a directory that begins with full ones"
        )

    def place(self, name: str) -> Place:
        """Where a tensor can be read."""
        return self._parameters[name].places()[0]

    def places(self, name: str) -> list[Place]:
        """Where a tensor has to be written."""
        return list(self._parameters[name].places())

    def sums(self) -> Sums:
        """The sums of all tensors, which are read: about a second for two gigabytes."""
        return in_threads((name, partial(self._sum, name)) for name in self._parameters)

    def checksum(self, sums: Sums) -> str:
        """Of the set with these sums."""
        return set_checksum(sums, self.described)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), in host memory."""
        for name, parameter in self._parameters.items():
            dtype, shape = self.described[name]
            yield name, torch.cat([part for _, part in self._parts(parameter)]).to(dtype).view(shape)

    def _sum(self, name: str) -> int:
        parts = self._parts(self._parameters[name])
        return sum(partial_sum(bits_of(part), start) for start, part in parts) % (1 << 64)

    def _parts(self, parameter: Parameter) -> Iterator[tuple[int, Tensor]]:
        """(first element, elements) of a tensor, in order, each part but the last a multiple of COLUMNS long."""
        place, rows = parameter.places()[0], parameter.shape[0]
        width = math.prod(parameter.shape[1:])
        step = COLUMNS // math.gcd(width, COLUMNS)
        step *= max(1, CHUNK // (step * width))
        for first in range(0, rows, step):
            part = place.read(first, min(first + step, rows))
            yield first * width, part.to("cpu", parameter.source_dtype).contiguous().view(-1)
