"""A program, not a test: compiles every Triton kernel for sm_90 as its launcher would call it, with no GPU in sight.

The driver is replaced by one that names the target, and launching by compiling.  Prints a JSON object: for each kernel
registers and bytes of stack a thread uses (ptxas), bytes of shared memory, and whether its PTX has wgmma.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tokserve import ops
from tokserve.ops import registry
from tokserve.ops.registry import OPS

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, LONG, INT = torch.bfloat16, torch.int64, torch.int32


class NamesTheTarget:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: dict[str, Any] = {}
run = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    assert kwargs["enable_fp_fusion"] is False, f"{self.__name__} leaves contraction to the compiler"
    name = self.__name__.removesuffix("_kernel")
    same = sum(key.split("#")[0] == name for key in compiled)
    if all(kernel.hash != other.hash for other in compiled.values()):
        compiled[f"{name}#{same}" if same else name] = kernel
    return kernel


def calls() -> None:
    """Every launcher, at the shapes of an 8B model with 64-token pages."""
    call = {name: op.implementations["triton"].call for name, op in OPS.items() if "triton" in op.implementations}
    rows, hidden, heads, kv_heads, dim, page, vocab = 16, 4096, 32, 8, 128, 64, 151936
    x, weight = torch.empty(rows, hidden, dtype=BF16), torch.empty(hidden, dtype=BF16)
    call["rms_norm"](x, weight, 1e-6)
    call["add_rms_norm"](x, x, weight, 1e-6)
    call["silu_mul"](x)
    call["gelu_mul"](x)
    q, k = torch.empty(rows, heads, dim, dtype=BF16), torch.empty(rows, kv_heads, dim, dtype=BF16)
    table, index = torch.empty(4096, dim), torch.zeros(rows, dtype=LONG)
    call["rope"](q, k, table, index)
    caches = torch.empty(2, 32, kv_heads, page, dim, dtype=BF16).unbind()
    call["store_kv"](k, k, *caches, index)
    norm = torch.empty(dim, dtype=BF16)
    qkv = torch.empty(rows, (heads + 2 * kv_heads) * dim, dtype=BF16)
    call["norm_rope_store"](qkv, norm, norm, 1e-6, table, index, *caches, index)
    starts, lens = torch.zeros(rows + 1, dtype=INT), torch.zeros(rows, dtype=INT)
    tables = torch.zeros(rows, 64, dtype=INT)
    many = torch.empty(512, heads, dim, dtype=BF16)
    kernels = 0
    for window in (0, 1000):
        call["paged_attention"](many, *caches, tables, starts, lens, 0.1, window)
    float8 = torch.empty(2, 32, kv_heads, page, dim, dtype=torch.float8_e4m3fn).unbind()
    for scales in ((1.0, 1.0), (0.03, 0.7)):
        call["store_kv"](k, k, *float8, index, *scales)
        call["norm_rope_store"](qkv, norm, norm, 1e-6, table, index, *float8, index, *scales)
        call["paged_attention"](many, *float8, tables, starts, lens, 0.1 * scales[0], 0, scales[1])
        kernels = kernels or len(compiled)
    assert len(compiled) == kernels, "a scale is compiled in"
    packed = ops.PackedWeight(hidden, hidden, BF16, torch.empty(hidden, hidden, dtype=BF16))
    for tokens in (16, 128, 512):
        call["linear"](torch.empty(tokens, hidden, dtype=BF16), packed, None)
    call["linear"](x, packed, weight, torch.float32)
    values, scales = torch.empty(hidden, hidden, dtype=torch.float8_e4m3fn), torch.empty(hidden // 128, hidden)
    by_row = ops.PackedFloat8(hidden, hidden, values, scales[:1], hidden)
    by_block = ops.PackedFloat8(hidden, hidden, values, scales, 128)
    for quantized in (by_row, by_block):
        for tokens in (16, 128, 512):
            call["linear_float8"](torch.empty(tokens, hidden, dtype=BF16), quantized, None)
    down, up = torch.empty(8, 2, 32, hidden, dtype=BF16), torch.empty(8, 32, hidden, dtype=BF16)
    ranks, sizes = torch.zeros(8, 2, dtype=INT), (hidden - 64, 64)
    call["add_lora"](x.clone(), x, lens, down, up, ranks, torch.empty(8, 2), sizes)
    logits, ones = torch.empty(rows, vocab), torch.ones(rows)
    call["draw"](logits, index, index, index == 0, ones, True, 5)
    call["logprobs"](logits, index, 0, index[:, None], ones)
    call["filter_logits"](logits, lens, ones, ones)
    call["penalize"](logits, tables, lens, lens, ones, ones, ones)
    call["edit_rows"](tables, torch.zeros(2, 4, dtype=INT), lens)
    call["prepare_step"](tables, tables, lens, lens, starts, page, index, index, index, lens, tables)


def figures(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [str(CUOBJDUMP), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[-1]) for word in ("REG", "STACK"))
    return {
        "registers": registers, "stack": stack, "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
        "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
    }  # fmt: skip


if __name__ == "__main__":
    assert registry.load_extension("cuda") is None
    driver.set_active(NamesTheTarget())
    JITFunction.run = compile_only
    calls()
    json.dump({name: figures(kernel) for name, kernel in sorted(compiled.items())}, sys.stdout, indent=1)
