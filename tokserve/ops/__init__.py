"""The ops by name: `ops.rms_norm(x, weight, eps)`.  Until `bind` they are the torch references.

`bind` runs once, before any weight is packed, and replaces the names by the chosen implementations.  So callers write
`from tokserve import ops` and `ops.name(...)`, which looks the name up in every call.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tokserve.base.rooms import part
from tokserve.ops import (
    attention,
    dense,
    elementwise,
    float8,
    gradients,
    latent,
    lora,
    mixture,
    quant,
    recurrent,
    sampling,
    state_space,
    step,
    wna16,
)
from tokserve.ops.dense import PackedWeight
from tokserve.ops.float8 import STEP as FLOAT8_STEP
from tokserve.ops.float8 import PackedFloat8
from tokserve.ops.quant import PackedInt8
from tokserve.ops.registry import FAST, OPS, choose, set_threads
from tokserve.ops.wna16 import PackedWna16, QuantizedRows

__all__ = [
    "FLOAT8_STEP",
    "PackedFloat8",
    "PackedInt8",
    "PackedWeight",
    "PackedWna16",
    "QuantizedRows",
    "accept_library",
    "activate",
    "activation_gradients",
    "add_layer_norm",
    "add_lora",
    "add_residual",
    "add_rms_norm",
    "advance_step",
    "attention_gradients",
    "attention_work",
    "bind",
    "cap",
    "edit_rows",
    "embedding",
    "embedding_wna16",
    "expert_products",
    "expert_weight_gradients",
    "experts",
    "experts_float8",
    "experts_int8",
    "experts_wna16",
    "filter_logits",
    "gate_heads",
    "gate_inputs",
    "gated_delta",
    "gated_linear",
    "gated_linear_float8",
    "gated_linear_int8",
    "gated_linear_wna16",
    "gelu_mul",
    "latent_attention",
    "latent_rope_store",
    "layer_norm",
    "layer_norm_gradients",
    "linear",
    "linear_float8",
    "linear_heads",
    "linear_int8",
    "linear_wna16",
    "logprobs",
    "matrix_product",
    "norm_gradients",
    "norm_rope_store",
    "norm_values",
    "pack_gated",
    "pack_gated_float8",
    "pack_gated_int4",
    "pack_gated_int8",
    "pack_gated_wna16",
    "pack_int4",
    "pack_linear",
    "pack_linear_float8",
    "pack_linear_int8",
    "pack_scaled_float8",
    "pack_wna16",
    "packed_positions",
    "paged_attention",
    "penalize",
    "prepare_step",
    "quantize_int4",
    "quantize_rows",
    "rms_norm",
    "rope",
    "route",
    "route_gradients",
    "row_products",
    "sample",
    "sample_few",
    "sample_fused",
    "sampling_mask",
    "scale_by_position",
    "scale_choices",
    "scale_rows",
    "scan_states",
    "short_conv",
    "silu_mul",
    "softmax",
    "store_kv",
    "store_rows",
    "sum_rows",
    "wrap",
]

logger = logging.getLogger(__name__)

torch_device = torch.device("cpu")  # of the tensors that the bound ops take

rms_norm = elementwise.rms_norm.reference
add_rms_norm = elementwise.add_rms_norm.reference
layer_norm = elementwise.layer_norm.reference
add_layer_norm = elementwise.add_layer_norm.reference
add_residual = elementwise.add_residual.reference
cap = elementwise.cap.reference
scale_by_position = elementwise.scale_by_position.reference
scale_rows = elementwise.scale_rows.reference
norm_values = elementwise.norm_values.reference
gate_inputs = elementwise.gate_inputs.reference
activate = elementwise.activate.reference
rope = elementwise.rope.reference
silu_mul = elementwise.silu_mul.reference
gelu_mul = elementwise.gelu_mul.reference
pack_linear = dense.pack_linear.reference
linear = dense.linear.reference
accept_library = dense.accept_library.reference
packed_positions = dense.packed_positions.reference
pack_gated = dense.pack_gated.reference
gated_linear = dense.gated_linear.reference
embedding = dense.embedding.reference
add_lora = lora.add_lora.reference
quantize_rows = quant.quantize_rows.reference
pack_linear_int8 = quant.pack_linear_int8.reference
linear_int8 = quant.linear_int8.reference
pack_gated_int8 = quant.pack_gated_int8.reference
gated_linear_int8 = quant.gated_linear_int8.reference
pack_linear_float8 = float8.pack_linear_float8.reference
pack_scaled_float8 = float8.pack_scaled_float8.reference
pack_gated_float8 = float8.pack_gated_float8.reference
linear_float8 = float8.linear_float8.reference
gated_linear_float8 = float8.gated_linear_float8.reference
quantize_int4 = wna16.quantize_int4.reference
pack_wna16 = wna16.pack_wna16.reference
linear_wna16 = wna16.linear_wna16.reference
pack_gated_wna16 = wna16.pack_gated_wna16.reference
pack_int4 = wna16.pack_int4.reference
pack_gated_int4 = wna16.pack_gated_int4.reference
gated_linear_wna16 = wna16.gated_linear_wna16.reference
embedding_wna16 = wna16.embedding_wna16.reference
route = mixture.route.reference
scale_choices = mixture.scale_choices.reference
experts = mixture.experts.reference
experts_int8 = mixture.experts_int8.reference
experts_float8 = mixture.experts_float8.reference
experts_wna16 = mixture.experts_wna16.reference
gated_delta = recurrent.gated_delta.reference
short_conv = recurrent.short_conv.reference
gate_heads = recurrent.gate_heads.reference
scan_states = state_space.scan_states.reference
store_kv = attention.store_kv.reference
store_rows = attention.store_rows.reference
norm_rope_store = attention.norm_rope_store.reference
attention_work = attention.attention_work.reference
paged_attention = attention.paged_attention.reference
linear_heads = latent.linear_heads.reference
latent_rope_store = latent.latent_rope_store.reference
latent_attention = latent.latent_attention.reference
attention_gradients = gradients.attention_gradients.reference
activation_gradients = gradients.activation_gradients.reference
norm_gradients = gradients.norm_gradients.reference
layer_norm_gradients = gradients.layer_norm_gradients.reference
matrix_product = gradients.matrix_product.reference
sum_rows = gradients.sum_rows.reference
expert_products = gradients.expert_products.reference
expert_weight_gradients = gradients.expert_weight_gradients.reference
row_products = gradients.row_products.reference
route_gradients = gradients.route_gradients.reference
softmax = gradients.softmax.reference
sample = sampling.sample.reference
sample_fused = sampling.sample_fused.reference
sample_few = sampling.sample_few.reference
edit_rows = step.edit_rows.reference
advance_step = step.advance_step.reference
prepare_step = step.prepare_step.reference
filter_logits = sampling.filter_logits.reference
penalize = sampling.penalize.reference
logprobs = sampling.logprobs.reference
sampling_mask = sampling.sampling_mask.reference


def bind(
    device: str,
    overrides: Mapping[str, str] | None = None,
    threads: int | None = None,
    *,
    cpus: Sequence[int] = (),
    exact: bool = True,
    place: torch.device | None = None,
) -> dict[str, str]:
    """Choose an implementation for each op on `device` ("cpu", "cuda"); returns op -> implementation name.

    `place`: where the ops' tensors are, if that is not `device`.
    `threads`: number of threads of the compiled ops in this process; None leaves it unchanged.
    `cpus`: one per thread, to bind them to.
    `overrides` maps an op's name, or "*" for all that have it, to an implementation.  Raises StartError
    for a name that does not exist.  `exact` False: products may be those of the device's library, which are not batch
    invariant.  A bind that changes the implementation of a product invalidates weights packed before it.
    """
    if not exact and device in FAST:
        products = ("linear", "gated_linear", "linear_float8")
        overrides = dict.fromkeys(products, FAST[device]) | dict(overrides or {})
    chosen = choose(device, overrides or {})
    if threads is not None:
        set_threads(device, threads, cpus)
    bound: dict[str, object] = {name: OPS[name].implementations[one].call for name, one in chosen.items()}
    for name, value in (bound | {"torch_device": place or torch.device(device)}).items():
        setattr(sys.modules[__name__], name, value)
    common, _ = Counter(chosen.values()).most_common(1)[0]
    others = [f"{name}={implementation}" for name, implementation in chosen.items() if implementation != common]
    logger.debug("ops: %s%s", common, f", but {', '.join(others)}" if others else "")
    return chosen


def compile_ahead(jobs: int) -> AbstractContextManager[None] | None:
    """A context in which ops only compile their kernels, in parallel with `jobs` threads; None on a CPU, whose kernels
    are compiled already."""
    if torch_device.type == "cpu":
        return None
    context: AbstractContextManager[None] = part("gpu", "compile_ahead")(jobs)
    return context


def kept_tables() -> AbstractContextManager[list[Tensor]]:
    """A context that collects the tensors that kernels of this thread read besides their arguments: who captures a step
    keeps them."""
    if torch_device.type == "cpu":
        return nullcontext([])
    context: AbstractContextManager[list[Tensor]] = part("gpu", "kept_tables")()
    return context


def is_sampling_of_few_fused() -> bool:
    """Whether `sample_few` serves instead of the ops that it stands for."""
    return torch_device.type != "cpu" and bool(part("gpu", "is_on")("sample_few"))


def wrap(wrapper: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Call every op through `wrapper(name, op)`, until the returned function is called."""
    module = sys.modules[__name__]
    bound = {name: vars(module)[name] for name in OPS}
    for name, call in bound.items():
        setattr(module, name, wrapper(name, call))

    def unwrap() -> None:
        for name, call in bound.items():
            setattr(module, name, call)

    return unwrap
