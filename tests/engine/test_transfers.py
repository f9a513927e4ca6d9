"""KV handed from one engine to another, over a socket or as files; the scripted executor fails on a wrong block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.harness import Engine
from tests.waiting import PATIENCE
from tokserve.base.errors import RequestError
from tokserve.features.grammar.engine import GrammarFeature
from tokserve.features.grammar.grammar import Grammar
from tokserve.features.kv import transfers
from tokserve.features.kv.tcp import Pull, run_pull
from tokserve.protocol.kv_transfer import KVTransferParams, transfer_params
from tokserve.protocol.messages import Submit, SubmitReply
from tokserve.protocol.params import StructuredOutputs

PROMPT = [5 + index % 9 for index in range(17)]  # four full blocks of four tokens, and one token
LEASE = 30.0
ASK = KVTransferParams(do_remote_decode=True)


@contextmanager
def pair(directory: Path, connector: str = "tcp", policy: str = "fail") -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine and a decode engine."""
    key = directory / "key"
    key.write_text("a secret of these tests")
    options: dict[str, Any] = {"key_file": str(key), "lease_seconds": LEASE}
    if connector != "tcp":
        options = {"shared_storage_path": str(directory / "kv")}
    engines = []
    for role in ("kv_producer", "kv_consumer"):
        config = {
            "kv_connector": connector,
            "kv_role": role,
            "kv_port": 0,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": options,
        }
        engines.append(Engine(kv_transfer_config=config))
    try:
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.core.close()


def run(*engines: Engine, until: Callable[[], Any]) -> None:
    """Step the engines until the condition holds: threads copy blocks."""
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end
        for engine in engines:
            engine.run()
        time.sleep(0.001)


def ask(engine: Engine, key: str, params: KVTransferParams, max_tokens: int, prompt: Sequence[int] = PROMPT) -> None:
    """Submit the only choice of a client's request."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "kv_transfer_params": params}
    assert engine.submit(key, engine.make(f"{key}#0", list(prompt), **fields)) == SubmitReply(7)


def prefill(first: Engine, prompt: Sequence[int] = PROMPT, key: str = "a") -> KVTransferParams:
    """What a request's reply carries for the decode engine."""
    ask(first, key, ASK, 1, prompt)
    run(first, until=has_ended(first, f"{key}#0"))
    reply = first.received[f"{key}#0"].outputs[-1].kv_transfer
    assert reply is not None
    return transfer_params(reply)


def decode(engine: Engine, params: KVTransferParams, prompt: Sequence[int] = PROMPT, key: str = "b") -> None:
    ask(engine, key, params, 6, prompt)


def has_ended(engine: Engine, rid: str = "b#0") -> Callable[[], Any]:
    return lambda: rid in engine.received and engine.received[rid].finish


def error(engine: Engine) -> str:
    """Why the request could not be served."""
    finish = engine.received["b#0"].finish
    assert finish is not None and finish.reason == "error" and finish.message is not None
    return finish.message


def test_blocks_come_over_the_socket_and_the_lease_ends(tmp_path: Path) -> None:
    with pair(tmp_path) as (first, second):
        params = prefill(first)
        assert params.num_blocks == 4 and params.remote_num_tokens == 16
        first.run()
        assert first.stored("leased") == first.stats.blocks_held == 4
        decode(second, params)
        run(first, second, until=has_ended(second))
        second.check_complete("b#0")
        assert second.received["b#0"].cached == 16 and second.stored("received") == 4
        run(first, until=lambda: first.stored("leased") == 0)
        assert first.stored("sent") == 4
        for engine in (first, second):
            engine.check_empty()


def test_a_prompt_without_a_full_block_has_nothing_to_hold(tmp_path: Path) -> None:
    with pair(tmp_path) as (first, second):
        params = prefill(first, PROMPT[:3])
        assert params.num_blocks == 0
        first.run()  # it looks for blocks that were lost while nothing runs
        decode(second, params, PROMPT[:3])
        run(first, second, until=has_ended(second))
        second.check_complete("b#0")
        for engine in (first, second):
            engine.check_empty()


def test_blocks_that_are_here_already_are_not_fetched(tmp_path: Path) -> None:
    with pair(tmp_path) as (first, second):
        second.add("warm", PROMPT, max_tokens=1, ignore_eos=True)
        second.run()
        decode(second, prefill(first))
        run(first, second, until=has_ended(second))
        second.check_complete("b#0")
        run(first, second, until=lambda: first.stored("leased") == 0)
        assert first.stored("sent") == second.stored("received") == 0
        first.check_empty()


def test_blocks_come_as_files(tmp_path: Path) -> None:
    with pair(tmp_path, "shared-storage") as (first, second):
        second.executor.copies.files = first.executor.copies.files
        params = prefill(first)
        assert params.num_blocks == 4 and params.remote_host is None
        decode(second, params)
        run(second, until=has_ended(second))
        second.check_complete("b#0")
        assert second.received["b#0"].cached == 16 and second.stored("read") == 4
        second.check_empty()


def test_files_that_are_gone_are_an_error(tmp_path: Path) -> None:
    with pair(tmp_path, "shared-storage") as (first, second):
        decode(second, prefill(first))
        run(second, until=has_ended(second))
        assert "files of its blocks are missing" in error(second)
        second.check_empty()


def test_an_output_does_not_wait_for_a_full_disk(tmp_path: Path) -> None:
    with pair(tmp_path, "shared-storage") as (first, _):
        first.executor.copies.is_full = True
        assert prefill(first).num_blocks == 0
        first.check_complete("a#0")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_lease_that_has_ended(tmp_path: Path, policy: str) -> None:
    with pair(tmp_path, policy=policy) as (first, second):
        params = prefill(first)
        first.clock.now += LEASE + 1
        first.run()
        assert first.stored("leased") == 0
        first.check_empty()
        decode(second, params)
        run(first, second, until=has_ended(second))
        assert second.stored("failed_transfers") == 1 and second.received["b#0"].cached == 0
        if policy == "fail":
            assert "the lease has ended" in error(second)
        else:
            second.check_complete("b#0")
        second.check_empty()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remote_engine_id": "other"}, "it was restarted"),
        ({"remote_identity": {"weights": "other"}}, "the two servers differ in: "),
        ({"remote_host": None, "remote_port": None}, "different connectors"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pair(tmp_path) as (first, second):
        decode(second, msgspec.structs.replace(prefill(first), **change))
        run(first, second, until=has_ended(second))
        assert reason in error(second)
        second.check_empty()


def test_a_request_that_is_given_up_gives_up_the_lease(tmp_path: Path) -> None:
    """Before its blocks were asked for: it waits for a slot."""
    with pair(tmp_path) as (first, second):
        params = prefill(first)
        rows = second.config.scheduler.rows
        for number in range(rows):
            second.add(f"long{number}", [3, number], max_tokens=50, ignore_eos=True)
        second.steps(3)
        decode(second, params)
        second.steps(2)
        second.abort("b")
        run(first, until=lambda: first.stored("leased") == 0)
        assert first.stored("sent") == 0
        first.check_empty()
        second.run()
        second.check_empty()


def test_pulls_that_take_long_hold_up_no_notification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, began = threading.Event(), threading.Semaphore(0)

    def slow(pull: Pull, *args: Any) -> None:
        began.release()
        assert go_on.wait(60)
        run_pull(pull, *args)

    monkeypatch.setattr(transfers, "run_pull", slow)
    with pair(tmp_path) as (first, second):
        for number in range(transfers.MAX_PULLS):
            prompt = [number + 3, *PROMPT]
            decode(second, prefill(first, prompt, f"a{number}"), prompt, f"b{number}")
            second.steps(2)
            assert began.acquire(timeout=600)
        params = prefill(first)
        leased = first.stored("leased")
        for number in range(second.config.scheduler.rows):
            second.add(f"long{number}", [3, number], max_tokens=50, ignore_eos=True)
        second.steps(3)
        decode(second, params)
        second.steps(2)
        second.abort("b")
        run(first, until=lambda: first.stored("leased") == leased - 4)
        go_on.set()
        run(first, second, until=lambda: first.stored("leased") == 0)
        second.run()


def test_a_request_whose_grammar_is_refused_gives_up_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(tmp_path) as (first, second):
        params = prefill(first)
        grammar: Future[Grammar] = Future()
        monkeypatch.setattr(second.feature(GrammarFeature).grammars, "compile", lambda outputs, client: grammar)
        options: dict[str, Any] = {"structured_outputs": StructuredOutputs(regex="("), "kv_transfer_params": params}
        second.core.receive(b"A", Submit(7, "b", [second.make("b#0", PROMPT, **options)]))
        grammar.set_exception(RequestError("it cannot be compiled"))
        second.run()
        assert second.submit_replies == [SubmitReply(7, "invalid", "it cannot be compiled")]
        run(first, until=lambda: first.stored("leased") == 0)
        assert first.stored("sent") == 0
        second.check_empty()


def test_a_client_that_gives_up_a_prefill_ends_its_lease(tmp_path: Path) -> None:
    with pair(tmp_path) as (first, _):
        prefill(first)
        assert first.stats.blocks_held == 4
        first.abort("a")
        first.run()
        first.check_empty()
