"""scripts/gpu_probe.py: without a GPU it says so; the questions whose answers need no card, in the interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from tokserve import ops  # noqa: E402
from tokserve.ops.registry import OPS  # noqa: E402

PROGRAM = Path(__file__).parents[2] / "scripts" / "gpu_probe.py"
MORE = PROGRAM.with_name("gpu_probe2.py")
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="for the interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # by Triton 3.6
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # put back afterwards
    module = loaded(PROGRAM, monkeypatch)
    for name in [*OPS, "torch_device"]:
        monkeypatch.setattr(ops, name, getattr(ops, name))
    ops.bind("cuda")
    ops.torch_device = torch.device("cpu")
    return module


def loaded(program: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, program.stem, module)
    spec.loader.exec_module(module)
    return module


SMALL: dict[str, Any] = {
    "products": ((40, 100),),
    "rows": (1, 20),
    "heads": (2, 1, 16),
    "contexts": ((1, 70), (2, 70)),
    "prompt": 70,
    "vocabulary": 300,
    "dtype": torch.float16,
}


def small(probe: Any) -> Any:
    return probe.Shapes(**SMALL)


@pytest.mark.slow
def test_without_a_gpu_the_probe_reports_it() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout == "no GPU: nothing was asked\n"


@pytest.mark.slow
def test_questions_are_answered_in_the_interpreter(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {answer["number"]: answer for answer in probe.ask(small(probe), set())}
    assert len(answers) == 12
    assert [number for number, answer in answers.items() if answer["answer"] == "FAILED"] == [], answers
    equal = (1, 3, 4, 5, 6)  # cuBLAS's place is a CPU library's here
    assert {answers[number]["answer"] for number in equal} == {"yes"}, answers
    assert all(answers[number]["text"] == "for a card" for number in (7, 11, 12))
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.slow
def test_more_questions_are_answered_in_the_interpreter(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = loaded(MORE, monkeypatch)
    shapes = program.More(
        **(SMALL | {"products": ((64, 64),), "heads": (4, 1, 16), "prompt": 20}),
        steps=(1, 3),
        state=(2, 16),
        state_tokens=(5,),
        latent=(4, 32, 16),
        latent_contexts=((1, 70, 100), (2, 10, 300)),
        experts=(4, 32, 2),
    )
    answers = {answer["number"]: answer for answer in probe.ask(shapes, set(), program.QUESTIONS)}
    assert [number for number, answer in answers.items() if answer["answer"] == "FAILED"] == [], answers
    assert {answers[number]["answer"] for number in (13, 14, 17, 24)} == {"yes"}, answers
    assert {number for number, answer in answers.items() if answer["text"] == "for a card"} == {16, 25}


def test_a_question_that_fails_costs_the_others_nothing(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shapes: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(probe, "QUESTIONS", [("first", fails), ("second", lambda shapes: (False, ""))])
    assert [answer["answer"] for answer in probe.ask(small(probe), set())] == ["FAILED", "NO"]
    assert [answer["question"] for answer in probe.ask(small(probe), {2})] == ["second"]
