"""The references' bits on MKL's path for Intel processors, which other processors take when MKL takes them for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

EXACT = Path(__file__).with_name("test_exact.py")
SHIM = "int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"

pytestmark = [
    pytest.mark.slow,
    needs.MKL.skips(),
]


def test_references_do_not_depend_on_threads_where_mkl_sees_an_intel_processor(tmp_path: Path) -> None:
    source, library = tmp_path / "intel.c", tmp_path / "intel.so"
    source.write_text(SHIM, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(EXACT), "-k", "torch"]
    run = subprocess.run(
        command,
        env=os.environ | {"LD_PRELOAD": str(library)},
        cwd=EXACT.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
