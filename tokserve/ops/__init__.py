"""The ops by name: `ops.rms_norm(x, weight, eps)`.  Until `bind` they are the torch references.

`bind` runs once, before any weight is packed, and puts the chosen implementations in place of the names; so callers
write `from tokserve import ops` and look the name up when they call.  This file knows no arithmetic.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

import torch

from tokserve.ops.attention import norm_rope_store as _norm_rope_store
from tokserve.ops.attention import paged_attention as _paged_attention
from tokserve.ops.attention import store_kv as _store_kv
from tokserve.ops.elementwise import add_rms_norm as _add_rms_norm
from tokserve.ops.elementwise import gelu_mul as _gelu_mul
from tokserve.ops.elementwise import rms_norm as _rms_norm
from tokserve.ops.elementwise import rope as _rope
from tokserve.ops.elementwise import silu_mul as _silu_mul
from tokserve.ops.float8 import STEP as FLOAT8_STEP
from tokserve.ops.float8 import PackedFloat8
from tokserve.ops.float8 import linear_float8 as _linear_float8
from tokserve.ops.float8 import pack_linear_float8 as _pack_linear_float8
from tokserve.ops.float8 import pack_scaled_float8 as _pack_scaled_float8
from tokserve.ops.linear import PackedWeight
from tokserve.ops.linear import embedding as _embedding
from tokserve.ops.linear import gated_linear as _gated_linear
from tokserve.ops.linear import linear as _linear
from tokserve.ops.linear import pack_gated as _pack_gated
from tokserve.ops.linear import pack_linear as _pack_linear
from tokserve.ops.lora import add_lora as _add_lora
from tokserve.ops.quant import PackedInt8
from tokserve.ops.quant import gated_linear_int8 as _gated_linear_int8
from tokserve.ops.quant import linear_int8 as _linear_int8
from tokserve.ops.quant import pack_gated_int8 as _pack_gated_int8
from tokserve.ops.quant import pack_linear_int8 as _pack_linear_int8
from tokserve.ops.quant import quantize_rows as _quantize_rows
from tokserve.ops.registry import FAST, OPS, choose, set_threads
from tokserve.ops.sampling import draw as _draw
from tokserve.ops.sampling import filter_logits as _filter_logits
from tokserve.ops.sampling import logprobs as _logprobs
from tokserve.ops.sampling import penalize as _penalize
from tokserve.ops.sampling import sample as _sample
from tokserve.ops.step import edit_rows as _edit_rows
from tokserve.ops.step import prepare_step as _prepare_step

__all__ = [
    "FLOAT8_STEP", "PackedFloat8", "PackedInt8", "PackedWeight", "add_lora", "add_rms_norm", "bind", "draw",
    "edit_rows", "embedding", "filter_logits", "gated_linear", "gated_linear_int8", "gelu_mul", "linear",
    "linear_float8", "linear_int8", "logprobs", "norm_rope_store", "pack_gated", "pack_gated_int8", "pack_linear",
    "pack_linear_float8", "pack_linear_int8", "pack_scaled_float8", "paged_attention", "penalize", "prepare_step",
    "quantize_rows", "rms_norm", "rope", "sample", "silu_mul", "store_kv",
]  # fmt: skip

logger = logging.getLogger(__name__)

home = torch.device("cpu")  # where tensors that the bound ops take are to lie

rms_norm = _rms_norm.reference
add_rms_norm = _add_rms_norm.reference
rope = _rope.reference
silu_mul = _silu_mul.reference
gelu_mul = _gelu_mul.reference
pack_linear = _pack_linear.reference
linear = _linear.reference
pack_gated = _pack_gated.reference
gated_linear = _gated_linear.reference
embedding = _embedding.reference
add_lora = _add_lora.reference
quantize_rows = _quantize_rows.reference
pack_linear_int8 = _pack_linear_int8.reference
linear_int8 = _linear_int8.reference
pack_gated_int8 = _pack_gated_int8.reference
gated_linear_int8 = _gated_linear_int8.reference
pack_linear_float8 = _pack_linear_float8.reference
pack_scaled_float8 = _pack_scaled_float8.reference
linear_float8 = _linear_float8.reference
store_kv = _store_kv.reference
norm_rope_store = _norm_rope_store.reference
paged_attention = _paged_attention.reference
sample = _sample.reference
draw = _draw.reference
edit_rows = _edit_rows.reference
prepare_step = _prepare_step.reference
filter_logits = _filter_logits.reference
penalize = _penalize.reference
logprobs = _logprobs.reference


def bind(
    device: str, overrides: Mapping[str, str] | None = None, threads: int | None = None, *, exact: bool = True
) -> dict[str, str]:
    """Choose an implementation for each op on `device` ("cpu", "cuda"); returns op -> implementation name.

    `threads`: how many the compiled ops of this process compute with from now on; None leaves that as it is.
    `overrides` maps an op's name, or "*" for all that have it, to an implementation.  Raises StartError
    for a name that does not exist.  `exact` False: products may be those of the device's own library, where a row's
    bits may depend on the batch.  Weights packed before a bind that changes how a product is done are not valid after
    it.
    """
    if not exact and device in FAST:
        products = ("linear", "gated_linear", "linear_float8")
        overrides = dict.fromkeys(products, FAST[device]) | dict(overrides or {})
    chosen = choose(device, overrides or {})
    if threads is not None:
        set_threads(device, threads)
    bound: dict[str, object] = {name: OPS[name].implementations[one].call for name, one in chosen.items()}
    for name, value in (bound | {"home": torch.device(device)}).items():
        setattr(sys.modules[__name__], name, value)
    logger.info("ops: %s", ", ".join(f"{name}={implementation}" for name, implementation in chosen.items()))
    return chosen
