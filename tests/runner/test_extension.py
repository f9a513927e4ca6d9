"""Worker extensions: how they are imported, which methods may be called, and results."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from tests.runner.drive import make_runner
from tests.tiny_models import tiny_config
from tokserve.base.errors import Forbidden, NotFound, RequestError, StartError
from tokserve.features.weights import extension

HERE = __name__


class Extension:
    """A worker extension as an operator would write it."""

    kind = "mine"

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def add(self, one: int, *, two: int = 0) -> tuple[int, int]:
        return one, two

    def _hidden(self) -> None:
        raise AssertionError("this is private")


class Mixed:
    """A worker extension as it is written for vLLM: no constructor, and the worker's attributes on `self`."""

    def echo(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"args": args, "kwargs": kwargs}

    def width(self) -> int:
        return int(self.model_runner.model.spec.hidden)  # type: ignore[attr-defined]

    def place(self) -> tuple[str, int, int]:
        return str(self.device), self.rank, self.local_rank  # type: ignore[attr-defined]


class Bare(Mixed):
    def __init__(self) -> None:
        raise AssertionError("vLLM makes the worker, and does not call this")


def width(model: Any) -> int:
    width: int = model.spec.hidden
    return width


@pytest.mark.parametrize("name", ["math:pi", "math.pi"])
def test_a_name_in_either_spelling(name: str) -> None:
    assert extension.named(name) == math.pi
    assert extension.named("collections:OrderedDict.fromkeys") == OrderedDict.fromkeys


@pytest.mark.parametrize("name", ["no.such:thing", "math:tau.of.it", "math", "", "math:"])
def test_import_errors_are_errors_of_the_caller(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be imported"):
        extension.named(name)


def test_an_extension_is_made_around_the_runner_or_stops_the_start() -> None:
    assert extension.make(None, 5) is None
    assert extension.make(f"{HERE}:Extension", 5).runner == 5
    for name in (f"{HERE}:Nothing", "math:pi"):
        with pytest.raises(StartError, match="option worker_extension_cls"):
            extension.make(name, 5)


@pytest.mark.parametrize("name", ["Mixed", "Bare"])
def test_a_class_without_an_argument_is_mixed_into_a_worker(name: str, tmp_path: Path) -> None:
    """peer suites A9: worker extensions written for vLLM."""
    hf = tiny_config("llama")
    runner, _ = make_runner(tmp_path, hf, worker_extension_cls=f"{HERE}:{name}")

    def answer(method: str, *args: Any, **kwargs: Any) -> Any:
        return runner.call("collective_rpc", {"method": method, "args": list(args), "kwargs": kwargs})

    assert answer("echo", 1, two=2) == {"args": [1], "kwargs": {"two": 2}}
    assert answer("width") == hf["hidden_size"] and answer("place") == ["cpu", 0, 0]


def test_public_methods_are_called_with_plain_values() -> None:
    instance = Extension(None)
    assert extension.call(instance, "add", [1], {"two": 2}) == [1, 2]
    for name in ("_hidden", "kind", "absent"):
        with pytest.raises(NotFound) as caught:
            extension.call(instance, name, [], {})
        assert caught.value.field == "method"
    with pytest.raises(Forbidden, match="--worker-extension-cls"):
        extension.call(None, "add", [], {})


def test_what_cannot_be_sent_becomes_text() -> None:
    assert extension.plain({"a": (1, None, b"x")}) == {"a": [1, None, b"x"]}
    assert extension.plain(Path("/x")) == "/x"
    assert extension.plain("\ud800") == "'\\ud800'"


def test_collective_rpc_and_apply_model_reach_the_runner(tmp_path: Path) -> None:
    hf = tiny_config("llama")
    runner, _ = make_runner(tmp_path, hf, worker_extension_cls=f"{HERE}:Extension")
    assert runner.call("collective_rpc", {"method": "add", "args": [3], "kwargs": {}}) == [3, 0]
    assert runner.call("apply_model", {"function": f"{HERE}:width"}) == hf["hidden_size"]
