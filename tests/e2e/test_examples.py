"""Every example runs and prints what it promises."""

import contextlib
import itertools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import Served, Server
from tests.route_table import ENDPOINTS
from tests.threads import ServerThread
from tokserve import SamplingParams
from tokserve.dialects.openai.schemas import ChatBody, CompletionBody
from tokserve.server.tokens.generate_body import GenerateBody

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGER = {
    "grpo.py": 275,
    "agent_grpo.py": 145,
    "rl_loop.py": 125,
    "disaggregated.py": 130,
}  # lines that these examples may have


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_grpo(tmp_path: Path) -> None:
    """Rollouts of the next step are generated with older weights while this one trains."""
    log = tmp_path / "log.jsonl"
    with Server("demo") as server:
        flags = ("--steps", "3", "--prompts", "2", "--samples", "4", "--lag", "1")
        run(sys.executable, str(EXAMPLES / "grpo.py"), "--url", server.url, "--log", str(log), *flags)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["mismatch"] for step in steps] == [0.0] * 3
    assert all(step["tokens"] > 0 for step in steps)
    assert any(step["bytes"] > 0 for step in steps)  # a step whose rewards are all alike changes no weight


@pytest.mark.slow
def test_agent_grpo(tmp_path: Path) -> None:
    """An agent's turns are trained on with a ratio of 1.0, also after a step of the weights."""
    log = tmp_path / "log.jsonl"
    with ServerThread("demo", "--sessions", "--logprobs-mode", "processed") as server:
        flags = ("--steps", "2", "--groups", "1", "--samples", "4")
        shown = run(sys.executable, str(EXAMPLES / "agent_grpo.py"), "--url", server.url, "--log", str(log), *flags)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(step["mismatch"], step["ratio"]) for step in steps] == [(0.0, [1.0, 1.0])] * 2
    assert all(step["tokens"] > step["turns"] >= 4 for step in steps)
    assert shown.count("ratio 1.0 to 1.0") == 2


def test_curl(demo: Server) -> None:
    shown = run("bash", str(EXAMPLES / "curl.sh"), demo.url)
    assert '"content":"85"' in shown and "data: [DONE]" in shown and '"nobody":"not_found"' in shown


@pytest.mark.slow
def test_disaggregated() -> None:
    shown = run(sys.executable, str(EXAMPLES / "disaggregated.py"), "demo")
    assert "the same as one server's: True" in shown and "computed elsewhere: 0" not in shown


@pytest.mark.slow
def test_openai_chat(demo: Server) -> None:
    assert run(sys.executable, str(EXAMPLES / "openai_chat.py"), demo.url) == "85\n"


def test_token_client(demo: Server) -> None:
    shown = run(sys.executable, str(EXAMPLES / "token_client.py"), demo.url)
    assert "text: 85\n" in shown and "the same as the chat route: True" in shown


def test_stop_strings_client(tokens_only: Served, demo_dir: Path) -> None:
    shown = run(sys.executable, str(EXAMPLES / "stop_strings_client.py"), tokens_only.url, str(demo_dir))
    assert shown.startswith("text: te\n") and shown.endswith("abort: aborted\n")
    tokens_only.wait_idle()


def test_multi_turn_tokens(demo: Server) -> None:
    shown = run(sys.executable, str(EXAMPLES / "multi_turn_tokens.py"), demo.url)
    actual = [(int(n), int(cached)) for n, cached in re.findall(r"prompt (\d+) tokens, (\d+) of them cached", shown)]
    assert "What is 47 + 38? -> 85" in shown and len(actual) == 4
    for (earlier, _), (_, cached) in itertools.pairwise(actual):
        assert cached >= earlier // 16 * 16, shown


@pytest.mark.slow
def test_lora() -> None:
    with ServerThread("demo", "--tokens-only", "--enable-lora") as server:
        shown = run(sys.executable, str(EXAMPLES / "lora.py"), server.url)
        assert "with B of 0.0 it changes nothing: True\n" in shown
        assert "with B of 0.5 it changes nothing: False\n" in shown and "made by 0+mine@2\n" in shown
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["demo"]


def test_examples_are_short() -> None:
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("agents/*.py"), *EXAMPLES.glob("*.sh")]:
        assert len(path.read_text().splitlines()) < LONGER.get(path.name, 95), path


@pytest.mark.parametrize(
    "path",
    [*sorted(EXAMPLES.glob("*.py")), *sorted(EXAMPLES.glob("agents/*.py")), EXAMPLES / "trainers" / "plot.py"],
    ids=lambda p: p.name,
)
def test_help_is_printed_without_the_packages_that_the_example_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    for package in ("matplotlib", "openai", "ray", "agents", "pydantic_ai"):
        monkeypatch.setitem(sys.modules, package, None)
    with contextlib.suppress(SystemExit):  # argparse's
        runpy.run_path(str(path), run_name="__main__")
    assert path.name in capsys.readouterr().out


@pytest.mark.slow
def test_offline() -> None:
    shown = run(sys.executable, str(EXAMPLES / "offline.py"))
    assert "What is 47 + 38? -> 85" in shown and "Reverse the word hello. -> olleh" in shown


@pytest.mark.slow
def test_demo_model_answers_its_tasks(demo: Server) -> None:
    shown = run(sys.executable, str(EXAMPLES / "demo_model" / "measure.py"), "--url", demo.url, "-n", "40")
    assert "total" in shown.lower()


def test_what_the_token_api_document_shows(demo: Server) -> None:
    text = (EXAMPLES.parent / "docs" / "token-api.md").read_text()
    shown = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    requests = re.findall(r"curl -s http://127.0.0.1:8041(\S+) .*? -d '(.*?)'\n```", text, re.DOTALL)
    replies = {path: demo.post(path, json.loads(body)).json() for path, body in requests}
    rendered = {**replies["/v1/chat/completions/render"], "request_id": "rendered-4f1e0c..."}  # a new one each time
    assert rendered in shown
    for reply in [replies["/inference/v1/generate"], shown[0]]:
        del reply["id"], reply["request_id"], reply["created"], reply["usage"]["prompt_tokens_details"]
    assert replies["/inference/v1/generate"] == shown[0]
    wrong = demo.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"top_p": 0}}).json()
    assert wrong in shown


def test_the_documents_name_every_field_and_route() -> None:
    text = (EXAMPLES.parent / "docs" / "token-api.md").read_text()
    known = {*SamplingParams.__struct_fields__, *GenerateBody.__struct_fields__, *ChatBody.model_fields}
    assert {name for name in known | {*CompletionBody.model_fields} if f"`{name}`" not in text} == set()
    text += "".join(
        (EXAMPLES.parent / "docs" / name).read_text() for name in ("rl.md", "lora.md", "embeddings.md", "scale.md")
    )
    assert {e.path for e in ENDPOINTS if e.path.replace(":path", "") not in text} == set()
