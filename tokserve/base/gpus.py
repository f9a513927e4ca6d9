"""The GPUs of this machine, without torch: NVIDIA's management library counts them, on WSL2 too, where there are no
device files."""

from __future__ import annotations

import ctypes
from pathlib import Path

NVML = "libnvidia-ml.so.1"
DEVICES = Path("/dev")


def count_nvidia_gpus() -> int:
    """The number of NVIDIA GPUs that the driver names; without its library, that has device files."""
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return len([path for path in DEVICES.glob("nvidia*") if path.name[6:].isdigit()])
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return 0
    try:
        failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return 0 if failed else int(count.value)
    finally:
        library.nvmlShutdown()


def has_amd_gpu() -> bool:
    """Whether there is an AMD GPU with its compute driver."""
    return (DEVICES / "kfd").exists()
