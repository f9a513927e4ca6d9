"""How a checkpoint stores weights: the `CheckpointFormat` protocol, and the format of plain tensors.

A stored tensor is a whole weight, or a part of one in a role that its format names.  `group` joins the parts that lie
in files; a live update collects them as they come.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokserve.base.rooms import part
from tokserve.layers.parameter import StoredWeight

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # in safetensors
FLOAT8 = "F8_E4M3"  # in safetensors
FLOAT8_DTYPES = (FLOAT8, torch.float8_e4m3fn)
DTYPES = FLOATS | {FLOAT8: torch.float8_e4m3fn}
INTEGERS = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}  # of parts of weights
ATTRIBUTES = ("quantization_config", "compression_config")  # of config.json
UNUSED = (  # of activations, all but those of `CACHE_SCALES`
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)
CACHE_SCALES = {  # a float8 cache's, as tools call them after a layer's name -> of keys (k), of values (v) or of both
    ".self_attn.k_scale": "k",
    ".self_attn.v_scale": "v",  # compressed-tensors, AutoFP8
    ".self_attn.kv_scale": "kv",  # AutoFP8 at first
    ".self_attn.k_proj.output_scale": "k",
    ".self_attn.v_proj.output_scale": "v",  # Quark, compressed-tensors at first
    ".self_attn.k_proj.k_scale": "k",
    ".self_attn.v_proj.v_scale": "v",  # ModelOpt
    ".self_attn.qkv_proj.k_scale": "k",
    ".self_attn.qkv_proj.v_scale": "v",
    ".self_attn.attn.k_scale": "k",
    ".self_attn.attn.v_scale": "v",
}
WHOLE = ""  # the role of a tensor that is a weight by itself


class Described(Protocol):
    """A tensor, or its description in a file's header, whose dtype may be one that only safetensors has a name for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""

    @property
    def dtype(self) -> torch.dtype | str:
        """The dtype of its elements."""


class Grouped(Described, Protocol):
    """A weight of a checkpoint; `parts`: by role, if it is stored in parts."""

    @property
    def parts(self) -> Mapping[str, Described]:
        """Empty for a whole one."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which weight a stored tensor belongs to, and in which role."""

    weight: str
    role: str = WHOLE


class CheckpointFormat(Protocol):
    """Which stored tensors form a weight: a weight is stored whole, or in one part for each role in `needs`, and
    perhaps for roles in `optional`."""

    @property
    def name(self) -> str:
        """The format's name, for messages."""

    @property
    def needs(self) -> frozenset[str]:
        """The roles of the parts that every weight has."""

    @property
    def optional(self) -> frozenset[str]:
        """The roles of parts that a weight may have as well."""

    def part(self, name: str, tensor: Described) -> Part | None:
        """What a stored tensor is; None: nothing that a model takes."""

    def shape(self, parts: Mapping[str, Described]) -> tuple[int, ...]:
        """The shape of the weight that all parts form."""

    def fits(self, role: str, tensor: Described, shape: tuple[int, ...]) -> bool:
        """Whether a tensor can have this role in a weight of `shape`."""

    def assemble(self, parts: Mapping[str, Tensor]) -> Tensor | StoredWeight:
        """The weight that all parts form; it may share their memory."""

    def incomplete(self, parts: Mapping[str, Collection[str]]) -> list[tuple[str, list[str]]]:
        """What an error says of weights of which only some roles are there, and of which: (kind, weights)."""

    def refusal(self, tensor: Described) -> str | None:
        """Why a tensor that stands for itself cannot be read, where the format knows more than its dtype."""

    def native_method(self, weights: Mapping[str, Grouped], *, has_float8: bool, rounded: bool) -> str | None:
        """The quantization whose products take what they multiply as it is stored; None: there is none.

        `weights`: those that a method of quantization holds.  `has_float8`: the device multiplies float8; `rounded`:
        activations are rounded to integers.
        """


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """Every tensor is a whole weight."""

    name: str = "dense"
    needs: frozenset[str] = frozenset((WHOLE,))
    optional: frozenset[str] = frozenset()

    def part(self, name: str, tensor: Described) -> Part:
        """The weight of that name."""
        return Part(name)

    def shape(self, parts: Mapping[str, Described]) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(parts[WHOLE].shape)

    def fits(self, role: str, tensor: Described, shape: tuple[int, ...]) -> bool:
        """Whether a whole tensor has the weight's shape."""
        return role == WHOLE and tuple(tensor.shape) == shape

    def assemble(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The tensor itself is the weight."""
        return parts[WHOLE]

    def incomplete(self, parts: Mapping[str, Collection[str]]) -> list[tuple[str, list[str]]]:
        """No weight can be incomplete: each is one tensor."""
        return []

    def refusal(self, tensor: Described) -> str | None:
        """Float8 numbers have scales, which another format knows."""
        if tensor.dtype in FLOAT8_DTYPES:
            return "config.json has no quantization_config that says how float8 is scaled"
        return None

    def native_method(self, weights: Mapping[str, Grouped], *, has_float8: bool, rounded: bool) -> str | None:
        """None: plain weights are multiplied as the options say."""
        return None


DENSE = DenseFormat()


def quantization_of(hf: Mapping[str, Any]) -> Any:
    """The entry of config.json that says how the checkpoint is quantized; None if it is not."""
    return next((hf[name] for name in ATTRIBUTES if hf.get(name) is not None), None)


def checkpoint_format(hf: Mapping[str, Any]) -> CheckpointFormat:
    """The format of the checkpoint with this config.json; of one that is not supported, `DENSE`."""
    if quantization_of(hf) is None:
        return DENSE
    chosen: CheckpointFormat = part("quantization", "checkpoint_format")(hf)
    return chosen


def is_unused(name: str) -> bool:
    """Whether a tensor of this name is one that no model takes, whatever the format: a scale of activations."""
    return name.endswith(UNUSED) and not name.endswith(tuple(CACHE_SCALES))


def group(checkpoint_format: CheckpointFormat, tensors: Mapping[str, Described]) -> dict[str, dict[str, str]]:
    """Weight -> role -> name of the stored tensor.  A tensor that is part of no complete weight stands for itself, so
    that a comparison with the model's weights names it."""
    groups: dict[str, dict[str, str]] = {}
    single: list[str] = []
    for name, tensor in tensors.items():
        part = checkpoint_format.part(name, tensor)
        if part is None:
            continue
        roles = groups.setdefault(part.weight, {})
        if part.role in roles:
            single.append(name)
        else:
            roles[part.role] = name
    for weight, roles in list(groups.items()):
        if roles.keys() != {WHOLE} and not _forms(
            checkpoint_format, {role: tensors[name] for role, name in roles.items()}
        ):
            single += groups.pop(weight).values()
    return groups | {name: {WHOLE: name} for name in single}


def _forms(checkpoint_format: CheckpointFormat, parts: Mapping[str, Described]) -> bool:
    if not checkpoint_format.needs <= parts.keys() <= checkpoint_format.needs | checkpoint_format.optional:
        return False
    shape = checkpoint_format.shape(parts)
    return all(checkpoint_format.fits(role, tensor, shape) for role, tensor in parts.items())


def is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite, and still is when it becomes a `dtype`.  One pass, which makes no copy."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    if tensor.dtype in FLOAT8_DTYPES:  # float8 has no infinity: all bits but the sign are NaN
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(torch.stack((low, high)).to(dtype)).all())
