"""Any room can be deleted: a server without it serves tokens as before, and refuses by name what needs the room."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.replies import good
from tests.rooms.partial import PACKAGE, partial_package

pytestmark = pytest.mark.slow

ROOT = PACKAGE.parent
KINDS = ("features", "dialects", "families")
FOLDERS = [
    *sorted(f"{kind}/{path.parent.name}" for kind in KINDS for path in (PACKAGE / kind).glob("*/__init__.py")),
    *("gpu", "train", "rl", "ray", "bench", "testing"),
]
PROMPT = [3, 4, 5]
SAMPLING = {"max_tokens": 8, "temperature": 0.7, "seed": 11, "logprobs": 2}
OPTIONS = {  # an option of the room
    "features/kv": ("kv_offloading_size", "0.01"),
    "features/lora": ("enable_lora",),
    "features/speculation": ("spec_method", "suffix"),
    "features/profiler": ("profiler_dir", "/tmp"),
    "features/images": ("limit_mm_per_prompt", '{"image": 1}'),
    "features/ranks": ("tensor_parallel_size", "2"),
    "features/fleet": ("data_parallel_size", "2"),
    "features/sessions": ("sessions",),
    "dialects/sglang": ("sglang_api",),
}
FIELDS = {  # a field of the room: in the body, in its sampling parameters
    "features/images": ({"content_parts": [{"type": "image_url", "url": "data:,"}]}, {}, "content_parts"),
    "features/hidden_states": ({}, {"hidden_states": {"layers": [0], "positions": [0]}}, "hidden_states"),
    "features/masks": ({"return_sampling_mask": True}, {}, "return_sampling_mask"),
    "features/grammar": ({}, {"structured_outputs": {"json_object": True}}, "structured_outputs"),
}
CORE_TESTS = tuple(  # of the core alone
    f"tests/{name}.py"
    for name in (
        *("engine/test_block_pool", "engine/test_columns", "engine/test_command", "engine/test_queue"),
        *("engine/test_request", "layers/test_attention", "layers/test_mlp", "layers/test_norm", "layers/test_rope"),
        *("runner/test_kvcache", "runner/test_processors", "text/test_detokenizer", "text/test_stops"),
        *("text/test_tokenizer", "server/test_loop_monitor", "server/test_logprobs"),
    )
)


@pytest.fixture(scope="module")
def expected() -> dict[str, object]:
    with Server("demo", "--tokens-only") as server:
        return outcome(server)


def outcome(server: Server) -> dict[str, object]:
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING}
    choice = good(server.post("/inference/v1/generate", body))["choices"][0]
    assert server.post("/abort_requests", {"request_ids": ["none"]}).status_code == 200
    return {name: choice[name] for name in ("token_ids", "logprobs", "finish_reason")}


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Callable[[str], dict[str, str]]]:
    yield lambda folder: partial_package(tmp_path / "package", folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_server_without_a_room_serves_tokens(
    folder: str, without: Callable[[str], dict[str, str]], expected: dict[str, object]
) -> None:
    with Server("demo", "--tokens-only", env=without(folder)) as server:
        assert outcome(server) == expected
        if folder in FIELDS:
            body, params, field = FIELDS[folder]
            reply = server.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params, **body})
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert field in error["param"] and f"needs tokserve.{folder.replace('/', '.')}" in error["message"]


@pytest.mark.parametrize("folder", OPTIONS)
def test_an_option_of_an_absent_room_is_refused_by_name(folder: str, without: Callable[[str], dict[str, str]]) -> None:
    name, *value = OPTIONS[folder]
    flag = "--" + name.replace("_", "-")
    command = [sys.executable, "-m", "tokserve", "serve", "demo", "--tokens-only", "--port", "0", flag, *value]
    done = subprocess.run(command, env=without(folder), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (1, 2)
    words = f"option {name} needs tokserve.{folder.replace('/', '.')}"
    assert words in done.stderr or f"unknown option {flag}" in done.stderr, done.stderr


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "testing"])  # tests start servers by it
def test_tests_of_the_core_pass_without_a_room(folder: str, without: Callable[[str], dict[str, str]]) -> None:
    env = without(folder)
    place = Path(env["PYTHONPATH"])
    (place / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "check_package", *CORE_TESTS]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
