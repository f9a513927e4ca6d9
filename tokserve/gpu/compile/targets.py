"""The architectures that kernels are compiled for, and Triton's driver where there is no GPU."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tokserve.gpu.kernels import launch
from tokserve.gpu.kernels.launch import Gpu

KIB = 1 << 10
WARP = 32  # threads
# A program may take the shared memory of a multiprocessor less 1 KiB (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").  Multiprocessors are those of the largest card: they decide on grids only.
TARGETS = {
    gpu.architecture: gpu
    for gpu in (
        Gpu("sm_80", 163 * KIB, 108),
        Gpu("sm_86", 99 * KIB, 84),
        Gpu("sm_89", 99 * KIB, 142),
        Gpu("sm_90", 227 * KIB, 132),
        Gpu("sm_100", 227 * KIB, 148),
        Gpu("sm_120", 99 * KIB, 188),
    )
}
FLOAT8 = 89  # the first architecture that multiplies float8


class TargetDriver:
    """What Triton's compiler asks of a driver, for an architecture."""

    def __init__(self, architecture: str) -> None:
        self._target = GPUTarget("cuda", number(architecture), WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def number(architecture: str) -> int:
    """The compute capability times ten: 90 of "sm_90"."""
    return int(architecture.removeprefix("sm_"))


def has_float8(gpu: Gpu) -> bool:
    """Whether the GPU multiplies float8 (e4m3) by instructions of its own."""
    return number(gpu.architecture) >= FLOAT8


def use(gpu: Gpu) -> None:
    """Let this process compile kernels for `gpu`, and for no other from here on."""
    launch.compile_for(gpu)
    driver.set_active(TargetDriver(gpu.architecture))
