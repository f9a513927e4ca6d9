"""`tokserve compile`: a start's kernels compiled for a GPU that is not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import StartError
from tokserve.cli.main import main
from tokserve.gpu.compile.command import ARCHITECTURES
from tokserve.gpu.compile.meta_device import META, MetaDevice, ReadsZeros
from tokserve.gpu.compile.start import _failure
from tokserve.gpu.compile.targets import TARGETS

ROOT = Path(__file__).parents[2]
DONE = re.compile(r"(\d+) of (\d+) kernels for (\w+) are in (.+), (\d+) of them new, after \d+ s\n")


def run(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900, env=environment
    )


def compile_for(cache: Path, *words: str) -> tuple[int, int]:
    """Numbers of kernels that a start needs, and of those that were not in the cache."""
    done = run(cache, "-m", "tokserve", "compile", *words)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    report = DONE.fullmatch(done.stdout)
    assert report is not None, done.stdout
    assert report[1] == report[2] and report[3] in words and report[4] == str(cache)
    return int(report[2]), int(report[5])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the compiler takes minutes, on a busy machine many
def test_the_cache_holds_what_a_start_needs(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_config("qwen3"))
    words = (str(model), "--arch", "sm_90", "--max-num-seqs", "4", "--max-model-len", "128")
    cache = tmp_path / "cache"
    needed, fresh = compile_for(cache, *words)
    assert needed == fresh == len(list(cache.glob("*/*.cubin"))) > 50
    assert compile_for(cache, *words) == (needed, 0)
    assert compile_for(cache, *words, "--load-format", "dummy") == (needed, 0)
    needed_by_both, of_two_ranks = compile_for(cache, *words, "-tp", "2")
    assert of_two_ranks > 5 and needed_by_both > of_two_ranks, "what ranks exchange, and smaller products"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_kernel_that_does_not_fit_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; from tokserve.gpu.compile import targets; from tokserve.cli.main import main;"
        "targets.TARGETS['sm_90'] = targets.TARGETS['sm_90']._replace(shared_memory=40 << 10); main(sys.argv[1:])"
    )
    words = ("demo", "--arch", "sm_90", "--max-num-seqs", "1", "--max-model-len", "64", "--enforce-eager")
    done = run(tmp_path, "-c", program, "compile", *words)
    assert done.returncode == 1
    failures = done.stderr.splitlines()
    assert failures and all(re.fullmatch(
        r"tokserve: error: \w+_kernel: needs \d+ bytes of shared memory; a program may take 40960", line
    ) for line in failures), done.stderr  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"gpu": {"multiprocessors": 78}}, {"kv_cache_memory_bytes": 90001000}])
def test_kernels_do_not_depend_on_the_card_of_an_architecture(other: dict[str, Any], tmp_path: Path) -> None:
    """Neither its number of multiprocessors nor its memory decides on what is compiled."""
    starts = []
    for options in ({}, other):
        done = run(tmp_path, "-m", "tests.runner.served_variants", json.dumps(options))
        assert done.returncode == 0, done.stderr[-3000:]
        starts.append(json.loads(done.stdout)["start"])
    assert len(starts[0]) > 30 and starts[0] == starts[1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("compile demo", 2, "tokserve compile: error: the following arguments are required: --arch"),
        ("compile demo --arch sm_75", 2, "argument --arch: invalid choice: 'sm_75'"),
        ("compile --arch sm_90", 2, "tokserve compile: error: no model is named"),
        ("compile demo --arch sm_90 --device cpu", 1, "option device: kernels are compiled for cuda, not for cpu"),
        ("compile demo --arch sm_90 --max-model-lne 5", 2, "did you mean --max-model-len?"),
        ("compile demo --arch sm_90", 1, "TRITON_INTERPRET is set, with which Triton compiles nothing"),
    ],
)
def test_a_wrong_command_is_refused(
    words: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    output = capsys.readouterr()
    assert ended.value.code == code and message in output.err and not output.out


def test_every_target_can_be_named() -> None:
    assert tuple(TARGETS) == ARCHITECTURES


def test_float8_needs_a_card_that_multiplies_it() -> None:
    MetaDevice(TARGETS["sm_89"]).require_float8("quantization")
    with pytest.raises(StartError, match="option quantization: sm_86 is older than sm_89"):
        MetaDevice(TARGETS["sm_86"]).require_float8("quantization")


def test_tensors_without_values_read_as_zeros() -> None:
    device = MetaDevice(TARGETS["sm_90"])
    (put,) = device.put([np.arange(6, dtype=np.int32).reshape(2, 3)])
    assert put.device == META and put.shape == (2, 3) and put.dtype == torch.int32
    (fetched,) = device.fetch([put]).arrays()
    assert fetched.tolist() == [[0, 0, 0], [0, 0, 0]] and fetched.dtype == np.int32
    with ReadsZeros():
        assert put.tolist() == fetched.tolist() and put[0, 0].item() == 0 and not put.cpu().any()
        assert torch.equal(put, put + 1) and len(put[put > 0]) == 0
        assert not torch.ones(2).normal_().any()
        assert torch.ones(2).tolist() == [1, 1], "tensors of the host keep their values"


def test_what_cannot_run_is_a_failure() -> None:
    gpu = TARGETS["sm_89"]
    fits, large, broken = Future[Any](), Future[Any](), Future[Any]()
    fits.set_result(SimpleNamespace(metadata=SimpleNamespace(shared=gpu.shared_memory)))
    large.set_result(SimpleNamespace(metadata=SimpleNamespace(shared=gpu.shared_memory + 1)))
    broken.set_exception(RuntimeError("PassManager::run failed"))
    assert not _failure("decode", fits, gpu)
    assert _failure("decode", large, gpu) == "decode: needs 101377 bytes of shared memory; a program may take 101376"
    assert _failure("decode", broken, gpu) == "decode: RuntimeError: PassManager::run failed"
