"""Checkpoints that store projections as float8 with scales: which are understood, and the values that they mean.

A value is the stored number times its scale, which is the tensor's, its row's (the output channel's) or its block's.
Two ways of saying so are known: "fp8" (DeepSeek, Qwen) and "compressed-tensors" (llm-compressor).  This file must not
know files, nor who multiplies with such weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokserve.layers.parameter import Scaled

NAMES = ("quantization_config", "compression_config")  # in config.json
STORED = "F8_E4M3"  # safetensors' name for torch.float8_e4m3fn
SCALES = ("_scale_inv", "_scale")  # what follows a tensor's name in that of its scale; both are multiplied by
UNUSED = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")  # of activations, all but these:
CACHE_SCALES = {  # a float8 cache's, as tools call them after a layer's name -> of keys (k), of values (v) or of both
    ".self_attn.k_scale": "k", ".self_attn.v_scale": "v",  # compressed-tensors, AutoFP8
    ".self_attn.kv_scale": "kv",  # AutoFP8 at first
    ".self_attn.k_proj.output_scale": "k", ".self_attn.v_proj.output_scale": "v",  # Quark, compressed-tensors at first
    ".self_attn.k_proj.k_scale": "k", ".self_attn.v_proj.v_scale": "v",  # ModelOpt
    ".self_attn.qkv_proj.k_scale": "k", ".self_attn.qkv_proj.v_scale": "v",
    ".self_attn.attn.k_scale": "k", ".self_attn.attn.v_scale": "v",
}  # fmt: skip
FORMATS = ("float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "block")
Block = tuple[int, int]


def asked(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of config.json that says how the checkpoint is quantized; None if it is not."""
    return next((hf[name] for name in NAMES if hf.get(name) is not None), None)


def refusal(quantization: Any) -> str | None:
    """What of that entry is not understood; None if all is."""
    if not isinstance(quantization, dict):
        return "is not an object"
    method = quantization.get("quant_method", "unnamed")
    if method == "fp8":
        kind = quantization.get("fmt", "e4m3")
        return None if kind == "e4m3" and block(quantization) else f"asks for fp8 of format {kind!r}"
    if method != "compressed-tensors":
        return f"asks for quantization {method!r}"
    groups = quantization.get("config_groups")
    if quantization.get("format") == "dense" and groups == {}:
        return None  # no weight is quantized, a KV cache may be
    if quantization.get("format") not in FORMATS or not isinstance(groups, dict) or not block(quantization):
        return f"asks for quantization {method!r} of format {quantization.get('format')!r}"
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        kind = weights if isinstance(weights, dict) else {}
        found = (kind.get("type"), kind.get("num_bits"), kind.get("strategy"))
        if found[:2] != ("float", 8) or found[2] not in STRATEGIES:
            return f"asks for weights of type {found[0]!r} with {found[1]} bits by {found[2]}"
    return None


def block(quantization: Mapping[str, Any]) -> Block | None:
    """Rows and columns that share a scale where scales are by block; None if what is said makes no sense."""
    found = quantization.get("weight_block_size")
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        found = found or (weights or {}).get("block_structure")
    match found or (128, 128):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def block_of(hf: Mapping[str, Any]) -> Block | None:
    """`block` of a config.json whose weights are float8, as far as it says and is understood; else None."""
    quantization = asked(hf)
    if quantization is None or refusal(quantization):
        return None
    return block(quantization)


def is_unused(name: str) -> bool:
    """Whether that tensor of a float8 checkpoint is none that the model takes."""
    return name.endswith(UNUSED) and not name.endswith(tuple(CACHE_SCALES))


def scaled_by(name: str) -> str | None:
    """The name of the tensor whose scale a tensor of this name is."""
    return next((name.removesuffix(ending) for ending in SCALES if name.endswith(".weight" + ending)), None)


def scale_shapes(shape: tuple[int, ...], block: Block) -> list[tuple[int, ...]]:
    """Shapes that the scale of a weight [N,K] may have."""
    rows, columns = shape
    return [(), (1,), (1, 1), (rows,), (rows, 1), (-(-rows // block[0]), -(-columns // block[1]))]


def groups(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> int:
    """In how many groups a row's inputs are scaled by a scale of one of those shapes."""
    by_block = scale_shape not in ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
    return scale_shape[1] if by_block else 1


class Pairs:
    """Float8 tensors and their scales that come one by one, in any order."""

    def __init__(self) -> None:
        self._stored: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor, block: Block) -> Scaled | None:
        """Take a float8 tensor of that name or, of another dtype, its scale (a copy); both, once both are there."""
        (self._stored if tensor.dtype == torch.float8_e4m3fn else self._scales)[name] = tensor.clone()
        if name not in self._stored or name not in self._scales:
            return None
        return scaled(self._stored.pop(name), self._scales.pop(name), block)

    def single(self) -> tuple[list[str], list[str]]:
        """Names of tensors that have come without their scale, and of those whose scale has come without them."""
        return list(self._stored), list(self._scales)


def scaled(stored: Tensor, scale: Tensor, block: Block) -> Scaled:
    """Float8 numbers [N,K] with a scale of one of those shapes."""
    rows, columns = stored.shape
    if groups(tuple(stored.shape), tuple(scale.shape)) > 1:
        spread = scale.float().repeat_interleave(block[0], 0)[:rows]  # [N,G]
        return Scaled(stored, spread.t().contiguous(), block[1])
    spread = scale.float().reshape(-1)
    if len(spread) not in (1, rows):
        spread = spread.repeat_interleave(block[0])[:rows]
    return Scaled(stored, spread.expand(rows)[None], columns)
