"""A second set of weights, filled tensor by tensor while the first one serves.

It is a decoder of its own, so a sharded or fused parameter takes its parts exactly as at the start, and the swap is
one reference.  Every tensor is checked before it is taken.  Must not know where tensors come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from tokserve.errors import RequestError, StartError
from tokserve.layers.parameter import Scaled
from tokserve.models import kv_scales, weights
from tokserve.models.decoder import Decoder
from tokserve.models.load import EMBEDDING, HEAD
from tokserve.models.weights import Entry


class Staging:
    """`decoder` has no weights yet.  Errors are RequestErrors that list the tensors."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._wanted = decoder.parameters_by_name()
        self._came: set[str] = set()
        self._shared: dict[str, bytes] = {}  # digests of what came for a tied model's one tensor
        self._cache_scales: dict[str, Tensor] = {}  # of a float8 KV cache; they may be missing
        self._places = kv_scales.places(len(decoder.blocks))

    @property
    def quantization(self) -> str | None:
        """What the projections are kept as."""
        return self._decoder.quantization

    def announce(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype | str]]) -> None:
        """Refuse names, shapes and dtypes that do not fit, and what has come already, all in one list."""
        found: dict[str, Entry] = {}
        seen: set[str] = set()
        twice = []
        for name, shape, dtype in tensors:
            own = self._own(name)
            if own is None:
                continue
            if own in seen or own in self._came:
                twice.append(name)
            seen.add(own)
            if own not in self._places:
                found[own] = Entry(Path(), name, shape, dtype)
        wanted = dict(self._wanted)
        if self._decoder.spec.tied:
            wanted[HEAD] = wanted[EMBEDDING]
        problems = weights.misfits(found, wanted, complete=False)
        if twice:
            problems.append(weights.counted("sent twice", twice))
        if problems:
            raise RequestError(f"the tensors of the update do not fit the model: {'; '.join(problems)}")

    def put(self, name: str, tensor: Tensor | Scaled) -> None:
        """Take a tensor (a copy is made)."""
        self.announce([(name, tuple(tensor.shape), tensor.dtype)])
        own = self._own(name)
        if own is None:
            return
        if own in self._places:
            self._cache_scales[own] = _plain(tensor).clone()
        elif self._decoder.spec.tied and own in (EMBEDDING, HEAD):
            tensor = _plain(tensor)
            if not self._shared:
                self._wanted[EMBEDDING].load(tensor)
            self._shared[own] = self._digest(tensor)
        else:
            self._wanted[own].take(tensor)
        self._came.add(own)

    def finish(self) -> Decoder:
        """The decoder with all its weights."""
        came = self._came | ({EMBEDDING} if self._shared else set())
        missing = [name for name in self._wanted if name not in came]
        if missing:
            raise RequestError(f"the update is not complete: {weights.counted('missing', missing)}")
        if len(set(self._shared.values())) > 1:
            raise RequestError(f"{HEAD} differs from {EMBEDDING}, but the model ties them")
        if self._decoder.float8_cache:
            try:
                kv_scales.give(self._decoder, self._cache_scales)
            except StartError as error:
                raise RequestError(str(error)) from None
        return self._decoder

    def _own(self, name: str) -> str | None:
        return weights.own_name(name, self._decoder.spec.renames)

    def _digest(self, tensor: Tensor) -> bytes:
        plain = tensor.detach().to("cpu", self._decoder.dtype).contiguous()
        return hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().data).digest()


def _plain(tensor: Tensor | Scaled) -> Tensor:
    return tensor.dense() if isinstance(tensor, Scaled) else tensor
