"""The kernels of 64-bit ARM give the bits of x86's: a program that calls every kernel is built and run for both.

The build is the package's own (CMakeLists.txt), by a cross compiler; ARM's half runs in an emulator.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
CROSS, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
NEEDED = {  # program: Debian's package
    CROSS: "g++-aarch64-linux-gnu",
    EMULATOR: "qemu-user",
    "cmake": "cmake",
    "c++": "g++",
}
# Entries that only say how others are to be called, and one whose result is the instruction set's own layout: what
# linear_int8 makes of it is compared.
UNCOMPARED = {
    "linear_scratch",
    "linear_panels",
    "route_scratch",
    "lora_scratch",
    "delta_scratch",
    "int8_rows_size",
    "int8_rows",
    "attention_scratch",
    "attention_partial",
    "sampling_scratch",
    "wna16_rows_size",
    "wna16_rows",
    "attention_gradients_scratch",
    "attention_gradients_partial",
}
DTYPES = {"f32": "<u4", "bf16": "<u2", "f16": "<u2", "i8": "<i1", "u8": "<u1", "i32": "<i4", "i64": "<i8"}


def require(*programs: str) -> None:
    missing = [f"{program} (Debian: {NEEDED[program]})" for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@dataclass(frozen=True)
class Program:
    """The built kernel_cases, and what runs it."""

    command: tuple[str, ...]

    def run(self, *arguments: str) -> bytes:
        return subprocess.run([*self.command, *arguments], check=True, stdout=subprocess.PIPE, timeout=600).stdout

    def instruction_sets(self) -> list[str]:
        """The instruction sets of `fma`, the arithmetic whose bits are the same on every processor."""
        lines = [line.split() for line in self.run().decode().splitlines()]
        return [name for name, arithmetic in lines if arithmetic == "fma"]


def build(folder: Path, *options: str) -> Path:
    subprocess.run(
        ["cmake", "-S", ROOT, "-B", folder, "-DTOKSERVE_KERNEL_CASES=ON", *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(["cmake", "--build", folder, "--parallel", jobs], check=True, stdout=subprocess.DEVNULL)
    return folder / "kernel_cases"


@pytest.fixture(scope="module")
def x86(tmp_path_factory: pytest.TempPathFactory) -> Program:
    if platform.machine() != "x86_64":
        pytest.skip("compares with x86: needs an x86-64 machine")
    require(*NEEDED)
    return Program((str(build(tmp_path_factory.mktemp("x86"))),))


@pytest.fixture(scope="module")
def arm(x86: Program, tmp_path_factory: pytest.TempPathFactory) -> Program:
    target = "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}"
    return Program((EMULATOR, "-L", LIBRARIES, str(build(tmp_path_factory.mktemp("aarch64"), *target))))


@pytest.fixture(scope="module")
def expected(x86: Program) -> bytes:
    return x86.run("portable")


def arrays(results: bytes) -> list[tuple[str, np.ndarray]]:
    """A line "name kind count" before the bytes of each array; floating-point elements as their bits."""
    read, at = [], 0
    while at < len(results):
        end = results.index(b"\n", at)
        name, kind, count = results[at:end].decode().rsplit(" ", 2)
        array = np.frombuffer(results, DTYPES[kind], int(count), end + 1)
        read.append((name, array))
        at = end + 1 + array.nbytes
    return read


def assert_same(results: bytes, expected: bytes) -> None:
    if results == expected:
        return
    pairs = list(zip(arrays(results), arrays(expected), strict=True))
    assert [name for (name, _), _ in pairs] == [name for _, (name, _) in pairs]
    different = {name: int((a != b).sum()) for (name, a), (_, b) in pairs if not np.array_equal(a, b)}
    raise AssertionError(f"elements that differ, by result: {different}")


def test_every_kernel_has_cases(expected: bytes) -> None:
    kernels = set(re.findall(r"EACH\((\w+)\)", (ROOT / "csrc/table.h").read_text()))
    assert {name.split()[0] for name, _ in arrays(expected)} == kernels - UNCOMPARED


def test_x86_instruction_sets_have_the_same_bits(x86: Program, expected: bytes) -> None:
    for name in x86.instruction_sets():
        assert_same(x86.run(name), expected)


@pytest.mark.parametrize("name", ["neon_dot", "neon", "portable"])
def test_aarch64_instruction_sets_have_the_bits_of_x86(arm: Program, expected: bytes, name: str) -> None:
    assert name in arm.instruction_sets()
    assert_same(arm.run(name), expected)


@pytest.mark.parametrize("path", sorted(ROOT.glob("csrc/*.cpp")), ids=lambda path: path.stem)
def test_the_extension_compiles_for_aarch64(path: Path) -> None:
    require(CROSS)
    options = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DTOKSERVE_ISA=neon", "-DTOKSERVE_NEON"]
    if path.name.startswith("bind"):
        nanobind = pytest.importorskip("nanobind")
        options += [f"-I{sysconfig.get_paths()['include']}", f"-I{nanobind.include_dir()}"]
    subprocess.run([CROSS, *options, "-DTOKSERVE_HAS_neon", "-DTOKSERVE_HAS_neon_dot", path], check=True)
