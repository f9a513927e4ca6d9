"""The C++ implementations, named "cpp": they allocate outputs and pass tensors to the extension, which checks them.

`new_empty` gets sizes as separate arguments and a dtype only where it differs, which halves torch's time for it.
Importing this module registers the implementations; it raises ImportError where the extension was not built.  A wrong
shape or dtype raises ValueError, anything but a CPU tensor TypeError.  Pages of 16, 32, ... tokens hold keys and values
in the layout of csrc/pages.h.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import attention, dense, elementwise, gradients, lora, mixture, quant, recurrent, sampling
from tokserve.ops.cpu import latent, wna16  # noqa: F401 - registers their implementations
from tokserve.ops.cpu.arena import Arena
from tokserve.ops.dense import PackedWeight
from tokserve.ops.quant import PackedInt8

if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError("this torch has no DLPack exchange table for C")
_C.use_tensors(Tensor, Tensor.__dlpack_c_exchange_api__)
_C.set_threads(torch.get_num_threads())
atexit.register(_C.set_threads, 1)

PANEL = 64  # rows of a panel of a packed weight

_weights = Arena()


def set_threads(count: int, cpus: Sequence[int] = ()) -> bool:
    """Compute with `count` threads, the calling one included; results do not depend on the number.

    `cpus`: one per thread; all but the calling thread are bound to theirs.  Returns False if the system refused that.
    """
    return bool(_C.set_threads(count, list(cpus)))


@elementwise.rms_norm.implement("cpp", device="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _C.rms_norm(x, None, weight, eps, 1.0, out, None)
    return out


@elementwise.add_rms_norm.implement("cpp", device="cpu")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    _C.rms_norm(x, residual, weight, eps, multiplier, out, total)
    return out, total


@elementwise.layer_norm.implement("cpp", device="cpu")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _C.layer_norm(x, None, weight, bias, eps, 1.0, out, None)
    return out


@elementwise.add_layer_norm.implement("cpp", device="cpu")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    _C.layer_norm(x, residual, weight, bias, eps, multiplier, out, total)
    return out, total


@elementwise.add_residual.implement("cpp", device="cpu")
def add_residual(x: Tensor, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    out = torch.empty_like(x)
    _C.add_residual(x, residual, multiplier, out)
    return out


@elementwise.cap.implement("cpp", device="cpu")
def cap(x: Tensor, multiplier: float, limit: float) -> Tensor:
    out = torch.empty_like(x)
    _C.cap(x, multiplier, limit, out)
    return out


@elementwise.activate.implement("cpp", device="cpu")
def activate(x: Tensor, activation: str, gated: bool = False) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2 if gated else x.shape[1])
    _C.activate(x, activation, gated, out)
    return out


@elementwise.silu_mul.implement("cpp", device="cpu")
def silu_mul(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _C.silu_mul(x, out)
    return out


@elementwise.gelu_mul.implement("cpp", device="cpu")
def gelu_mul(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _C.gelu_mul(x, out)
    return out


@elementwise.rope.implement("cpp", device="cpu")
def rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """q and k may be slices of one tensor [T, ...]."""
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    _C.rope(q, k, table, positions, interleaved, out_q, out_k)
    return out_q, out_k


@dense.pack_linear.implement("cpp", device="cpu")
def pack_linear(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedWeight | None = None
) -> PackedWeight:
    """The weight in panels of 64 outputs: [N/64][K][64], or [N/64][K/2][64][2] in bfloat16, padded with zeros."""
    return _packed(weight, False, rows, first, into)


@dense.pack_gated.implement("cpp", device="cpu")
def pack_gated(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedWeight | None = None
) -> PackedWeight:
    """Pack as `pack_linear` does, a panel holding 32 outputs of the gate and below them the 32 that they gate."""
    return _packed(weight, True, rows, first, into)


def _packed(weight: Tensor, gated: bool, rows: int | None, first: int, into: PackedWeight | None) -> PackedWeight:
    if into is None:
        into = _unfilled(len(weight) if rows is None else rows, weight.shape[1], weight.dtype, gated)
    _C.put_rows(weight, into.packed, into.rows, first, gated)
    return into


def _unfilled(rows: int, columns: int, dtype: torch.dtype, gated: bool) -> PackedWeight:
    """A weight without its rows; what pads the last panel is there."""
    if gated and rows % 2:
        raise ValueError("pack_gated: a gated weight has an even number of rows")
    pairs, outputs = dtype == torch.bfloat16, rows // 2 if gated else rows
    packed = _weights.empty(_C.packed_size(outputs, columns, pairs, gated), dtype)
    if outputs % (PANEL // 2 if gated else PANEL):
        packed[-_C.packed_size(1, columns, pairs, False) :].zero_()
    return PackedWeight(rows, columns, dtype, packed, panel=PANEL, depth=2 if pairs else 1, gated=gated)


@dense.packed_positions.implement("cpp", device="cpu")
def packed_positions(packed: PackedWeight, first_row: int, elements: Tensor) -> Tensor:
    out = torch.empty_like(elements)
    sizes = packed.rows, packed.columns, packed.panel, packed.depth
    _C.packed_positions(elements, first_row, *sizes, packed.gated, out)
    return out


@dense.linear.implement("cpp", device="cpu")
def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"linear: x has {x.shape[-1]} columns, the weight {packed.columns}")
    rows, columns = x.shape[0], packed.rows
    out = x.new_empty(rows, columns) if out_dtype is None else x.new_empty(rows, columns, dtype=out_dtype)
    _C.linear(x, packed.packed, bias, out)
    return out


@dense.gated_linear.implement("cpp", device="cpu")
def gated_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"gated_linear: x has {x.shape[-1]} columns, the weight {packed.columns}")
    out = x.new_empty(x.shape[0], packed.rows if activation is None else packed.rows // 2)
    _C.gated_linear(x, packed.packed, bias, activation, out)
    return out


@lora.add_lora.implement("cpp", device="cpu")
def add_lora(out: Tensor, *rest: object) -> None:
    _C.add_lora(out, *rest)


@dense.embedding.implement("cpp", device="cpu")
def embedding(ids: Tensor, packed: PackedWeight, multiplier: float = 1.0) -> Tensor:
    out = packed.packed.new_empty(ids.shape[0], packed.columns)
    _C.embedding(ids, packed.packed, packed.rows, multiplier, out)
    return out


@attention.norm_rope_store.implement("cpp", device="cpu")
def norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    interleaved: bool = False,
    norm_last: bool = False,
    gated: bool = False,
) -> Tensor:
    """A cache is never float8, so the scales are 1."""
    _, kv_heads, _, dim = k_cache.shape
    q = qkv.new_empty(qkv.shape[0], (qkv.shape[1] // dim - 2 * kv_heads) // (2 if gated else 1), dim)
    _C.norm_rope_store(
        qkv, q_weight, k_weight, eps, table, positions, k_cache, v_cache, slot_mapping, interleaved, norm_last, gated, q
    )
    return q


@quant.quantize_rows.implement("cpp", device="cpu")
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x need not be adjacent."""
    values, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
    _C.quantize_rows(x, values, scales)
    return values, scales


@quant.pack_linear_int8.implement("cpp", device="cpu")
def pack_linear_int8(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedInt8 | None = None
) -> PackedInt8:
    """Pack in panels of 64 outputs, [N/64][K/4][64][4], each value plus 128: the product's unsigned operand."""
    return _packed_int8(weight, False, rows, first, into)


@quant.pack_gated_int8.implement("cpp", device="cpu")
def pack_gated_int8(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedInt8 | None = None
) -> PackedInt8:
    """Pack as `pack_linear_int8` does, a panel holding 32 outputs of the gate and below them the 32 that they gate."""
    return _packed_int8(weight, True, rows, first, into)


def _packed_int8(weight: Tensor, gated: bool, rows: int | None, first: int, into: PackedInt8 | None) -> PackedInt8:
    if into is None:
        rows, columns = len(weight) if rows is None else rows, weight.shape[1]
        outputs = rows // 2 if gated else rows
        packed = _weights.empty(_C.packed_int8_size(outputs, columns, gated), torch.uint8)
        packed[-_C.packed_int8_size(1, columns, False) :].fill_(128)  # the last panel may not be full
        into = PackedInt8(rows, columns, packed, torch.empty(rows))
    _C.put_rows_int8(weight, into.packed, into.scales, first, gated)
    return into


@quant.linear_int8.implement("cpp", device="cpu")
def linear_int8(x: Tensor, packed: PackedInt8, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"linear_int8: x has {x.shape[-1]} columns, the weight {packed.columns}")
    out = torch.empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    _C.linear_int8(x, packed.packed, packed.scales, bias, out)
    return out


@quant.gated_linear_int8.implement("cpp", device="cpu")
def gated_linear_int8(x: Tensor, packed: PackedInt8, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"gated_linear_int8: x has {x.shape[-1]} columns, the weight {packed.columns}")
    out = x.new_empty(x.shape[0], packed.rows if activation is None else packed.rows // 2)
    _C.gated_linear_int8(x, packed.packed, packed.scales, bias, activation, out)
    return out


@mixture.route.implement("cpp", device="cpu")
def route(logits: Tensor, bias: Tensor | None, k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens = logits.shape[0]
    ids, weights = logits.new_empty(tokens, k, dtype=torch.int32), logits.new_empty(tokens, k)
    _C.route(logits, bias, *rest, ids, weights)
    return ids, weights


def _check_experts(x: Tensor, gate_up: PackedWeight | PackedInt8, down: PackedWeight | PackedInt8) -> None:
    """Sizes that packed weights do not tell."""
    if not x.shape[-1] == gate_up.columns == down.rows or gate_up.rows != 2 * down.columns:
        raise ValueError(
            f"experts: x has {x.shape[-1]} columns, the weights are [{gate_up.rows},{gate_up.columns}] and "
            f"[{down.rows},{down.columns}]"
        )


@mixture.experts.implement("cpp", device="cpu")
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedWeight],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedWeight],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Rows of x need not be adjacent."""
    _check_experts(x, gate_up[0], down[0])
    out = x.new_empty(x.shape[0], x.shape[1])
    _C.experts(
        x, ids, weights, [one.packed for one in gate_up], [], gate_up_bias, [one.packed for one in down], [],
        down_bias, activation, down[0].columns, shared, shared_gate, out,
    )  # fmt: skip
    return out


@mixture.experts_int8.implement("cpp", device="cpu")
def experts_int8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedInt8],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedInt8],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Rows of x need not be adjacent."""
    _check_experts(x, gate_up[0], down[0])
    out = x.new_empty(x.shape[0], x.shape[1])
    _C.experts(
        x, ids, weights, [one.packed for one in gate_up], [one.scales for one in gate_up], gate_up_bias,
        [one.packed for one in down], [one.scales for one in down], down_bias, activation, down[0].columns, shared,
        shared_gate, out,
    )  # fmt: skip
    return out


@attention.store_kv.implement("cpp", device="cpu")
def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *scales: float) -> None:
    """k and v may be slices of one tensor [T, ...].  A cache is never float8, so the scales are 1."""
    _C.store_kv(k, v, k_cache, v_cache, slot_mapping)


@attention.paged_attention.implement("cpp", device="cpu")
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, *rest: Any
) -> Tensor:
    """q may be a slice of a tensor [T, ...].  A cache is never float8, so v_scale is 1."""
    scale, window, *more = rest
    softcap = more[1] if len(more) > 1 else 0.0
    sinks = more[2] if len(more) > 2 else None
    given = more[3:4] if len(more) > 3 and more[3] is not None else ()  # bidirectional
    out = torch.empty_like(q)
    _C.paged_attention(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, softcap, sinks, out, *given
    )
    return out


@gradients.activation_gradients.implement("cpp", device="cpu")
def activation_gradients(grad: Tensor, x: Tensor, activation: str, gated: bool = False) -> Tensor:
    out = torch.empty_like(x)
    _C.activation_gradients(grad, x, activation, gated, out)
    return out


@gradients.norm_gradients.implement("cpp", device="cpu")
def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carried: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, grad_weight = torch.empty_like(x), torch.empty(len(weight))
    _C.norm_gradients(grad, x, weight.float(), eps, carried, out, grad_weight)
    return out, grad_weight


@gradients.attention_gradients.implement("cpp", device="cpu")
def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    paths: Tensor,
    path_start: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors may be slices of one tensor [T, ...]."""
    grad_q = torch.empty(q.shape)
    grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)
    _C.attention_gradients(
        grad, q, k, v, query_start, paths, path_start, scale, window, softcap, grad_q, grad_k, grad_v
    )
    return grad_q, grad_k, grad_v


@sampling.sample.implement("cpp", device="cpu")
def sample(logits: Tensor, *rest: Tensor) -> Tensor:
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    _C.sample(logits, *rest, ids)
    return ids


@sampling.sample_fused.implement("cpp", device="cpu")
def sample_fused(
    logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor, temperature: Tensor | None, scaled: bool, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    ids, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    columns = _NO_LOGPROBS if k < 0 else _logprob_columns(rows, k)
    _C.sample_fused(logits, seeds, positions, greedy, temperature, scaled, k, ids, finite, *columns)
    return ids, finite, *columns


def _logprob_columns(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs: the tokens' logprobs and ranks, the alternatives' ids and logprobs."""
    return (
        torch.empty(rows), torch.empty(rows, dtype=torch.int32),
        torch.empty(rows, columns, dtype=torch.int32), torch.empty(rows, columns),
    )  # fmt: skip


_NO_LOGPROBS = _logprob_columns(0, 0)


@sampling.sampling_mask.implement("cpp", device="cpu")
def sampling_mask(logits: Tensor, processed: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, limit = logits.shape[0], rest[-1]
    counts, kept_logprobs, values = torch.empty(rows, dtype=torch.int32), torch.empty(rows), torch.empty(rows)
    ids = _mask_ids.of(rows, limit)
    total = _C.sampling_mask(logits, processed, *rest, counts, ids, kept_logprobs, values)
    return counts, ids.view(-1)[:total].clone(), kept_logprobs, values


class _KeptBuffer:
    """Room for ids that is used again: fresh pages would cost more than the work on them."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int32)

    def of(self, rows: int, columns: int) -> Tensor:
        if self._ids.numel() < rows * columns:
            self._ids = torch.empty(rows * columns, dtype=torch.int32)
        return self._ids[: rows * columns].view(rows, columns)


_mask_ids = _KeptBuffer()


@sampling.filter_logits.implement("cpp", device="cpu")
def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, few: bool = False) -> Tensor:
    out = torch.empty_like(logits)
    _C.filter_logits(logits, top_k, top_p, min_p, out)
    return out


@sampling.penalize.implement("cpp", device="cpu")
def penalize(logits: Tensor, *rest: Tensor) -> Tensor:
    out = torch.empty_like(logits)
    _C.penalize(logits, *rest, out)
    return out


@sampling.logprobs.implement("cpp", device="cpu")
def logprobs(
    logits: Tensor, token_ids: Tensor, k: int, named: Tensor | None, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = logits.shape[0], k + (0 if named is None else named.shape[1])
    outputs = _logprob_columns(rows, columns)
    _C.logprobs(logits, token_ids, k, named, temperature, *outputs)
    return outputs


@recurrent.gated_delta.implement("cpp", device="cpu")
def gated_delta(
    x: Tensor,
    rates: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    grouped: bool,
    state: Tensor,
    *rest: Any,
) -> Tensor:
    out = x.new_empty(x.shape[0], state.shape[1] * state.shape[3])
    _C.gated_delta(x, rates, conv_weight, a_log, dt_bias, norm_weight, eps, grouped, state, *rest, out)
    return out


@recurrent.short_conv.implement("cpp", device="cpu")
def short_conv(x: Tensor, conv_weight: Tensor, *rest: Any) -> Tensor:
    out = x.new_empty(x.shape[0], conv_weight.shape[1])
    _C.short_conv(x, conv_weight, *rest, out)
    return out


@recurrent.gate_heads.implement("cpp", device="cpu")
def gate_heads(mixed: Tensor, x: Tensor) -> Tensor:
    out = mixed.new_empty(mixed.shape[0], mixed.shape[1] * mixed.shape[2])
    _C.gate_heads(mixed, x, out)
    return out
