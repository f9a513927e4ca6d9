"""What some tests need beyond `make install`, and how to get it; `make test-all` lists it first.

A test that is skipped without it names the entry here, and tests/root/test_needs.py checks that none is left out.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokserve.base import processes

OPEN_FILES = 10_200  # ten thousand connections, and the server's own files
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
MAPPINGS = Path("/proc/self/smaps")
CPUS = Path("/proc/cpuinfo")
MIKE = Path(__file__).parents[1] / "build" / "docs" / "bin" / "mike"


@dataclass(frozen=True, slots=True)
class Need:
    """Something optional; `files` in tests/ have tests that are skipped without it."""

    name: str
    files: tuple[str, ...]
    is_there: Callable[[], bool]
    how: str

    @property
    def reason(self) -> str:
        return f"needs {self.name}: {self.how}"

    def skips(self) -> pytest.MarkDecorator:
        """The mark of a test that needs it."""
        return pytest.mark.skipif(not self.is_there(), reason=self.reason)

    def or_skip(self) -> None:
        """Skips the test that calls it."""
        if not self.is_there():
            pytest.skip(self.reason)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a parent
        return False


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def has_driver() -> bool:
    """Whether NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _has_mkl() -> bool:
    import torch

    return sys.platform == "linux" and torch.backends.mkl.is_available() and shutil.which("cc") is not None


def _can_open_files() -> bool:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= OPEN_FILES


def _can_run_arm() -> bool:
    programs = ("aarch64-linux-gnu-g++", "qemu-aarch64", "cmake", "c++")
    return platform.machine() == "x86_64" and all(shutil.which(program) for program in programs)


def _has_bf16_dot_product() -> bool:
    return CPUS.is_file() and {"avx512_bf16", "avx512vbmi"} <= set(CPUS.read_text(encoding="utf-8").split())


def time_slice() -> int:
    """Nanoseconds of the calling thread's time slice; 0: the kernel does not say."""
    attr, number = processes._SchedAttr(), processes.SCHED_SETATTR[platform.machine()][1]
    failed = ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attr), ctypes.sizeof(attr), 0)
    return 0 if failed else int(attr.runtime)


def _has_time_slices() -> bool:
    return sys.platform == "linux" and platform.machine() in processes.SCHED_SETATTR and time_slice() > 0


def browser() -> tuple[str | None, str | None]:
    """Paths of Chromium and of its driver."""
    return shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")


EXTENSION = Need(
    "the compiled extension",
    (
        "e2e/test_fleet.py",
        "conftest.py",
        "ops/test_arithmetic.py",
        "ops/test_cpu.py",
        "ops/test_capture.py",
        "ops/test_wna16.py",
        "runner/test_arithmetic.py",
        "runner/test_cpu_graphs.py",
        "runner/test_deltas.py",
    ),
    lambda: _has_module("tokserve._C"),
    "a C++20 compiler (Debian: apt-get install g++), then make clean install",
)
TRITON = Need(
    "Triton",
    (
        "executor/test_peers.py",
        "ops/test_candidates.py",
        "ops/test_compile_ahead.py",
        "ops/test_exchange.py",
        "ops/test_launch.py",
        "ops/test_later_keys.py",
        "ops/test_products_early.py",
        "ops/test_prompt_groups.py",
        "ops/test_sorted_choices.py",
        "ops/test_shared_keys.py",
        "ops/test_targets.py",
        "ops/test_training_kernels.py",
        "models/test_chunked.py",
        "ops/test_triton.py",
        "ops/test_tuning.py",
        "runner/test_gpu_probe.py",
        "runner/test_compile.py",
        "runner/test_triton.py",
        "train/test_gpu_families.py",
        "train/test_gpu_policy.py",
    ),
    lambda: _has_module("triton"),
    "Linux; pip install -e '.[dev]'",
)
TRACING = Need(
    "OpenTelemetry",
    ("server/test_tracing.py",),
    lambda: _has_module("opentelemetry.exporter.otlp.proto.http"),
    "pip install -e '.[otel]'",
)
PEFT = Need(
    "peft",
    (
        "e2e/test_pushed_models.py",
        "rl/test_adapter_push.py",
        "rl/test_module_tensors.py",
        "train/test_exact_peft.py",
        "train/test_on_policy.py",
    ),
    lambda: _has_module("peft"),
    "pip install -e '.[dev]'",
)
HATCHLING = Need("hatchling", ("rl/test_distribution.py",), lambda: _has_module("hatchling"), "pip install -e '.[dev]'")
CHROMIUM = Need(
    "Chromium and ChromeDriver",
    ("e2e/browser.py",),
    lambda: None not in browser(),
    "apt-get install chromium chromium-driver",
)
DOCS_BUILDER = Need(
    "MkDocs and mike",
    ("docs/test_versions.py",),
    MIKE.exists,
    "make docs",
)
PROMETHEUS = Need(
    "Prometheus",
    ("e2e/test_prometheus.py",),
    lambda: shutil.which("prometheus") is not None,
    "apt-get install prometheus",
)
FILES = Need(
    f"{OPEN_FILES} open files",
    ("e2e/test_overload.py", "e2e/test_soak.py"),
    _can_open_files,
    f"ulimit -n {OPEN_FILES} (the hard limit is in /etc/security/limits.conf, or docker run --ulimit nofile)",
)
SYSTEMD = Need(
    "systemd-analyze",
    ("examples/test_deploy.py",),
    lambda: shutil.which("systemd-analyze") is not None,
    "apt-get install systemd",
)
MAKE = Need(
    "make",
    ("root/test_audit.py", "root/test_install.py"),
    lambda: shutil.which("make") is not None,
    "apt-get install make",
)
CMAKE = Need(
    "CMake and Ninja",
    ("root/test_install.py",),
    lambda: None not in (shutil.which("cmake"), shutil.which("ninja")),
    "apt-get install cmake ninja-build",
)
COMPILER = Need(
    "a C compiler",
    ("root/test_gpus.py", "fake_cuda.py"),
    lambda: any(map(shutil.which, ("gcc", "cc", "clang"))),
    "apt-get install gcc",
)
MKL = Need(
    "a C compiler, and MKL in torch",
    ("ops/test_mkl.py",),
    _has_mkl,
    "x86-64 Linux; apt-get install gcc",
)
HUGE = Need(
    "transparent huge pages", ("ops/test_arena.py",), HUGE_PAGES.exists, "a Linux kernel with TRANSPARENT_HUGEPAGE"
)
SMAPS = Need("/proc/self/smaps", ("ops/test_arena.py",), MAPPINGS.exists, "a Linux kernel with /proc mounted")
GLIBC = Need("glibc", ("root/test_memory.py",), lambda: platform.libc_ver()[0] == "glibc", "a Linux that is not musl")
ARM = Need(
    "a compiler and an emulator for 64-bit ARM",
    ("ops/test_aarch64.py",),
    _can_run_arm,
    "x86-64; apt-get install g++-aarch64-linux-gnu qemu-user cmake g++",
)
BF16 = Need(
    "a processor with AVX512-BF16 and AVX512-VBMI",
    ("ops/test_amx.py",),
    _has_bf16_dot_product,
    "AMD Zen 4 or later, Intel Sapphire Rapids or later",
)
TIME_SLICES = Need("time slices of threads", ("root/test_processes.py",), _has_time_slices, "Linux 6.12 or later")
GPU = Need(
    "an NVIDIA GPU",
    (
        "e2e/test_gpu.py",
        "e2e/test_gpu_features.py",
        "e2e/test_gpu_ipc.py",
        "e2e/test_gpu_ranks.py",
        "e2e/test_gpu_training.py",
        "runner/test_gpu.py",
        "runner/test_gpu_both_ways.py",
        "ops/test_triton.py",
    ),
    _has_gpu,
    "not for make test-all; scripts/gpu_check.sh runs what needs one",
)
RAY = Need(
    "Ray",
    (
        "ray/test_engines.py",
        "ray/test_data.py",
        "ray/test_examples.py",
        "ray/test_ranks.py",
        "ray/test_rows.py",
        "ray/test_serve.py",
    ),
    lambda: _has_module("ray.serve"),
    "pip install -e '.[ray]'",
)
NEEDS = (
    EXTENSION,
    TRITON,
    TRACING,
    PEFT,
    HATCHLING,
    CHROMIUM,
    DOCS_BUILDER,
    PROMETHEUS,
    FILES,
    SYSTEMD,
    MAKE,
    CMAKE,
    COMPILER,
    MKL,
    HUGE,
    SMAPS,
    GLIBC,
    ARM,
    BF16,
    TIME_SLICES,
    GPU,
    RAY,
)


def report() -> str:
    """A line for each: whether it is there and, if not, which tests are skipped and how to get it."""
    lines = ["Optional requirements of the tests:"]
    for need in NEEDS:
        present = need.is_there()
        lines.append(f"  {'found  ' if present else 'MISSING'}  {need.name}")
        if not present:
            lines.append(f"           {need.how}")
            lines.append(f"           skipped without it: {', '.join(f'tests/{name}' for name in need.files)}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(), flush=True)
