"""The Triton implementations, named "triton", for NVIDIA GPUs from sm_80 on.

Importing this package registers them; it fails with ImportError where Triton is not installed.  The launchers
check no shapes: the callers' inputs are valid.
"""

from __future__ import annotations

from tokserve.gpu.kernels import (
    attention,
    dense,
    elementwise,
    filters,
    float8,
    gated,
    int8,
    kv_store,
    latent,
    lora,
    mixture,
    mixture_wna16,
    recurrent,
    sampling,
    shared_keys,
    step,
    training,
    wna16,
)

__all__ = [
    "attention",
    "dense",
    "elementwise",
    "filters",
    "float8",
    "gated",
    "int8",
    "kv_store",
    "latent",
    "lora",
    "mixture",
    "mixture_wna16",
    "recurrent",
    "sampling",
    "shared_keys",
    "step",
    "training",
    "wna16",
]
