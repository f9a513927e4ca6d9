"""What GPUs add to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("rl",),  # the driver by ctypes, which a trainer has too
    options="tokserve.gpu.options:GpuOptions",
    check="tokserve.gpu.options:check",
    engine="tokserve.gpu.idle_capture:make",
    runner="tokserve.gpu.runner_calls:make",
    command_line="tokserve.gpu.compile.command:COMMANDS",
    parts={
        "backend": "tokserve.gpu.cuda:CudaBackend",
        "compile_start": "tokserve.gpu.compile.start:compile_start",
        "compile_ahead": "tokserve.gpu.kernels.launch:compile_ahead",
        "blocks": "tokserve.gpu.block_copies:DeviceBlocks",
        "peers": "tokserve.gpu.peers:PeerMemory",
        "peers_unavailable": "tokserve.gpu.peers:PeersUnavailable",
        "is_on": "tokserve.gpu.candidates:is_on",
        "kept_tables": "tokserve.gpu.kernels.launch:kept_tables",
    },
)
