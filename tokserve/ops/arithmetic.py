"""Chooses the compiled CPU kernels: an instruction set, and with it the arithmetic of bfloat16 products.

Kernels of one arithmetic give the same bits in every op on every processor.  `fma` widens bfloat16 to float32 and runs
one chain of fused multiply-adds over K; every CPU has it.  `pairs` is the dot product of AVX512-BF16, `amx` the tiles
of Intel's AMX.  The fastest one depends on the processor, so `auto` measures.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tokserve.base.errors import StartError

FMA = "fma"
ARITHMETICS = (FMA, "pairs", "amx")
CPUINFO = Path("/proc/cpuinfo")
# Fastest first: the bfloat16 dot product runs at half the rate of float32 FMA on Intel, at twice the rate on AMD.
PREFERENCES = {"GenuineIntel": ("amx", FMA, "pairs"), "AuthenticAMD": ("amx", "pairs", FMA)}
DECISIVE = 1.25  # a measurement overrules the preference from this ratio on, so that restarts choose alike
SHAPE = (48, 1024, 512)  # rows, inputs and outputs of the measured product: the weight fits a second-level cache
ROUNDS = 5

Measure = Callable[[ModuleType, Mapping[str, str]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The kernels in use: the instruction set's name, how its bfloat16 products are summed, and GFLOP/s of a product by
    arithmetic, empty if nothing was measured."""

    name: str
    arithmetic: str
    rates: Mapping[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in self.rates.items())
        return f"{self.name}, arithmetic {self.arithmetic}" + (f" (GFLOP/s measured: {rates})" if rates else "")


def choose_kernels(
    dtype: str,
    arithmetic: str = "auto",
    kernels: str | None = None,
    *,
    extension: ModuleType | None = None,
    measure: Measure | None = None,
    vendor: str | None = None,
) -> CpuKernels:
    """Select kernels in the extension, by default `tokserve._C`, and return what was chosen.

    `dtype` of the model: with any but bfloat16 all kernels multiply as `fma` does, so nothing is measured and the
    arithmetic is `fma`.  `kernels` names an instruction set and implies its arithmetic.  Raises StartError if this
    machine cannot run what is named, or if both are named and disagree.
    """
    if extension is None:  # that module also tells the extension how to read tensors
        extension = importlib.import_module("tokserve.ops.cpu.kernels")._C
    best = best_kernels(extension)
    rates: dict[str, float] = {}
    if kernels is not None:
        arithmetic = _arithmetic_of(extension, kernels, arithmetic)
    elif arithmetic != "auto":
        if arithmetic not in best:
            runs = ", ".join(name for name in ARITHMETICS if name in best)
            raise StartError(f"option cpu_arithmetic: this machine does not run {arithmetic!r}; it runs {runs}")
    else:
        if dtype == "bfloat16" and len(best) > 1:
            rates = (measure or measured)(extension, best)
        arithmetic = preferred(rates or dict.fromkeys(best, 0.0), _vendor() if vendor is None else vendor)
    name = kernels or best[arithmetic]
    extension.select(name)
    return CpuKernels(name, arithmetic if dtype == "bfloat16" else FMA, rates)


def best_kernels(extension: ModuleType) -> dict[str, str]:
    """Arithmetic -> the best instruction set of this machine that has it."""
    best: dict[str, str] = {}
    for name in extension.instruction_sets():  # best first
        best.setdefault(extension.arithmetic(name), name)
    return best


def measured(extension: ModuleType, kernels: Mapping[str, str]) -> dict[str, float]:
    """GFLOP/s of one product with each of the kernels, the best of a few rounds; takes some milliseconds."""
    rows, columns, outputs = SHAPE
    x, weight = (torch.ones(n, columns, dtype=torch.bfloat16) for n in (rows, outputs))
    packed = torch.empty(extension.packed_size(outputs, columns, True, False), dtype=torch.bfloat16)
    extension.put_rows(weight, packed, outputs, 0, False)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    seconds: dict[str, Any] = dict.fromkeys(kernels, float("inf"))
    for _ in range(ROUNDS):
        for arithmetic, name in kernels.items():  # in turn: a busy moment slows all of them
            extension.select(name)
            start = time.perf_counter()
            extension.linear(x, packed, None, out)
            seconds[arithmetic] = min(seconds[arithmetic], time.perf_counter() - start)
    return {arithmetic: 2e-9 * rows * columns * outputs / elapsed for arithmetic, elapsed in seconds.items()}


def preferred(rates: Mapping[str, float], vendor: str) -> str:
    """The arithmetic that is known to be the fastest on this vendor's processors, unless another is decisively faster.

    On other processors `fma`, which all machines share, is preferred in the same way.
    """
    known = next(name for name in PREFERENCES.get(vendor, (FMA,)) if name in rates)
    fastest = max(rates, key=lambda name: rates[name])
    return fastest if rates[fastest] > DECISIVE * rates[known] else known


def _arithmetic_of(extension: ModuleType, kernels: str, arithmetic: str) -> str:
    names: list[str] = extension.instruction_sets()  # others that the extension knows are for its tests
    if kernels not in names:
        raise StartError(f"option cpu_kernels: this machine does not run {kernels!r}; it runs {', '.join(names)}")
    actual: str = extension.arithmetic(kernels)
    if arithmetic not in ("auto", actual):
        raise StartError(f"option cpu_kernels: {kernels!r} has the arithmetic {actual!r}, not {arithmetic!r}")
    return actual


def _vendor() -> str:
    if not CPUINFO.is_file():
        return ""
    with CPUINFO.open(encoding="utf-8") as lines:  # the first is enough: on many cores the whole file takes long
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
