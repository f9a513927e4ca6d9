"""Sessions over real processes: exact turns with all that a server can do, and trees that outlive engines."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.e2e.server import Served, Server
from tests.e2e.test_api_servers import via
from tests.e2e.test_rl import variant
from tests.replies import good, named_events
from tests.text.tool_templates import HERMES
from tests.threads import ServerThread
from tests.waiting import until
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import Client
from tokserve.train import PolicyModel

QUESTION = {"role": "user", "content": "Once upon a time"}
EQUAL = ("new_prompt_ids", "token_ids", "token_logprobs", "parent", "seed")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with ServerThread("demo", "--sessions") as running:
        yield running


def tree(client: Served | httpx.Client, session: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = good(client.get(f"/sessions/{session}/tree"))["turns"]
    return turns


def prompts(turns: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The whole prompt of each turn."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    rendered: dict[str, list[int]] = {}
    for turn in turns:
        parent = turn["parent"]
        before = [] if parent is None else rendered[parent] + by_id[parent]["token_ids"]
        rendered[turn["turn_id"]] = before + turn["new_prompt_ids"]
    return rendered


def check_scores(server: Served, turns: list[dict[str, Any]], model: str | None = None, first: int = 0) -> None:
    """The logprobs of the turns from the first are bitwise those of a score of the ids with the weights that serve
    now."""
    before = prompts(turns)
    for turn in turns[first:]:
        prompt = before[turn["turn_id"]]
        body: dict[str, Any] = {
            "token_ids": prompt + turn["token_ids"],
            "sampling_params": {"max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_start": len(prompt)},
            "logprobs_format": "arrays",
        }
        reply = good(server.post("/inference/v1/generate", body | ({} if model is None else {"model": model})))
        assert reply["prompt_logprobs"]["token_logprobs"] == turn["token_logprobs"]


def talk(client: Any, session: str, turns: int, **fields: Any) -> list[dict[str, Any]]:
    """A chat of so many turns, each of which continues the one before; returns the messages."""
    messages: list[dict[str, Any]] = [QUESTION]
    for index in range(turns):
        body = {"messages": messages, "max_tokens": 12, "temperature": 1.0, "seed": index} | fields
        reply = good(client.post(f"/sessions/{session}/v1/chat/completions", body))
        messages = [*messages, reply["choices"][0]["message"], {"role": "user", "content": f"and {index}?"}]
    return messages


def is_chain(turns: list[dict[str, Any]]) -> bool:
    return [turn["parent"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]


def test_logprobs_of_every_turn_are_those_of_a_score(server: Served) -> None:
    """Whole replies, choices, and a branch from one of them."""
    messages = talk(server, "chat", 3)
    talk(server, "chat", 2, n=2, seed=100)
    branch = [*messages[:2], {"role": "user", "content": "or else?"}]
    good(server.post("/sessions/chat/v1/chat/completions", {"messages": branch, "max_tokens": 5}))
    turns = tree(server, "chat")
    parents = [turn["parent"] for turn in turns]
    assert parents[:5] == [None, "t0", "t1", None, None]
    assert parents[5] == parents[6] in ("t3", "t4")  # the first choice, or one with the same text
    assert parents[7] in ("t0", parents[5])
    check_scores(server, turns)


def test_what_a_client_asks_for_does_not_change_the_tree(server: Served) -> None:
    for name, fields in {
        "plain": {},
        "scored": {"logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    }.items():
        talk(server, name, 3, **fields)
    plain, scored = (tree(server, name) for name in ("plain", "scored"))
    for one, other in zip(plain, scored, strict=True):
        assert [one[name] for name in EQUAL] == [other[name] for name in EQUAL]


def test_streams_of_the_three_routes(server: Served) -> None:
    """Each continues by what its events said."""
    openai = {"messages": [QUESTION], "max_tokens": 12, "stream": True}
    text = ""
    for line in server.post("/sessions/stream/v1/chat/completions", openai).text.splitlines():
        if line.startswith("data: {"):
            text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    again = {"role": "user", "content": "and?"}
    body: dict[str, Any] = {"input": [QUESTION, {"role": "assistant", "content": text}, again], "max_output_tokens": 12}
    events = named_events(server.post("/sessions/stream/v1/responses", body | {"stream": True}).text)
    items = [*body["input"], *events[-1]["response"]["output"], again]
    messages = [
        {name: part if isinstance(part, str) else part[0]["text"] for name, part in item.items() if name in QUESTION}
        for item in items
    ]
    anthropic = {"model": "demo", "messages": messages, "max_tokens": 12, "stream": True}
    assert "message_stop" in server.post("/sessions/stream/v1/messages", anthropic).text
    turns = tree(server, "stream")
    assert is_chain(turns) and len(turns) == 3
    check_scores(server, turns)


def test_a_stream_that_its_client_leaves_keeps_what_was_sent(server: Served) -> None:
    body = {"messages": [QUESTION], "max_tokens": 1500, "stream": True, "ignore_eos": True, "seed": 3}
    text = ""
    with httpx.stream("POST", server.url + "/sessions/left/v1/chat/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(text) > 20:
                break
    until(lambda: server.get("/sessions/left/tree").json()["turns"])
    (turn,) = tree(server, "left")
    assert turn["finish_reason"] == "abort"
    assert len(turn["token_logprobs"]) == len(turn["token_ids"]) > 0
    check_scores(server, [turn])


@pytest.mark.slow
def test_tools_and_grammars(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(HERMES)
    function = {"name": "look", "parameters": {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}}}
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "max_tokens": 60}
    with ServerThread("demo", "--sessions", "--chat-template", str(path), "--spec-method", "ngram") as server:
        messages: list[Any] = [QUESTION]
        for index in range(3):
            body = {"messages": messages, "tool_choice": "required", "seed": index, "max_tool_calls": 1} | fields
            message = good(server.post("/sessions/tools/v1/chat/completions", body))["choices"][0]["message"]
            (call,) = message["tool_calls"]
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "seen"}]
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
        body = {"messages": messages, "response_format": form, "tool_choice": "none"} | fields
        good(server.post("/sessions/tools/v1/chat/completions", body))
        turns = tree(server, "tools")
        assert is_chain(turns) and len(turns) == 4
        check_scores(server, turns)


def test_weights_and_adapters_that_change_between_turns(tmp_path: Path) -> None:
    other = variant(tmp_path, 1)
    adapter = {"lora_name": "mine", "lora_path": str(write_adapter(tmp_path / "a", DEMO_DIR, rank=4))}
    with ServerThread("demo", "--sessions", "--enable-lora") as server:
        assert server.post("/v1/load_lora_adapter", adapter).status_code == 200
        talk(server, "adapted", 3, model="mine")
        adapted = tree(server, "adapted")
        assert is_chain(adapted) and {turn["model"] for turn in adapted} == {"mine"}
        check_scores(server, adapted, "mine")
        messages = talk(server, "s", 2)
        before = tree(server, "s")
        check_scores(server, before)
        pushed = {"weight_dir": str(other), "weight_version": "second"}
        assert server.post("/update_weights", pushed).status_code == 200
        good(server.post("/sessions/s/v1/chat/completions", {"messages": messages, "max_tokens": 12}))
        turns = tree(server, "s")
        assert is_chain(turns)
        assert [turn["weight_versions"][-1]["version"] for turn in turns] == ["0", "0", "second"]
        rescored = prompts(turns)
        assert turns[:2] == before and rescored["t2"][: len(rescored["t1"])] == rescored["t1"]
        check_scores(server, turns, None, first=2)


@pytest.mark.slow
def test_several_api_processes_have_one_store() -> None:
    with Server("demo", "--sessions", "--api-server-count", "2", "--restart-engine", "2") as server:
        messages: list[Any] = [QUESTION]
        for index in range(4):
            with via(server, index % 2) as client:
                body = {"messages": messages, "max_tokens": 12, "seed": index}
                message = good(client.post("/sessions/s/v1/chat/completions", json=body))["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "and?"}]
                assert len(tree(client, "s")) == index + 1
        with via(server, 0) as client, via(server, 1) as other:
            waiting = ThreadPoolExecutor(1).submit(client.get, "/sessions/next?wait=60")
            good(other.post("/sessions/s/metadata", json={"metadata": {"reward": 2}}))
            good(other.post("/sessions/s/close"))
            taken = good(waiting.result())
            assert (taken["session_id"], taken["metadata"]) == ("s", {"reward": 2})
            assert is_chain(taken["tree"]["turns"])
            assert other.get("/sessions/absent/tree").status_code == 404
            assert other.post("/sessions", json={"session_id": "s"}).status_code == 409
        check_after_a_kill(server)
        check_after_a_kill_of_an_api_process(server)


@pytest.mark.slow
def test_engines_of_a_session() -> None:
    with Server("demo", "--sessions", "-dp", "2", "--restart-engine", "4") as server:
        for name in ("s", "t", "u"):
            talk(server, name, 4)
            hits = server.metric("tokserve:prefix_cache_hits_total")
            talk(server, name, 4)
            assert server.metric("tokserve:prefix_cache_hits_total") > hits
        check_after_a_kill(server)


def check_after_a_kill(server: Server) -> None:
    """The trees of a session "s" with four turns outlive the engines, whose successors compute the same."""
    before = tree(server, "s")
    for engine in server.engines():
        engine.kill()
    until(lambda: [line for line in server.log if "another engine" in line], server.log)
    until(lambda: server.get("/ready").status_code == 200)
    turns = tree(server, "s")
    assert turns == before and is_chain(turns[:4])
    check_scores(server, turns)
    talk(server, "after", 2)
    check_scores(server, tree(server, "after"))


def check_after_a_kill_of_an_api_process(server: Server) -> None:
    """A request that ends with its process is not waited for, and its session is not busy."""
    long = {"messages": [QUESTION], "max_tokens": 1900, "ignore_eos": True, "n": 16}
    doomed = server.api_processes()[0]
    with via(server, 0) as client, via(server, 1) as other, ThreadPoolExecutor(1) as pool:
        talk(server, "killed", 1)
        running = pool.submit(client.post, "/sessions/killed/v1/chat/completions", json=long)
        until(lambda: good(other.get("/sessions/killed"))["state"] == "open")
        doomed.kill()
        assert isinstance(running.exception(), httpx.TransportError)
        until(lambda: good(other.get("/sessions/killed"))["state"] == "idle")
        assert len(tree(other, "killed")) == 1


def test_a_trainer_reads_finished_sessions_and_scores_them(server: Served) -> None:
    """The policy's logprobs of the whole tree, with each prefix computed once, are those of the server."""
    policy = PolicyModel.from_pretrained("demo", cpu_arithmetic=server.get("/inference/v1/state").json()["arithmetic"])
    talk(server, "train", 3, n=2)
    with Client(server.url) as client:
        client.add_session_metadata("train", {"reward": 0.5})
        client.add_session_metadata("train", {"step": 1}, turn_id="t1")
        client.close_session("train")
        tree_so_far = client.session_tree("train")
        finished = next(client.sessions(lease=60.0))
        assert finished.session_id == "train" and finished.metadata == {"reward": 0.5}
        assert finished.turns[1].metadata == {"step": 1}
        assert [turn.turn_id for turn in tree_so_far.turns] == [turn.turn_id for turn in finished.turns]
        rows = policy.tree_logprobs(finished.turns)
        for row, turn in zip(rows, finished.turns, strict=True):
            assert row.tolist() == turn.tokens.logprobs.tolist()
        by_route = good(server.get("/sessions/train/sequences"))["sequences"]
        for sequence, other in zip(finished.sequences(), by_route, strict=True):
            assert sequence.token_ids.tolist() == other["token_ids"]
            assert sequence.loss_mask.tolist() == [bool(one) for one in other["loss_mask"]]
            assert sequence.logprobs.tolist() == other["logprobs"]
    assert server.get("/sessions/train").status_code == 200, "a loop that is left acknowledges nothing"


def test_a_session_that_was_read_is_deleted(server: Served) -> None:
    for name in ("first", "second"):
        talk(server, name, 1)
        good(server.post(f"/sessions/{name}/close", {}))
    with Client(server.url) as client:
        sessions = client.sessions(lease=600.0)
        assert [next(sessions).session_id for _ in range(2)] == ["first", "second"]
        assert server.get("/sessions/first").status_code == 404


def test_a_session_that_is_deleted_keeps_no_blocks(server: Served) -> None:
    blocks = server.metric("tokserve:session_blocks")
    question = {"role": "user", "content": "These blocks are of one session, as no other has this question."}
    good(server.post("/sessions/dropped/v1/chat/completions", {"messages": [question], "max_tokens": 4}))
    until(lambda: server.metric("tokserve:session_blocks") > blocks)
    assert httpx.delete(f"{server.url}/sessions/dropped").status_code == 200
    until(lambda: server.metric("tokserve:session_blocks") == blocks)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sessions_outlive_a_server_that_is_killed(tmp_path: Path, processes: int) -> None:
    flags = ("--sessions", "--session-dir", str(tmp_path), "--api-server-count", str(processes))
    with Server("demo", *flags) as server:
        messages = talk(server, "s", 3, n=2)
        good(server.post("/sessions/s/metadata", {"reward": 0.5}))
        talk(server, "closed", 1)
        good(server.post("/sessions/closed/close", {}))
        before = tree(server, "s")
        server.stop(signal.SIGKILL)
    with Server("demo", *flags) as server:
        assert tree(server, "s") == before
        assert good(server.get("/sessions/s"))["metadata"] == {"reward": 0.5}
        assert good(server.get("/sessions/next"))["session_id"] == "closed"
        good(server.post("/sessions/s/v1/chat/completions", {"messages": messages, "max_tokens": 12}))
        turns = tree(server, "s")
        assert turns[:-1] == before and turns[-1]["parent"] in {"t4", "t5"}
        check_scores(server, turns)
