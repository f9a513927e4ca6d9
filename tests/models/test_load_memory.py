"""Loading takes the memory of the packed weights and of one tensor more, in every form and for every kind of weight.

Each case runs in a process of its own, whose peak is the system's figure.  A file that is mapped counts, as far as its
pages have been read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.models import test_mxfp4 as mxfp4
from tests.models import test_packed as packed
from tests.models.test_load import rewrite, stored
from tests.tiny_models import tiny_config, write_checkpoint

LOADING = """
import json, sys
from pathlib import Path
import torch
from tokserve import ops
from tokserve.base.memory import give_back
from tokserve.models import weights
from tokserve.models.load import load_decoder

def resident(what):
    return int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1]) / 1024

torch.set_num_threads(1)
ops.bind("cpu", threads=2)
directory = Path(sys.argv[1])
hf = json.loads((directory / "config.json").read_text())
options = {"dtype": "bfloat16", "head_dtype": "auto", "load_format": "auto", "seed": 0} | json.loads(sys.argv[2])
list(weights.catalogue(directory))
before = resident("VmRSS")
decoder = load_decoder(directory, hf, **options)
peak = resident("VmHWM") - before
give_back()  # as a start does at its end
print(json.dumps([peak, resident("VmRSS") - before]))
"""
SLACK = 32.0  # MiB: rope tables, Python's objects, pages of 2 MiB that are not full, what malloc keeps
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "dtype": "bfloat16"}
DENSE = tiny_config("qwen3", hidden_size=1024, intermediate_size=8192, vocab_size=40_000, **SIZES)
EXPERTS = tiny_config("qwen3_moe", hidden_size=1024, moe_intermediate_size=512, num_experts=24, **SIZES)
GPT_OSS = tiny_config("gpt_oss", hidden_size=512, intermediate_size=1024, num_hidden_layers=4, dtype="bfloat16")
TRANSPOSED = tiny_config("gpt_oss", hidden_size=1024, intermediate_size=1024, num_local_experts=24, **SIZES)


@dataclass(frozen=True)
class Case:
    """`kept`: bytes in memory of a byte of the checkpoint; `extra`: tensors beside it, of the largest one's size."""

    hf: dict[str, Any]
    kept: float
    extra: float = 1.0
    change: Callable[[Path], Any] = lambda directory: None
    options: dict[str, Any] = field(default_factory=dict)


def as_float32(directory: Path) -> None:
    rewrite(directory, {name: tensor.float() for name, tensor in stored(directory).items()})


CASES = {
    "tied": Case(DENSE, 1.0),
    "untied": Case(DENSE | {"tie_word_embeddings": False}, 1.0),
    "float32 to bfloat16": Case(DENSE, 0.5, change=as_float32),
    "experts": Case(EXPERTS, 1.0),
    "transposed experts": Case(TRANSPOSED, 1.0),
    "int4": Case(DENSE, 0.65, options={"quantization": "int4"}),
    "int8": Case(DENSE, 0.8, options={"quantization": "int8"}),
    "experts, int4": Case(EXPERTS, 0.3, options={"quantization": "int4"}),
    "gptq": Case(DENSE, 1.1, 1.5, lambda directory: packed.write(directory, *packed.CASES["gptq4-g32-asym-plain-v1"])),
    "mxfp4": Case(GPT_OSS, 1.1, 1.0, mxfp4.quantized),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tied" else pytest.mark.slow) for name in CASES]
)
def test_the_peak_is_the_weights_and_one_tensor(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    directory = write_checkpoint(tmp_path / "m", case.hf)
    case.change(directory)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(directory), json.dumps(case.options)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peak, kept = json.loads(done.stdout)
    sizes = [tensor.nbytes / (1 << 20) for tensor in load_file(directory / "model.safetensors").values()]
    report = f"peak {peak:.0f}, kept {kept:.0f}, of {sum(sizes):.0f} MiB, the largest {max(sizes):.0f}"
    assert kept <= case.kept * sum(sizes) + SLACK, report
    assert peak <= kept + case.extra * max(sizes) + SLACK, report
