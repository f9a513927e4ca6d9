"""What GPUs add to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    options="tokserve.gpu.options:GpuOptions",
    check="tokserve.gpu.options:check",
    parts={
        "backend": "tokserve.gpu.cuda:CudaBackend",
        "compile_ahead": "tokserve.gpu.kernels.launch:compile_ahead",
        "kept_tables": "tokserve.gpu.kernels.launch:kept_tables",
    },
)
