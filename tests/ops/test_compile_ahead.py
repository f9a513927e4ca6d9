"""A start on a GPU compiles kernels side by side: nothing of its own runs meanwhile, on no other device, and nothing is
compiled again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json, sys, threading
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from tokserve import ops
from tokserve.ops.registry import OPS
from tokserve.gpu.kernels import launch

launches, loads, devices = [], [], set()
local = threading.local()
local.device = 1  # of this thread; other threads begin with device 0, as CUDA has it

class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, *arguments):
        launches.append(self.name)

def load_binary(name, kernel, shared, device):
    loads.append(name)
    devices.add(device)
    return "module", "function", 0, 0, 1024

class Driver:
    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 232448}
    )
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: getattr(local, "device", 0))
    set_current_device = staticmethod(lambda device: setattr(local, "device", device))
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
call = OPS["linear"].implementations["triton"].call
weight = ops.PackedWeight(8192, 64, torch.bfloat16, torch.zeros(8192, 64, dtype=torch.bfloat16))

def products(numbers=(1, 2, 300)):
    for rows in numbers:
        call(torch.zeros(rows, 64, dtype=torch.bfloat16), weight, None)

def of_another_thread():
    local.device = 1
    products([1])

before = JITFunction.run
with launch.compile_ahead(2):
    products()
    own = len(launches)
    other = threading.Thread(target=of_another_thread)
    other.start()
    other.join()
    others = len(launches) - own
assert JITFunction.run is before
report = {"launched_meanwhile": own, "launched_by_another": others, "loaded": len(loads), "devices": sorted(devices)}
launches.clear()
loads_before = len(loads)

def compiles(self, *arguments):
    raise AssertionError("compiled again")

JITFunction._do_compile = compiles
products()
json.dump(report | {"launched": len(launches), "loaded_later": len(loads) - loads_before}, sys.stdout)
"""


@pytest.mark.slow
def test_kernels_are_compiled_and_loaded_once_and_run_later(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # tiles for few rows and for many, of which rows 1 and 2 share the first
    assert json.loads(done.stdout) == {
        "launched_meanwhile": 0,
        "launched_by_another": 1,
        "loaded": 2,
        "devices": [1],
        "launched": 3,
        "loaded_later": 0,
    }
