"""What trainers send that need CUDA, and so cannot run here, sent to a server: bodies as their source makes them.

Each file of recorded/ names the framework's version and the source of its bodies; {checkpoint}, {adapter} and {scratch}
stand for directories.  A reply has to have the expected status and the fields that the framework reads.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.e2e.server import Server
from tokserve.checkpoint import DEMO_DIR

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


def read(value: Any, path: str) -> Any:
    """The value at a path like `choices.0.token_ids`.  Raises KeyError, IndexError or TypeError."""
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def filled(body: Any, places: dict[str, str]) -> Any:
    """A body with its placeholders replaced."""
    text = json.dumps(body)
    for name, place in places.items():
        text = text.replace("{" + name + "}", place)
    return json.loads(text)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_trainers_calls_are_answered(path: Path, tmp_path: Path) -> None:
    recorded = json.loads(path.read_text())
    write_adapter(tmp_path / "adapter", DEMO_DIR)
    places = {"checkpoint": str(DEMO_DIR), "adapter": str(tmp_path / "adapter"), "scratch": str(tmp_path)}
    with Server("demo", *filled(recorded["server"], places)) as server:
        for request in recorded["requests"]:
            answer = httpx.request(
                request.get("method", "POST"),
                server.url + request["path"],
                headers=request.get("headers"),
                timeout=600,
                json=filled(request["body"], places) if "body" in request else None,
            )
            request_name = f"{recorded['framework']} {recorded['version']}: {request['path']}"
            assert answer.status_code == request.get("status", 200), f"{request_name}: {answer.text}"
            for field in request.get("reads", ()):
                assert read(answer.json(), field) is not None, f"{request_name}: {field}"


def test_every_file_names_its_source() -> None:
    frameworks = {"areal", "areal_sglang", "miles", "nemo_rl", "prime_rl", "skyrl", "slime", "vime"}
    assert {path.stem for path in RECORDED} == frameworks
    for path in RECORDED:
        recorded = json.loads(path.read_text())
        assert recorded["version"] and recorded["source"] and recorded["requests"]
