"""NVIDIA's driver, simulated for processes that share a GPU's memory: fake_libcuda.c, built once a test session."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path

from tests import needs

SOURCE = Path(__file__).with_name("fake_libcuda.c")


def build(directory: Path) -> Path:
    """The library, which processes with its folder in LD_LIBRARY_PATH load.  Skips the test without a C compiler."""
    needs.COMPILER.or_skip()
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    library = directory / "libcuda.so.1"
    subprocess.run([str(compiler), "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-lrt"], check=True)
    return library


def uuid_of(number: int) -> str:
    """The UUID of one of its GPUs."""
    return str(uuid.UUID(bytes=bytes([0xA0 + number] * 16)))
