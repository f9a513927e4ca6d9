"""The load generator against a server whose replies are known."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.scripted_server import Answer, event, scripted
from tokserve.base.errors import StartError
from tokserve.bench.clients import RequestShape
from tokserve.bench.datasets import DatasetSpec
from tokserve.bench.report import table
from tokserve.bench.serve import Load, arrivals, serve
from tokserve.cli.main import main

USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}


def choice(ids: list[int], finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "token_ids": ids, "finish_reason": finish}]}


def tokens(path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
    n, count = body["sampling_params"].get("n", 1), body["sampling_params"]["max_tokens"]
    ids = list(range(50, 50 + count))
    if not body["stream"]:
        done = [choice(ids, "length", i)["choices"][0] for i in range(n)]
        return 200, [json.dumps({"choices": done, "usage": USAGE}).encode()]
    pieces = [event(choice([t], "length" if t == ids[-1] else None, i)) for t in ids for i in range(n)]
    pieces = [piece[:9] for piece in pieces[:1]] + [pieces[0][9:], *pieces[1:]]  # an event cut in two
    return 200, [b": ping\n\n", *pieces, event({"choices": [], "usage": USAGE}), event(b"[DONE]")]


def load(url: str, **changes: Any) -> Load:
    shape = RequestShape(**changes.pop("shape", {}))
    dataset = DatasetSpec(**{"count": 5, "input_len": 6, "output_len": 4, **changes.pop("dataset", {})})
    base: dict[str, Any] = {"goodput": {}, "percentiles": [50.0, 99.0], "warmup": 0, "progress": False}
    return Load(base_url=url, shape=shape, dataset=dataset, **base | changes)


def test_https_to_a_server_that_speaks_http_is_named() -> None:
    with scripted(tokens) as server, pytest.raises(StartError, match="does the server speak http\\?"):
        serve(load(server.url.replace("http:", "https:")))


@pytest.mark.parametrize(
    ("facts", "kernels"), [({"kernels": "none"}, "none"), ({"kernels": "avx2"}, "avx2"), ({}, None), (None, None)]
)
def test_the_result_names_the_servers_kernels(facts: dict[str, Any] | None, kernels: str | None) -> None:
    with scripted(tokens) as server:
        server.facts = facts
        row, _ = serve(load(server.url))
    assert row["kernels"] == kernels
    assert ("kernels    none" in table(row, [50.0, 99.0])) is (kernels == "none")


def test_counts_and_keys() -> None:
    with scripted(tokens) as server:
        row, outcomes = serve(load(server.url, warmup=2, api_key="k", save_detailed=True, goodput={"ttft": 1e6}))
    assert row["completed"] == 5 and row["failed"] == 0 and row["model_id"] == "scripted"
    assert row["total_input_tokens"] == 30 and row["total_output_tokens"] == 20 and row["total_cached_tokens"] == 15
    assert row["finish_reasons"] == {"length": 5}
    assert row["request_throughput"] == pytest.approx(5 / row["duration"])
    assert row["output_throughput"] == pytest.approx(20 / row["duration"])
    assert row["total_token_throughput"] == pytest.approx(50 / row["duration"])
    assert row["request_goodput"] == row["request_throughput"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{k}_{metric}_ms" for k in ("mean", "median", "std", "p50", "p99")} <= row.keys()
    assert [len(o.itl) for o in outcomes] == [3] * 5
    assert all(0 < o.ttft < o.e2el for o in outcomes if o.ttft is not None)
    assert row["output_lens"] == [4] * 5
    json.dumps(row, allow_nan=False)
    assert len(server.requests) == 7 and {h["Authorization"] for h in server.headers} == {"Bearer k"}
    body = server.requests[-1][1]
    assert body["model"] == "scripted" and body["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    prompts = [tuple(b["token_ids"]) for _, b in server.requests]
    assert len(set(prompts)) == 7, "warming up must not fill the cache with measured prompts"


def test_without_stream_only_the_end_is_measured() -> None:
    with scripted(tokens) as server:
        row, _ = serve(load(server.url, shape={"stream": False, "n": 2, "temperature": 1.0}))
    assert row["total_output_tokens"] == 40 and row["finish_reasons"] == {"length": 10}
    assert row["mean_ttft_ms"] is None and row["mean_tpot_ms"] is None and row["mean_e2el_ms"] > 0


def test_samples_of_one_prompt_are_streams_of_their_own() -> None:
    with scripted(tokens) as server:
        row, outcomes = serve(load(server.url, shape={"n": 3, "temperature": 1.0}))
    assert row["total_output_tokens"] == 60 and [len(o.itl) for o in outcomes] == [9] * 5


def test_turns_grow_the_prompt() -> None:
    with scripted(tokens) as server:
        row, _ = serve(load(server.url, dataset={"count": 1, "turns": 3, "turn_len": 2}))
    prompts = [body["token_ids"] for _, body in server.requests]
    assert [len(p) for p in prompts] == [6, 12, 18] and row["completed"] == 3 and row["total_input_tokens"] == 36
    assert prompts[1][:10] == [*prompts[0], 50, 51, 52, 53] and prompts[2][:12] == prompts[1]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_text_routes_count_by_usage(backend: str) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        chat = "chat" in path
        rows = [{"delta": {"content": t}} if chat else {"text": t} for t in ["", "a", "bc", "d"]]
        if not chat:
            rows[0]["text"] = "x"
        events = [event({"choices": [row]}) for row in rows]
        last = event({"choices": [{"delta": {}} | {"finish_reason": "length"}]}) if chat else b""
        if not chat:
            events[-1] = event({"choices": [rows[-1] | {"finish_reason": "length"}]})
        return 200, [*events, last or b": \n", event({"choices": [], "usage": USAGE}), event(b"[DONE]")]

    text = backend == "openai-chat"
    with scripted(answer) as server:
        row, outcomes = serve(load(server.url, shape={"backend": backend, "logprobs": 2}, dataset={"text": text}))
    assert row["total_input_tokens"] == 35 and row["total_output_tokens"] == 20 and row["failed"] == 0
    assert [len(o.itl) for o in outcomes] == [2 if text else 3] * 5
    path, body = server.requests[0]
    if text:
        assert path == "/v1/chat/completions" and body["logprobs"] is True and body["top_logprobs"] == 2
        assert len(body["messages"][0]["content"].split()) == 6
    else:
        assert path == "/v1/completions" and body["logprobs"] == 2 and len(body["prompt"]) == 6


@pytest.mark.parametrize(
    ("pieces", "status", "word"),
    [
        ([b'{"error": "no"}'], 503, "HTTP 503"),
        ([event(choice([1]))], 200, "ended early"),
        ([event(choice([1])), event({"error": {"message": "broken"}}), event(b"[DONE]")], 200, "broken"),
        ([event(choice([1], "abort")), event(b"[DONE]")], 200, "abort"),
        ([b"data: {nonsense\n\n"], 200, "nonsense"),
    ],
)
def test_failures_are_counted_not_measured(pieces: list[bytes], status: int, word: str) -> None:
    replies = iter([(status, pieces)])
    with scripted(lambda path, body: next(replies, None) or tokens(path, body)) as server:
        row, _ = serve(load(server.url))
        assert row["completed"] == 4 and row["failed"] == 1 and word in row["first_error"]
        assert row["total_output_tokens"] == 16 and row["total_input_tokens"] == 24
        replies = iter([(status, pieces)])
        with pytest.raises(StartError, match="warming up failed"):
            serve(load(server.url, warmup=1))


@pytest.mark.parametrize("rate", [math.inf, 2000.0])
def test_concurrency_is_kept_and_reached(rate: float) -> None:
    with scripted(tokens) as server:
        row, outcomes = serve(load(server.url, request_rate=rate, max_concurrency=2, dataset={"count": 12}))
    assert row["completed"] == 12 and server.most == 2
    if rate == math.inf:
        assert max(o.start for o in outcomes) > 0.0, "closed loop: due when a lane is free"
    else:
        assert [o.start for o in outcomes] == arrivals(12, rate, 0), "open loop: due by the process"


def test_arrivals_are_a_poisson_process_by_seed() -> None:
    times = arrivals(20_000, 50.0, 3)
    assert times == arrivals(20_000, 50.0, 3) != arrivals(20_000, 50.0, 4)
    gaps = np.diff(times)
    assert times[0] == 0.0 and np.mean(gaps) == pytest.approx(0.02, rel=0.05) == pytest.approx(np.std(gaps), rel=0.05)
    assert arrivals(3, math.inf, 0) == [0.0, 0.0, 0.0]


def test_command_writes_json_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [1, 2, 3], "output_len": 2}\n{"prompt": [4], "extra": 1}\n')
    out = tmp_path / "r.json"
    with scripted(tokens) as server, pytest.raises(SystemExit) as end:
        main(
            [
                "bench",
                "serve",
                "--base-url",
                server.url,
                "--dataset",
                "jsonl",
                "--dataset-path",
                str(rows),
                "--num-prompts",
                "4",
                "--output-len",
                "5",
                "--warmup",
                "0",
                "--percentiles",
                "99.9",
                "--no-progress",
                "--goodput",
                "e2el:1e-9",
                "--result-json",
                str(out),
            ]
        )
    row = json.loads(out.read_text())
    assert end.value.code == 0 and row["total_output_tokens"] == 14 and row["total_input_tokens"] == 8
    assert row["request_goodput"] == 0.0 and "p99.9_ttft_ms" in row
    assert "4 served, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--n", "2", "--temperature", "0"],
        ["--goodput", "itl:3"],
        ["--request-rate", "0"],
        ["--dataset", "jsonl"],
        ["--no-stream", "--goodput", "ttft:3"],
        ["--percentiles", "101"],
        ["--result-json", "/no/such/x.json"],
        ["--base-url", "localhost:8000"],
        ["--result-json", "/"],
        ["--request-timeout", "0"],
        ["--request-timeout", "inf"],
        ["--temperature", "nan"],
        ["--save-detailed", "--no-progress"],
        [],
    ],
)
def test_a_benchmark_that_cannot_run_is_refused_before_it_starts(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(SystemExit) as end:
            main(["bench", "serve", "--base-url", f"http://127.0.0.1:{taken.getsockname()[1]}", *flags])
    text = capsys.readouterr().err
    assert end.value.code == 1 and (flags[-2] if flags else "cannot reach") in text


def test_a_server_that_does_not_reply_is_reported_with_the_reason() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(StartError, match=r"cannot reach .*/v1/models: no answer in time; is a server"):
            serve(load(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.01))


def test_replace_keeps_loads_apart() -> None:
    one = load("http://x", max_concurrency=0)
    with pytest.raises(StartError, match="max-concurrency"):
        one.check()
    replace(one, max_concurrency=1).check()


def test_the_base_url_may_end_in_v1() -> None:
    for end in ("", "/", "/v1", "/v1/"):
        with scripted(tokens) as server:
            row, _ = serve(load(server.url + end))
            assert row["completed"] == 5 and {path for path, _ in server.requests} == {"/inference/v1/generate"}


def template_hits(repeated: bool) -> Answer:
    """A chat server whose template has 20 tokens before each prompt, and whose cache has blocks of 16."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        length = 20 + len(body["messages"][-1]["content"].split())
        cached = (length - 1) // 16 * 16 if repeated and length > 21 else 16
        usage = {"prompt_tokens": length, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
        done = {"index": 0, "message": {"content": "a"}, "finish_reason": "length"}
        return 200, [json.dumps({"choices": [done], "usage": usage}).encode()]

    return answer


@pytest.mark.parametrize("repeated", [False, True])
def test_what_the_chat_template_shares_is_no_repeated_prompt(
    repeated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(template_hits(repeated)) as server, pytest.raises(SystemExit) as end:
        main(
            [
                "bench",
                "serve",
                "--base-url",
                server.url + "/v1",
                "--backend",
                "openai-chat",
                "--num-prompts",
                "3",
                "--input-len",
                "40",
                "--no-stream",
                "--no-progress",
                "--warmup",
                "0",
            ]
        )
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "48 of them the chat template's" in shown
    assert ("note: 3 prompts" in shown) == repeated and len(server.requests) == 4
