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
from tokserve.models import float8, kv_scales, weights
from tokserve.models.decoder import Decoder
from tokserve.models.provenance import EMBEDDING, HEAD, Provenance
from tokserve.models.weights import Entry


class Staging:
    """`decoder` has no weights yet.  Errors are RequestErrors that list the tensors.  `checksums`: compute those
    of pushed tensors.

    Where its config.json says how float8 weights are scaled, a weight may come as float8, and its scale for itself.
    `check_finite`: `finish` refuses weights that are not.
    """

    def __init__(self, decoder: Decoder, *, checksums: bool = True, check_finite: bool = True) -> None:
        self._decoder = decoder
        self.provenance = decoder.provenance = Provenance(enabled=checksums)
        self._check_finite = check_finite
        self._not_finite: list[str] = []  # in the order in which they came
        self._wanted = decoder.parameters_by_name()
        self._known = self._wanted | ({HEAD: self._wanted[EMBEDDING]} if decoder.spec.tied else {})
        self._block = decoder.spec.float8_block
        self._pairs = float8.Pairs()
        self._came: set[str] = set()
        self._shared: dict[str, bytes] = {}  # digests of what came for a tied model's one tensor
        self._cache_scales: dict[str, Tensor] = {}  # of a float8 KV cache; they may be missing
        self._places = kv_scales.places(len(decoder.blocks))

    def announce(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype | str]]) -> None:
        """Refuse names, shapes and dtypes that do not fit, and what has come already, all in one list."""
        found: dict[str, Entry] = {}
        seen: set[str] = set()
        twice = []
        for name, shape, dtype in tensors:
            own = self._own(name)
            if own is None:
                continue
            if (one := _by_any_name(own)) in seen or one in self._came:
                twice.append(name)
            seen.add(one)
            if own not in self._places and not self._is_scale(own, shape, dtype):
                means = torch.float32 if self._is_float8(own, dtype) else dtype
                found[own] = Entry(Path(), name, shape, means)
        problems = weights.misfits(found, self._known, complete=False)
        if twice:
            problems.append(weights.counted("sent twice", twice))
        if self._block is None and any(entry.dtype == torch.float8_e4m3fn for entry in found.values()):
            problems.append("config.json has no quantization_config that says how float8 is scaled")
        if problems:
            raise RequestError(f"the tensors of the update do not fit the model: {'; '.join(problems)}")

    def push(self, name: str, tensor: Tensor) -> None:
        """Take a pushed tensor (a copy is made) and record its checksum."""
        self.put(name, tensor)
        self.provenance.add_pushed(name, tensor)

    def put(self, name: str, tensor: Tensor | Scaled) -> None:
        """Take a tensor (a copy is made); the caller records in `provenance` where it came from."""
        self.announce([(name, tuple(tensor.shape), tensor.dtype)])
        own = self._own(name)
        if own is None:
            return
        self._came.add(_by_any_name(own))
        if self._check_finite and not all(is_finite(part, self._decoder.dtype) for part in _parts(tensor)):
            self._not_finite.append(name)
        if own in self._places:
            self._cache_scales[own] = _plain(tensor).clone()
            return
        weight = own if self._is_float8(own, tensor.dtype) else float8.scaled_by(own)
        if weight is None and own in self._known:
            self._take(own, tensor)
        elif weight is not None and self._block is not None:
            whole = self._pairs.add(weight, _plain(tensor), self._block)
            if whole is not None:
                self._take(weight, whole)

    def _take(self, own: str, tensor: Tensor | Scaled) -> None:
        if self._decoder.spec.tied and own in (EMBEDDING, HEAD):
            tensor = _plain(tensor)
            if not self._shared:
                self._wanted[EMBEDDING].load(tensor)
            self._shared[own] = self._digest(tensor)
        else:
            self._wanted[own].take(tensor)

    def _is_float8(self, own: str, dtype: torch.dtype | str) -> bool:
        """Whether a tensor is a matrix of the model stored as float8, which has a scale."""
        wanted = self._known.get(own)
        stored = dtype == torch.float8_e4m3fn and self._block is not None
        return stored and wanted is not None and len(wanted.shape) == 2

    def _is_scale(self, own: str, shape: tuple[int, ...], dtype: torch.dtype | str) -> bool:
        """Whether a tensor is the scale of a matrix, or another that comes with float8 and is of no use."""
        if self._block is None:
            return False
        wanted = self._known.get(float8.scaled_by(own) or "")
        if wanted is None or len(wanted.shape) != 2:
            return float8.is_unused(own)
        return dtype in weights.FLOATS.values() and shape in float8.scale_shapes(wanted.shape, self._block)

    def finish(self) -> Decoder:
        """The decoder with all its weights."""
        came = self._came | ({EMBEDDING} if self._shared else set())
        unscaled, scales = self._pairs.single()
        kinds = (
            ("missing", [name for name in self._wanted if name not in came]),
            ("without the scale that float8 has", unscaled),
            ("whose scale came, but not as float8", scales),
        )
        if problems := [weights.counted(kind, names) for kind, names in kinds if names]:
            raise RequestError(f"the update is not complete: {'; '.join(problems)}")
        if self._not_finite:
            count = len(self._not_finite)
            others = f", nor are {count - 1} others" if count > 1 else ""
            raise RequestError(
                f"{self._not_finite[0]} is not finite in {str(self._decoder.dtype).removeprefix('torch.')}{others} "
                "(--check-weights)",
                code="weights_not_finite",
            )
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


def _by_any_name(own: str) -> str:
    """The same for all names of one weight's scale."""
    weight = float8.scaled_by(own)
    return own if weight is None else weight + float8.SCALES[0]


def is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite, and still is when it becomes a `dtype`.  One pass, which makes no copy."""
    if tensor.numel() == 0:
        return True
    if tensor.dtype == torch.float8_e4m3fn:  # which has no infinity: all bits but the sign are NaN
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(torch.stack((low, high)).to(dtype)).all())


def _parts(tensor: Tensor | Scaled) -> tuple[Tensor, ...]:
    return (tensor.values, tensor.scales) if isinstance(tensor, Scaled) else (tensor,)


def _plain(tensor: Tensor | Scaled) -> Tensor:
    return tensor.dense() if isinstance(tensor, Scaled) else tensor
