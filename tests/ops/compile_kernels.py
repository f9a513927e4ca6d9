"""A program, not a test: compiles every Triton kernel for a GPU as its launcher would call it, with no GPU in sight.

The driver is replaced by one that names the target, and launching by compiling.  Prints a JSON object: for each kernel
registers and bytes of stack a thread uses (ptxas), bytes of shared memory, and what its PTX says of the order in which
it adds up: chains of the matrix unit (or whether warps multiply tiles of 16 rows), the floating-point operations of the
loop around them, fma and atomics; or, of a kernel that does not compile, the error.  Arguments are the target (sm_90)
and the numbers of rows that products are compiled for, or "candidates" for kernels on trial instead of all others.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.ops.samples.wna16 import weights as integer_weights
from tokserve import ops
from tokserve.gpu import candidates
from tokserve.gpu.compile import targets
from tokserve.gpu.kernels import launch, wna16
from tokserve.gpu.kernels.ranks.exchange import Inboxes
from tokserve.gpu.peers import CAPACITY, PROGRAMS, PeerGroup
from tokserve.ops import registry
from tokserve.ops.registry import OPS

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, LONG, INT = torch.bfloat16, torch.int64, torch.int32
MATMUL = re.compile(
    r"wgmma\.mma_async\S*\.m64n\d+k(\d+)\S* \{([^}]*)\}, (\{[^}]*\}|%\w+), (%\w+), ([^,;]+)[,;]"
)  # inputs at once, sums, the two operands (registers, or where they are in shared memory), whether it adds to the sums
WARP_MATMUL = re.compile(r"mma\.sync\.aligned\.m16n8k16\S* (\{[^}]*\}), (\{[^}]*\}), \{[^}]*\}, (\{[^}]*\});")
PLACE = re.compile(r"(?:add\.s|or\.b|cvt\.u64\.u)(?:32|64)\s+(%\w+), (%\w+)(?:, (-?\d+))?;")  # a register, and past it
FLOATING = re.compile(r'= "?((?:arith\.\w+f|arith\.select|math\.\w+|tt\.reduce|ttng\.warp_group_dot)\b)')


NARROW = 1024, 4096, 6144  # outputs of 0.6B's down, qkv and gate: of four chains, two, and one
AMD = launch.Gpu("gfx942", 64 << 10, 304)  # MI300X: a target of the compiler's, and none that a server has


class AmdDriver(targets.TargetDriver):
    """The calls of the compiler to a driver of AMD's."""

    def __init__(self) -> None:
        self._target = GPUTarget("hip", AMD.architecture, 64)


compiled: dict[str, Any] = {}
failed: dict[str, str] = {}
run = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    try:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    except TritonError as error:
        failed[f"{self.__name__} {len(failed)}"] = f"{type(error).__name__}: {error}"
        return None
    assert kwargs["enable_fp_fusion"] is False, f"{self.__name__} leaves contraction to the compiler"
    name = self.__name__.removesuffix("_kernel")
    same = sum(key.split("#")[0] == name for key in compiled)
    if all(kernel.hash != other.hash for other in compiled.values()):
        compiled[f"{name}#{same}" if same else name] = kernel
    return kernel


def calls(sizes: list[int], *, has_float8: bool, is_dependent: bool, wide_heads: bool) -> None:
    """Every launcher, at the shapes of an 8B model with 64-token pages; products of so many rows.  `wide_heads`:
    attention with heads of 256, too, which spills on sm_90."""
    call = {name: op.implementations["triton"].call for name, op in OPS.items() if "triton" in op.implementations}
    rows, hidden, heads, kv_heads, dim, page, vocab = 16, 4096, 32, 8, 128, 64, 151936
    x, weight = torch.empty(rows, hidden, dtype=BF16), torch.empty(hidden, dtype=BF16)
    call["rms_norm"](x, weight, 1e-6)
    call["add_rms_norm"](x, x, weight, 1e-6)
    call["layer_norm"](x, weight, None, 1e-6)
    call["add_layer_norm"](x, x, weight, weight, 1e-6, 0.5)
    call["add_residual"](x, x, 0.5)
    call["cap"](x, 0.5, 30.0)
    call["scale_rows"](x, torch.empty(rows))
    call["gate_inputs"](x, torch.empty(rows, 2 * x.shape[1], dtype=BF16), 1, "gelu_tanh")
    for activation in ("gelu", "relu", "relu2"):
        call["activate"](x, activation)
    call["silu_mul"](x)
    call["gelu_mul"](x)
    q, k = torch.empty(rows, heads, dim, dtype=BF16), torch.empty(rows, kv_heads, dim, dtype=BF16)
    table, index = torch.empty(4096, dim), torch.zeros(rows, dtype=LONG)
    call["rope"](q, k, table, index)
    call["scale_by_position"](q, index, 0.1, 16384)
    for copied in (False, True):
        call["norm_values"](x, kv_heads, dim, 1e-6, copied)
    caches = torch.empty(2, 32, kv_heads, page, dim, dtype=BF16).unbind()
    call["store_kv"](k, k, *caches, index)
    call["store_rows"](x, torch.empty(32, page, hidden, dtype=BF16), index)
    norm = torch.empty(dim, dtype=BF16)
    qkv = torch.empty(rows, (heads + 2 * kv_heads) * dim, dtype=BF16)
    call["norm_rope_store"](qkv, norm, norm, 1e-6, table, index, *caches, index)
    starts, lens = torch.zeros(rows + 1, dtype=INT), torch.zeros(rows, dtype=INT)
    tables = torch.zeros(rows, 64, dtype=INT)
    many = torch.empty(512, heads, dim, dtype=BF16)
    call["rope"](q, k, table, index, True)
    call["norm_rope_store"](qkv, norm, norm, 1e-6, table, index, *caches, index, 1.0, 1.0, True, True)
    norms = torch.empty(heads * dim, dtype=BF16), torch.empty(kv_heads * dim, dtype=BF16)
    call["norm_rope_store"](qkv, *norms, 1e-6, table, index, *caches, index)
    for window in (0, 1000):
        for sinks in (None, torch.empty(heads)):
            call["paged_attention"](many, *caches, tables, starts, lens, 0.1, window, 1.0, 0.0, sinks)
        both_ways = torch.ones(rows, dtype=torch.bool)  # of images and of encoders
        call["paged_attention"](many, *caches, tables, starts, lens, 0.1, window, 1.0, 0.0, None, both_ways)
    call["paged_attention"](many, *caches, tables, starts, lens, 0.1, 0, 1.0, 50.0)
    step = torch.empty(rows, heads, dim, dtype=BF16)
    runs = OPS["attention_work"].implementations["groups"].call(step, caches[0], tables, starts, lens, 0)
    for sinks in (None, torch.empty(heads)):
        call["paged_attention"](step, *caches, tables, starts, lens, 0.1, 0, 1.0, 0.0, sinks, None, runs)
    call["paged_attention"](many, *caches, tables, starts, lens, 0.1, 0, 1.0, 50.0, torch.empty(heads))
    single = torch.empty(2, 32, kv_heads, page, dim).unbind()
    call["paged_attention"](many.float(), *single, tables, starts, lens, 0.1, 0)
    if wide_heads:  # Gemma's and Qwen3.5's
        wide_caches = torch.empty(2, 32, 4, page, 256, dtype=BF16).unbind()
        call["paged_attention"](torch.empty(512, 8, 256, dtype=BF16), *wide_caches, tables, starts, lens, 0.1, 0)
    if has_float8:
        float8_caches(call, many, k, qkv, norm, table, index, tables, starts, lens)
    for tokens in sizes:
        inputs = torch.empty(tokens, hidden, dtype=BF16)
        for outputs in (1024, hidden, 24576):
            packed = ops.PackedWeight(outputs, hidden, BF16, torch.empty(outputs, hidden, dtype=BF16))
            call["linear"](inputs, packed, None)
        call["gated_linear"](inputs, packed, None, "silu")
        integers = ops.PackedInt8(24576, hidden, torch.empty(24576, hidden, dtype=torch.int8), torch.empty(24576))
        call["gated_linear_int8"](inputs, integers, None, "silu")
        call["linear_int8"](inputs, integers, None)
        values, scales = torch.empty(hidden, hidden, dtype=torch.float8_e4m3fn), torch.empty(hidden // 128, hidden)
        for group in (hidden, 128) if has_float8 else ():
            packed_float8 = ops.PackedFloat8(hidden, hidden, values, scales[: hidden // group], group)
            call["linear_float8"](inputs, packed_float8, None)
    call["linear"](x, packed, torch.empty(24576, dtype=BF16), torch.float32)
    for number, kind in enumerate(integer_weights(hidden, hidden)):
        integer_weight = call["pack_wna16"]([kind])
        for tokens in sizes if number < 2 else sizes[:1]:
            call["linear_wna16"](torch.empty(tokens, hidden, dtype=BF16), integer_weight, None)
    count, inner = 128, 768
    gate_up = [ops.PackedWeight(2 * inner, hidden, BF16, torch.empty(2 * inner, hidden, dtype=BF16))] * count
    downs = [ops.PackedWeight(hidden, inner, BF16, torch.empty(hidden, inner, dtype=BF16))] * count
    call["route"](torch.empty(rows, count), torch.empty(count), 8, True, 8, 4, True, True, 0.0, 2.5)
    call["route"](torch.empty(rows, count), None, 8, False, 1, 1, False, True, 0.0, 1.0)
    call["scale_choices"](torch.empty(rows, 8), torch.zeros(rows, 8, dtype=INT), torch.empty(count))
    for tokens in sizes:
        shared = torch.empty(tokens, hidden, dtype=BF16)
        ids = torch.zeros(tokens, 8, dtype=INT)
        call["experts"](shared, ids, torch.empty(tokens, 8), gate_up, None, downs, None, "silu", shared)
    ups, backs = (
        [ops.PackedInt8(*size, torch.empty(size, dtype=torch.int8), torch.empty(size[0]))] * count
        for size in ((2 * inner, hidden), (hidden, inner))
    )
    call["experts_int8"](x, torch.zeros(rows, 8, dtype=INT), torch.empty(rows, 8), ups, None, backs, None, "silu")
    if has_float8:
        for tokens in sizes:
            chosen = torch.zeros(tokens, 8, dtype=INT), torch.empty(tokens, 8)
            for group in (0, 128):
                float8 = [float8_weights(count, *size, group) for size in ((2 * inner, hidden), (hidden, inner))]
                inputs = torch.empty(tokens, hidden, dtype=BF16)
                call["experts_float8"](inputs, *chosen, float8[0], None, float8[1], None, "silu")
    for up, back in zip(integer_weights(256, 256), integer_weights(256, 128), strict=True):
        ids = torch.zeros(rows, 8, dtype=INT)
        packed_up, packed_down = [call["pack_wna16"]([up])] * count, [call["pack_wna16"]([back])] * count
        call["experts_wna16"](x[:, :256], ids, torch.empty(rows, 8), packed_up, None, packed_down, None, "silu")
    latent, rotated, deep = 512, 64, 128  # DeepSeek V3
    wide = torch.empty(rows, deep, 128 + rotated, dtype=BF16)
    key_weights = [ops.PackedWeight(latent, 128, BF16, torch.empty(latent, 128, dtype=BF16))] * deep
    for tokens in sizes:
        call["linear_heads"](torch.empty(tokens, deep, 128 + rotated, dtype=BF16), key_weights)
    lines, angles = torch.empty(32, page, latent + rotated, dtype=BF16), torch.empty(4096, rotated)
    joined, gain = torch.empty(rows, latent + rotated, dtype=BF16), torch.empty(latent, dtype=BF16)
    for interleaved in (True, False):
        call["latent_rope_store"](wide, joined, gain, 1e-6, angles, index, lines, index, interleaved)
    for count in (20, deep):
        queries = torch.empty(512, count, latent, dtype=BF16), torch.empty(512, count, rotated, dtype=BF16)
        call["latent_attention"](*queries, lines, tables, starts, lens, 0.1)
    down, up = torch.empty(8, 2, 32, hidden, dtype=BF16), torch.empty(8, 32, hidden, dtype=BF16)
    ranks, shards = torch.zeros(8, 2, dtype=INT), (hidden - 64, 64)
    call["add_lora"](x.clone(), x, lens, down, up, ranks, torch.empty(8, 2), shards)
    logits, ones = torch.empty(rows, vocab), torch.ones(rows)
    call["sample_fused"](logits, index, index, index == 0, ones, True, 5)
    call["sample_few"](logits, index, index, index == 0, ones, lens, ones, ones, False, -1)
    call["logprobs"](logits, index, 0, index[:, None], ones)
    call["filter_logits"](logits, lens, ones, ones)
    call["sampling_mask"](logits, logits, index, index == 0, ones, 1024)
    call["penalize"](logits, tables, lens, lens, ones, ones, ones)
    call["edit_rows"](tables, torch.zeros(2, 4, dtype=INT), lens)
    call["prepare_step"](tables, tables, lens, lens, starts, page, index, index, index, lens, tables)
    call["advance_step"](tables, tables, lens, lens, page, index, index, index, index, lens, tables)
    recurrent_calls(call)
    gradient_calls(call, wide_heads=wide_heads)
    if not is_dependent:
        return
    for entry in launch.table()["launch"]:
        entry["dependent"] = True
    call["add_rms_norm"](x, x, weight, 1e-6)
    call["silu_mul"](x)
    call["norm_rope_store"](qkv, norm, norm, 1e-6, table, index, *caches, index)
    call["paged_attention"](many, *caches, tables, starts, lens, 0.1, 0)
    call["linear"](x, ops.PackedWeight(1024, hidden, BF16, torch.empty(1024, hidden, dtype=BF16)), None)
    if has_float8:
        call["linear_float8"](x, ops.PackedFloat8(hidden, hidden, values, scales[:1], hidden), None)
    call["gated_linear"](x, packed, None, "silu")
    call["linear_int8"](x, integers, None)


def float8_weights(count: int, outputs: int, inputs: int, group: int) -> list[Any]:
    """One weight for all experts, with a scale for each `group` inputs of an output (0: for all)."""
    values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    scales = torch.empty(inputs // group if group else 1, outputs)
    return [ops.PackedFloat8(outputs, inputs, values, scales, group or inputs)] * count


def float8_caches(
    call: dict[str, Any], many: Any, k: Any, qkv: Any, norm: Any, table: Any, index: Any, *rows: Any
) -> None:
    """Storing into caches of float8, and attention over them; `rows`: tables, starts and lengths."""
    caches = torch.empty(2, 32, k.shape[1], 64, k.shape[2], dtype=torch.float8_e4m3fn).unbind()
    kernels = 0
    for scales in ((1.0, 1.0), (0.03, 0.7)):
        call["store_kv"](k, k, *caches, index, *scales)
        call["norm_rope_store"](qkv, norm, norm, 1e-6, table, index, *caches, index, *scales)
        call["paged_attention"](many, *caches, *rows, 0.1 * scales[0], 0, scales[1])
        kernels = kernels or len(compiled)
    assert len(compiled) == kernels, "a scale is compiled in"


def recurrent_calls(call: dict[str, Any]) -> None:
    """The layers with states at the shapes of Qwen3-Next and LFM2, and a gated attention's parts."""
    rows, heads, dim, taps, channels = 16, 32, 128, 4, 8192
    lens, starts, saves = torch.zeros(rows, dtype=INT), torch.zeros(rows + 1, dtype=INT), torch.zeros(3, 3, dtype=INT)
    columns = starts, lens, torch.zeros(rows, dtype=LONG), lens, lens, saves
    vector = torch.empty(heads)
    call["gated_delta"](
        torch.empty(rows, channels + heads * dim, dtype=BF16),
        torch.empty(rows, 2 * heads, dtype=BF16),
        torch.empty(taps, channels),
        vector,
        vector,
        torch.empty(dim),
        1e-6,
        True,
        torch.empty(rows, heads, dim, dim),
        torch.empty(rows, 37, channels + 2 * heads, dtype=BF16),
        *columns,
    )
    for bias in (None, torch.empty(2048)):
        call["short_conv"](
            torch.empty(rows, 3 * 2048, dtype=BF16),
            torch.empty(3, 2048),
            bias,
            torch.empty(rows, 36, 2048, dtype=BF16),
            *columns,
        )
    wide = 8192 + 2 * 128  # of Granite 4: the channels of a convolution
    for bias, norm in ((None, None), (torch.empty(wide), torch.empty(8192))):
        call["scan_states"](
            torch.empty(rows, 8192 + wide + 128, dtype=BF16),
            torch.empty(4, wide),
            bias,
            *[torch.empty(128)] * 3,
            norm,
            8192,
            1e-5,
            0.0,
            math.inf,
            torch.empty(rows, 128, 128, 64),
            torch.empty(rows, 37, wide + 128, dtype=BF16),
            *columns,
        )
    mixed, gated = torch.empty(rows, 16, 256, dtype=BF16), torch.empty(rows, 36 * 256, dtype=BF16)
    call["gate_heads"](mixed, gated)
    caches = torch.empty(2, 32, 2, 64, 256, dtype=BF16).unbind()
    norm, index = torch.empty(256), torch.zeros(rows, dtype=LONG)
    call["norm_rope_store"](
        gated, norm, norm, 1e-6, torch.empty(4096, 64), index, *caches, index, 1.0, 1.0, False, False, True
    )


def gradient_calls(call: dict[str, Any], *, wide_heads: bool) -> None:
    """What a trainer needs, at the shapes of an 8B model; attention in float32, too, and with heads of other sizes."""
    rows, hidden, inner = 512, 4096, 12288
    x, grad, up = (torch.empty(rows, width, dtype=BF16) for width in (hidden, hidden, 2 * inner))
    call["norm_gradients"](grad, x, torch.empty(hidden, dtype=BF16), 1e-6, x)
    call["layer_norm_gradients"](grad, x, torch.empty(hidden, dtype=BF16), 1e-6, x)
    heads = torch.empty(rows * 32, 128, dtype=BF16)
    call["norm_gradients"](heads.float(), heads, torch.empty(128, dtype=BF16), 1e-6)
    call["activation_gradients"](torch.empty(rows, inner, dtype=BF16), up, "silu", True)
    for activation in ("gelu_tanh", "gelu", "relu2"):
        call["activation_gradients"](x, x, activation)
    call["softmax"](torch.empty(16, 151936))
    call["sum_rows"](torch.empty(rows, hidden), torch.zeros(rows, dtype=LONG), 151936)
    call["matrix_product"](up, torch.empty(2 * inner, hidden, dtype=BF16))
    call["matrix_product"](up.t(), x, torch.float32)
    call["matrix_product"](torch.empty(501, inner, dtype=BF16).t(), torch.empty(501, hidden, dtype=BF16), torch.float32)
    call["matrix_product"](x, torch.empty(16, hidden, dtype=BF16).t(), torch.float32)
    call["matrix_product"](x.float(), torch.empty(hidden, hidden))
    mixture_gradient_calls(call)
    tree = torch.zeros(9, dtype=LONG), torch.zeros(4096, dtype=LONG), torch.zeros(9, dtype=LONG)
    wide = [(256, BF16, 0, 0.0)] if wide_heads else []
    cases = [(64, BF16, 0, 0.0), (128, BF16, 0, 0.0), (128, BF16, 1000, 50.0), (128, torch.float32, 0, 0.0), *wide]
    for dim, dtype, window, softcap in cases:
        q, k = torch.empty(rows, 32, dim, dtype=dtype), torch.empty(rows, 8, dim, dtype=dtype)
        call["attention_gradients"](q, q, k, k, *tree, 0.1, window, softcap)


def mixture_gradient_calls(call: dict[str, Any]) -> None:
    """What a trainer needs of a layer of 30B-A3B."""
    rows, count, hidden, inner, k = 4096, 128, 2048, 768, 8
    starts = torch.zeros(count + 1, dtype=INT)
    for dtype in (BF16, torch.float32):
        x, both = torch.empty(rows, hidden, dtype=dtype), torch.empty(rows, 2 * inner, dtype=dtype)
        gate_up, down = [torch.empty(2 * inner, hidden, dtype=dtype)] * count, [both.new_empty(hidden, inner)] * count
        call["expert_products"](x, gate_up, starts, True)
        call["expert_products"](both, gate_up, starts, False)
        call["expert_products"](x, down, starts, False, torch.float32)
        call["expert_weight_gradients"](both, x, starts)
        call["row_products"](torch.empty(rows, inner), both[:, :inner])
    logits, ids = torch.empty(rows, count), torch.zeros(rows, k, dtype=INT)
    for sigmoid in (False, True):
        call["route_gradients"](torch.empty(rows, k), logits, ids, sigmoid, True, 0.0, 1.0)


def candidate_calls(*, has_float8: bool) -> None:
    """What candidates change, with all of them in use: attention of a step of an 8B model, of one with a float8 cache,
    with heads of 256 and with 8 heads to a KV head; of prompts; products of 256 rows with two chains, one, and a gate;
    of 600, and of one; a mixture."""
    candidates.use(candidates.BY_NAME)
    call = {name: op.implementations["triton"].call for name, op in OPS.items() if "triton" in op.implementations}
    rows = 16
    batch = torch.zeros(rows, 64, dtype=INT), torch.zeros(rows + 1, dtype=INT), torch.zeros(rows, dtype=INT)
    for heads, kv_heads, dim, dtype in (
        (32, 8, 128, BF16),
        *([(32, 8, 128, torch.float8_e4m3fn)] if has_float8 else []),
        (8, 4, 256, BF16),
        (64, 8, 128, BF16),
    ):
        q, caches = torch.empty(rows, heads, dim, dtype=BF16), torch.empty(2, 32, kv_heads, 64, dim, dtype=dtype)
        work = call["attention_work"](q, caches[0], *batch, 0)
        call["paged_attention"](q, *caches.unbind(), *batch, 0.1, 0, 1.0, 0.0, None, None, work)
    for heads, kv_heads, dim, window, sinks in (
        (32, 8, 128, 0, None),
        (28, 4, 128, 1000, None),
        (64, 8, 64, 128, torch.empty(64)),
    ):
        q, caches = torch.empty(512, heads, dim, dtype=BF16), torch.empty(2, 32, kv_heads, 64, dim, dtype=BF16).unbind()
        for names in [(), candidates.BY_NAME] if heads != 28 else [candidates.BY_NAME]:  # without any, to compare
            candidates.use(names)
            call["paged_attention"](q, *caches, *batch, 0.1, window, 1.0, 0.0, sinks)
    x = torch.empty(256, 4096, dtype=BF16)
    for outputs in (4096, 24576):
        packed = ops.PackedWeight(outputs, 4096, BF16, torch.empty(outputs, 4096, dtype=BF16))
        call["linear"](x, packed, None)
    call["gated_linear"](x, packed, None, "silu")
    call["linear"](torch.empty(600, 4096, dtype=BF16), packed, None)
    mixture_calls(call, has_float8=has_float8)
    row = torch.empty(1, 1024, dtype=BF16)  # of 0.6B
    weights = {size: ops.PackedWeight(size, 1024, BF16, torch.empty(size, 1024, dtype=BF16)) for size in NARROW}
    for left_out in ("chains_next", "products_early", ""):
        candidates.use(candidates.BY_NAME.keys() - {left_out})
        down, qkv, _ = (call["linear"](row, packed, None) for packed in weights.values())
        call["add_rms_norm"](down, row, row[0], 1e-6)
        pages, index = torch.empty(2, 32, 8, 64, 128, dtype=BF16).unbind(), torch.zeros(1, dtype=LONG)
        call["norm_rope_store"](qkv, row[0, :128], row[0, :128], 1e-6, torch.empty(4096, 128), index, *pages, index)
        call["silu_mul"](call["linear"](row, weights[1024], None))  # has them added
    call["gated_linear"](row, weights[6144], None, "silu")
    values, scales = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn), torch.empty(32, 4096)
    if has_float8:  # float8 weights have been packed: norms and gates round
        call["pack_linear_float8"](row)
        call["pack_scaled_float8"](torch.empty(16, 12288, dtype=torch.float8_e4m3fn), scales, 12288)
        call["add_rms_norm"](row, row, row[0], 1e-6)
        call["silu_mul"](torch.empty(1, 2 * 12288, dtype=BF16))
    for group in (4096, 128) if has_float8 else ():
        call["linear_float8"](x, ops.PackedFloat8(4096, 4096, values, scales[: 4096 // group], group), None)


def mixture_calls(call: dict[str, Any], *, has_float8: bool) -> None:
    """A layer of 30B-A3B with 1 and 512 rows, in bfloat16, int8 and float8."""
    count, hidden, inner = 128, 2048, 768
    sizes = (2 * inner, hidden), (hidden, inner)
    floats = [[ops.PackedWeight(*size, BF16, torch.empty(size, dtype=BF16))] * count for size in sizes]
    integers = [
        [ops.PackedInt8(*size, torch.empty(size, dtype=torch.int8), torch.empty(size[0]))] * count for size in sizes
    ]
    for rows in (1, 512):
        x, (ids, weights) = (
            torch.empty(rows, hidden, dtype=BF16),
            call["route"](torch.empty(rows, count), None, 8, False, 1, 1, False, True, 0.0, 1.0),
        )
        kinds = [("experts", floats), ("experts_int8", integers)]
        if has_float8:
            for group in (0, 128):
                kinds.append(("experts_float8", [float8_weights(count, *size, group) for size in sizes]))
        for name, (up, down) in kinds:
            call[name](x, ids, weights, up, None, down, None, "silu")


def rank_calls() -> None:
    """What 2 and 8 ranks exchange of 64 rows: sums, logits of rank 0, and copies, on both ends."""
    for size in (2, 8):
        for rank in (0, 1):
            group = PeerGroup(Inboxes(rank, size, torch.zeros(size, dtype=LONG), PROGRAMS, CAPACITY))
            group.add(torch.empty(64, 4096))
            group.gather(torch.empty(4, 151936 // size))
            group.copy(torch.empty(2, 64, 4096, dtype=BF16), 0)


def nvidia_figures(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [str(CUOBJDUMP), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[-1]) for word in ("REG", "STACK"))
    ptx = kernel.asm["ptx"]
    return {
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "chains": chains(ptx),
        "warp_chains": warp_chains(ptx),
        "loop": loop(kernel.asm["ttgir"]) if "wgmma" in ptx else [],
        "by_warps": bool(re.search(r"mma\.sync\.aligned\.m16n8k16\S*\.f32\.bf16", ptx)),
        "waits": -1 < ptx.find("griddepcontrol.wait") < ptx.find("griddepcontrol.launch_dependents"),
        "early": ptx.partition("griddepcontrol.wait")[0].count("cp.async.bulk.tensor"),  # tiles fetched before it
        "fma": bool(re.search(r"\bfma\.", ptx)),
        "flags": re.findall(r"st\.global\.v4|bar\.sync|\w+\.(?:release|acquire)\.sys|ld\.global\.cg", ptx),
        "atomics": bool(re.search(r"\b(atom|red)\.", ptx)),
    }


def amd_figures(kernel: Any) -> dict[str, Any]:
    assembly = kernel.asm["amdgcn"]
    registers, stack = (
        int(re.findall(rf"^    \.{word}: +(\d+)", assembly, re.MULTILINE)[-1])
        for word in ("vgpr_count", "private_segment_fixed_size")
    )
    return {
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "by_matrix_unit": "v_mfma_" in assembly,
        "atomics": bool(re.search(r"\b(?:global|flat|buffer)_atomic_(?:pk_)?add_(?:f|bf)", assembly)),
    }


def chains(ptx: str) -> list[dict[str, Any]]:
    """Facts of each set of sums: inputs per operation, length of the chain, whether the first operation begins at 0,
    whether all others add to the sum, and whether operands are taken in ascending order of the inputs."""
    always = set(re.findall(r"mov\.pred\s+(%p\d+), -1;", ptx)) - set(re.findall(r"mov\.pred\s+(%p\d+), 0;", ptx))
    registers = {name: (base, int(past or 0)) for name, base, past in PLACE.findall(ptx)}
    chains: dict[str, list[tuple[str, ...]]] = {}
    for inputs, sums, left, right, adds in MATMUL.findall(ptx):
        chains.setdefault(sums, []).append((inputs, adds, left, right))
    described = []
    for chain in chains.values():
        operands = [[resolve(registers, step[side]) for step in chain] for side in (2, 3)]
        operands = [side for side in operands if side[0][0].startswith("%")]  # not those that lie in registers
        described.append(
            {
                "inputs": sorted({int(step[0]) for step in chain}),
                "length": len(chain),
                "fresh": chain[0][1] == "0",
                "adds": all(step[1] in always for step in chain[chain[0][1] == "0" :]),
                "ascending": all(
                    len({base for base, _ in side}) == 1 and side == sorted(set(side)) for side in operands
                ),
            }
        )
    return described


def warp_chains(ptx: str) -> list[dict[str, Any]]:
    """Facts of the chains of mma.sync, alike ones once: their length, and how many orders of the left operands they
    have."""
    ends: dict[str, list[str]] = {}  # left operands of the chains so far, by the sums that they have reached
    for sums, left, begin in WARP_MATMUL.findall(ptx):
        ends[sums] = [*ends.pop(begin, []), left]
    lengths = sorted({len(chain) for chain in ends.values()})
    return [
        {"length": length, "orders": len({tuple(chain) for chain in ends.values() if len(chain) == length})}
        for length in lengths
    ]


def resolve(registers: dict[str, tuple[str, int]], name: str) -> tuple[str, int]:
    """The register that the named one is reckoned from, and how far past it."""
    past = 0
    while name in registers:
        name, more = registers[name]
        past += more
    return name, past


def loop(ttgir: str) -> list[str]:
    """Floating-point operations of the innermost loop that multiplies matrices, in order, with their layouts.

    Tiles of more rows and as many more warps are written as those of 64 rows and four warps: a warp has the same rows.
    None if the inputs take one step, which is no loop.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    ttgir = ttgir.partition(" partition0(")[0]  # the first of groups of warps with roles
    lines = [line.partition(" loc(")[0] for line in ttgir.splitlines()]
    products = [i for i, line in enumerate(lines) if "ttng.warp_group_dot " in line]
    if not products:
        return []
    first = max((i for i, line in enumerate(lines[: products[0]]) if "scf.for" in line), default=-1)
    if first < 0:
        return []
    last = next(i for i, line in enumerate(lines) if "scf.yield" in line and i > products[-1])
    warps = re.search(r"warpsPerCTA = \[(\d+), 1\], instrShape", ttgir)
    rows = 16 * int(warps[1]) if warps else 64
    operations = []
    for line in lines[first:last]:
        if operation := FLOATING.search(line):
            types = re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), line.rpartition(" : ")[2])
            types = types.replace(f"tensor<{rows}x", "tensor<64x").replace(", mutable>", ">")
            types = re.sub(rf"^( *!ttg\.memdesc<){rows}x", r"\g<1>64x", types)  # of the left operand
            operations.append(
                f"{operation[1]} {types}".replace(f"warpsPerCTA = [{rows // 16}, 1]", "warpsPerCTA = [4, 1]")
            )
    return operations


if __name__ == "__main__":
    assert registry.load_extension("cuda") is None
    target = sys.argv[1]
    if target == AMD.architecture:
        launch.compile_for(AMD)
        driver.set_active(AmdDriver())
    else:
        targets.use(targets.TARGETS[target])
    wna16.torch_device = lambda: torch.device("cpu")  # where it packs
    JITFunction.run = compile_only
    number = 0 if target == AMD.architecture else targets.number(target)
    if sys.argv[2:] == ["candidates"]:
        candidate_calls(has_float8=number >= 89)
    else:
        calls(
            [int(size) for size in sys.argv[2:]],
            has_float8=number >= 89,
            is_dependent=number >= 90,
            wide_heads=number != 90,
        )
    if number:
        rank_calls()  # by instructions of NVIDIA's
    figures = nvidia_figures if number else amd_figures
    report = {name: figures(kernel) for name, kernel in sorted(compiled.items())}
    json.dump({"kernels": report, "failed": failed}, sys.stdout, indent=1)
