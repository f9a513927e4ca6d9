"""Prefill on one server, decoding on another, over both connectors: `==` one server, and what happens when one dies."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.waiting import until

pytestmark = pytest.mark.slow
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", "4M")
PROMPT = [40 + (index * 7) % 240 for index in range(330)]
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
GENERATE = "/inference/v1/generate"


def flags(connector: str, role: str, directory: Path, policy: str = "fail", **extra: Any) -> tuple[str, ...]:
    key = directory / "key"
    key.write_text("a secret of these tests")
    options = {"key_file": str(key)} if connector == "tcp" else {"shared_storage_path": str(directory / "kv")}
    config = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_port": 0,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": options | extra,
    }
    return (*SMALL, "--kv-transfer-config", json.dumps(config))


def prefill(server: Server, body: dict[str, Any], path: str = GENERATE) -> dict[str, Any]:
    """What a sidecar does: the same request with one token; what its reply carries for the decode server."""
    body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    if path == GENERATE:
        body["sampling_params"] = {**body["sampling_params"], "max_tokens": 1, "n": 1}
    else:
        body |= {"max_tokens": 1, "n": 1}
    reply = server.post(path, body | {"kv_transfer_params": ASKED})
    assert reply.status_code == 200, reply.text
    params: dict[str, Any] = reply.json()["kv_transfer_params"]
    assert params["do_remote_prefill"] and params["remote_num_tokens"] == 16 * len(params["remote_block_ids"][0])
    return params


def plain(reply: dict[str, Any]) -> Any:
    return [
        {name: choice[name] for name in ("token_ids", "text", "message", "logprobs") if name in choice}
        for choice in reply["choices"]
    ], reply.get("prompt_logprobs")


@pytest.fixture(
    scope="module",
    params=[("tcp",), ("shared-storage",), ("tcp", "-tp", "2"), ("tcp", "-pp", "2"), ("shared-storage", "-tp", "2")],
    ids=" ".join,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    directory, (connector, *ranks) = tmp_path_factory.mktemp("pd"), request.param
    with (
        Server("demo", *ranks, *flags(connector, "kv_producer", directory)) as first,
        Server("demo", *ranks, *flags(connector, "kv_consumer", directory)) as second,
    ):
        yield first, second


def test_tokens_and_logprobs_are_those_of_one_server(pair: tuple[Server, Server]) -> None:
    first, second = pair
    for number, params in enumerate(
        (
            {"seed": 3, "logprobs": 2},
            {"seed": 4, "logprobs": 0, "n": 3},
            {"temperature": 0, "logprobs": 1},
            {"seed": 5, "prompt_logprobs": 1},
            {"seed": 6, "repetition_penalty": 1.3, "top_p": 0.9, "stop_token_ids": [50]},
        )
    ):
        prompt = [40 + number, *PROMPT]
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 12, "ignore_eos": True} | params}
        kv_params = prefill(first, body)
        assert len(kv_params["remote_block_ids"][0]) == 20
        reply = second.post(GENERATE, body | {"kv_transfer_params": kv_params}).json()
        assert plain(reply) == plain(first.post(GENERATE, body).json())
        cached = 0 if "prompt_logprobs" in params else 320
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    first.wait_idle()
    second.wait_idle()
    assert first.metric("tokserve:kv_blocks_leased") == 0


def test_text_routes_and_streams(pair: tuple[Server, Server]) -> None:
    first, second = pair
    question = "Reverse the word apple. " * 20
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": question}]}),
        ("/v1/completions", {"prompt": question}),
    ):
        body = body | {"model": "demo", "seed": 1, "max_tokens": 8, "logprobs": path.endswith("chat/completions") or 1}
        kv_params = prefill(first, body, path)
        reply = second.post(path, body | {"kv_transfer_params": kv_params}).json()
        assert plain(reply) == plain(first.post(path, body).json())
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        streamed = first.post(path, body | {"stream": True, "kv_transfer_params": ASKED}).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        carriers = [chunk for chunk in chunks if "kv_transfer_params" in chunk]
        assert [chunk["choices"][0]["finish_reason"] is not None for chunk in carriers] == [True]
    body = {"token_ids": PROMPT[::-1], "sampling_params": {"seed": 1, "max_tokens": 9, "ignore_eos": True}}
    kv_params = prefill(first, body)
    with httpx.stream(
        "POST", second.url + GENERATE, json=body | {"kv_transfer_params": kv_params, "stream": True}, timeout=600
    ) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == first.post(GENERATE, body).json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("text", ""),
        ([], ""),
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_prefill": True}, "remote_block_ids"),
        ({"remote_block_ids": "x"}, "remote_block_ids"),
        ({"remote_block_ids": [[1 << 40]]}, "remote_block_ids"),
        ({"remote_block_ids": [[0]] * 2}, "remote_block_ids"),
        ({"remote_block_ids": [[0] * 100_000]}, "remote_block_ids"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_host": "example.com"}, "remote_host"),
        ({"remote_host": 5}, "remote_host"),
        ({"tp_size": 2}, "tp_size"),
        ({"transfer_mode": "push"}, "transfer_mode"),
    ],
)
def test_hostile_params_are_refused_with_the_fields_name(pair: tuple[Server, Server], change: Any, field: str) -> None:
    second = pair[1]
    good = {
        "do_remote_prefill": True,
        "remote_block_ids": [[0]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
    }
    kv_params = (
        change if not isinstance(change, dict) or len(change) > 1 or "do_remote" in str(change) else good | change
    )
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}, "kv_transfer_params": kv_params}
    reply = second.post(GENERATE, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("kv_transfer_params" + ("." + field if field else ""))


def test_deaths_and_expiry(tmp_path: Path) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 3, "max_tokens": 6, "ignore_eos": True}}
    with (
        Server("demo", *flags("tcp", "kv_both", tmp_path, lease_seconds=2.0)) as first,
        Server("demo", *flags("tcp", "kv_both", tmp_path)) as strict,
        Server("demo", *flags("tcp", "kv_both", tmp_path, "recompute")) as lenient,
    ):
        expected = plain(first.post(GENERATE, body).json())
        kv_params = prefill(first, body)
        assert first.metric("tokserve:kv_blocks_leased") == 20
        # garbage on the socket, and a peer that is silent
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000)):
            with socket.create_connection((kv_params["remote_host"], kv_params["remote_port"]), 10) as connection:
                connection.sendall(garbage)
        until(lambda: not first.metric("tokserve:kv_blocks_leased"), "the lease does not expire")
        refused = strict.post(GENERATE, body | {"kv_transfer_params": kv_params})
        assert refused.status_code == 500 and "lease has ended" in refused.json()["error"]["message"]
        kv_params = prefill(first, body)
        assert first.post("/abort_requests", {"request_ids": [kv_params["remote_request_id"][:-2]]}).status_code == 200
        assert first.metric("tokserve:kv_blocks_leased") == 0
        other = kv_params | {"remote_identity": kv_params["remote_identity"] | {"weights": "other"}}
        refused = strict.post(GENERATE, body | {"kv_transfer_params": other})
        assert refused.status_code == 500 and "differ in: weights" in refused.json()["error"]["message"]
        kv_params = prefill(first, body)
        first.stop(signal.SIGKILL)
        refused = strict.post(GENERATE, body | {"kv_transfer_params": kv_params})
        assert refused.status_code == 500 and "could not be loaded" in refused.json()["error"]["message"]
        assert plain(lenient.post(GENERATE, body | {"kv_transfer_params": kv_params}).json()) == expected
        assert lenient.metric("tokserve:kv_transfer_failures_total") == 1
        strict.wait_idle()
        lenient.wait_idle()
        assert plain(strict.post(GENERATE, body).json()) == expected


def test_a_decode_server_that_dies_frees_the_lease(tmp_path: Path) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 3, "max_tokens": 6}}
    with Server("demo", *flags("tcp", "kv_producer", tmp_path, lease_seconds=3.0)) as first:
        with Server("demo", *flags("tcp", "kv_consumer", tmp_path)) as second:
            prefill(first, body)
            second.stop(signal.SIGKILL)
        until(lambda: not first.metric("tokserve:kv_blocks_leased"))
        first.wait_idle()
