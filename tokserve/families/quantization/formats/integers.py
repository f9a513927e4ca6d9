"""Which entries of config.json describe integer weights that can be read: those of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.families.quantization.formats.packed import (
    CODES,
    ORDER,
    SCALES,
    SHAPE,
    ZEROS,
    Layout,
    PackedFormat,
)

BITS = (4, 8)
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
COMPRESSED = ("pack-quantized", "int-quantized")
STRATEGIES = ("group", "channel")


def describes(quantization: Mapping[str, Any]) -> bool:
    """Whether the entry is of one of these kinds, supported or not."""
    method = quantization.get("quant_method")
    return method in ("gptq", "awq") or (method == "compressed-tensors" and quantization.get("format") in COMPRESSED)


def refusal(quantization: Mapping[str, Any]) -> str | None:
    """What of that entry is not supported; None if all is."""
    method, bits = quantization["quant_method"], _bits(quantization)
    if method == "gptq":
        stored = quantization.get("checkpoint_format") or "gptq"
        if stored not in CHECKPOINT_FORMATS:
            return f"asks for GPTQ of the checkpoint format {stored!r}"
    elif method == "awq":
        version = str(quantization.get("version") or "gemm").lower()
        if version != "gemm" or bits == 8:
            return f"asks for AWQ of version {version!r} with {bits} bits"
    elif problem := _scheme_refusal(quantization):
        return problem
    if bits not in BITS:
        return f"asks for quantization {method!r} with {bits} bits"
    if not isinstance(_group(quantization), int):
        return f"asks for quantization {method!r} in groups of {_group(quantization)!r}"
    return None


def _scheme_refusal(quantization: Mapping[str, Any]) -> str | None:
    schemes = _schemes(quantization)
    if schemes is None:
        return "has no config_groups with weights"
    for scheme in schemes:
        kind, strategy = scheme.get("type"), scheme.get("strategy")
        if kind != "int" or strategy not in STRATEGIES:
            weights = f"weights of type {kind!r} with {scheme.get('num_bits')} bits by {strategy}"
            return f"asks for {weights}, of format {quantization['format']!r}"
    if len({scheme.get("num_bits") for scheme in schemes}) > 1:
        return "has config_groups with different numbers of bits"
    return None


def _schemes(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    config_groups = quantization.get("config_groups")
    if not isinstance(config_groups, dict) or not config_groups:
        return None
    schemes = [group.get("weights") if isinstance(group, dict) else None for group in config_groups.values()]
    return schemes if all(isinstance(scheme, dict) for scheme in schemes) else None  # type: ignore[return-value]


def _bits(quantization: Mapping[str, Any]) -> Any:
    if quantization["quant_method"] == "compressed-tensors":
        return next((scheme.get("num_bits") for scheme in _schemes(quantization) or ()), None)
    return quantization.get("bits", quantization.get("w_bit"))


def _group(quantization: Mapping[str, Any]) -> Any:
    """Inputs that share a scale; 0: all, or not the same number in all layers."""
    if quantization["quant_method"] == "compressed-tensors":
        sizes = {scheme.get("group_size") for scheme in _schemes(quantization) or ()}
        group = sizes.pop() if len(sizes) == 1 else 0
    else:
        group = quantization.get("group_size", quantization.get("q_group_size", -1))
    return 0 if group in (None, -1) else group


def packed_format(quantization: Mapping[str, Any]) -> PackedFormat | None:
    """The format of an entry that is not refused; None if it is not of these kinds."""
    if not describes(quantization):
        return None
    method = quantization["quant_method"]
    layout: Layout = "gptq_v2" if quantization.get("checkpoint_format") == "gptq_v2" else method
    needs, optional = {
        "gptq": ({CODES, SCALES, ZEROS}, {ORDER}),
        "awq": ({CODES, SCALES, ZEROS}, set()),
        "compressed-tensors": ({CODES, SCALES}, {ZEROS, ORDER, SHAPE}),
    }[method]
    return PackedFormat(layout, _bits(quantization), _group(quantization), frozenset(needs), frozenset(optional))
