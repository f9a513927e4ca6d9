"""GPUs are counted by NVIDIA's library, or by device files where it is absent."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokserve.base import gpus

LIBRARY = """
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlShutdown(void) { return 0; }
"""


@pytest.mark.parametrize(("init", "count"), [(0, 2), (9, 0)])  # 9: the driver is not loaded
def test_the_library_counts(init: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(LIBRARY)
    path = tmp_path / "nvml.so"
    command = [compiler, "-shared", "-fPIC", f"-DINIT={init}", "-o", str(path), str(tmp_path / "nvml.c")]
    subprocess.run(command, check=True)
    monkeypatch.setattr(gpus, "NVML", str(path))
    assert gpus.count_nvidia_gpus() == count


def test_device_files_are_counted_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NVML", str(tmp_path / "absent.so"))
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    assert gpus.count_nvidia_gpus() == 0 and not gpus.has_amd_gpu()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "kfd"):
        (tmp_path / name).touch()
    assert gpus.count_nvidia_gpus() == 2 and gpus.has_amd_gpu()
