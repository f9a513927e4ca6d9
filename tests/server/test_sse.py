"""Streams: deltas joined equal the whole, what the chunks carry, silence, errors on the way, clients that leave."""

import asyncio
import itertools
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.byte_tokenizer import ids
from tests.server.scripted_llm import Script, columns, endless, says
from tests.server.site import Caller, Site, parse_events, site
from tests.waiting import PATIENCE
from tokserve.client.outputs import ChoiceOutput
from tokserve.features.observe.observers import metrics_of
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS
from tokserve.protocol.params import SamplingParams
from tokserve.server.replies import logprobs, reply_parts, sse
from tokserve.server.replies.sse import StreamWriter, request_failure
from tokserve.server.tokens.generate_body import GenerateBody, StreamOptions
from tokserve.server.tokens.generate_reply import TokenRender

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
BODY = {"token_ids": [5, 6, 8], "sampling_params": {"max_tokens": 6, "seed": 3}}
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 3}


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices put together from the deltas of the token route."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for delta in event["choices"]:
            choice = choices.setdefault(delta["index"], {"token_ids": [], "text": "", "content": []})
            choice["token_ids"] += delta["token_ids"]
            choice["text"] += delta.get("text", "")
            choice["content"] += (delta["logprobs"] or {}).get("content", [])
            choice |= {k: v for k, v in delta.items() if k not in ("token_ids", "text", "logprobs")}
    return choices


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_joined_equal_the_full_reply(n: int) -> None:
    s = site()
    params = BODY["sampling_params"] | {"n": n, "logprobs": 2, "prompt_logprobs": 1}  # type: ignore[operator]
    body = BODY | {"sampling_params": params, "output_mode": "text", "return_token_ids": True}
    full = s.post(GENERATE, body).json()
    events = s.events(GENERATE, body | {"stream_options": {"include_usage": True}})
    choices = joined(events)
    assert len(choices) == n
    for choice in full["choices"]:
        content = choice.pop("logprobs")["content"]
        assert choices[choice["index"]].pop("content") == content
        assert choices[choice["index"]] == choice
    assert events[-1]["usage"] == full["usage"] and events[-1]["choices"] == []
    assert events[0]["prompt_token_ids"] == full["prompt_token_ids"]
    assert [e["prompt_logprobs"] for e in events if "prompt_logprobs" in e] == [full["prompt_logprobs"]]
    assert events[0]["seed"] == full["seed"] == 3


def test_only_the_first_event_has_the_fields_of_the_request() -> None:
    first, *others = site().events(GENERATE, BODY | {"return_token_ids": True, "request_id": "r"})
    assert first["model"] == "tiny" and first["created"] and first["seed"] == 3
    assert first["prompt_token_ids"] == [5, 6, 8]
    for event in others:
        assert set(event) == {"request_id", "choices", "output_mode"} and event["request_id"] == "generate-tokens-r"
        for choice in event["choices"]:
            shape = {"index", "token_ids", "logprobs", "finish_reason", "stop_reason"}
            assert set(choice) - {"weight_versions", "stop_detail"} == shape
    assert others[-1]["choices"][0]["stop_detail"] == {"kind": "max_tokens"}


STREAMED: list[tuple[str, Script, dict[str, Any]]] = [
    (CHAT, endless, CHAT_BODY),
    (CHAT, says("abc"), CHAT_BODY),
    (CHAT, says("abc"), CHAT_BODY | {"logprobs": True}),
    (CHAT, says("abc"), CHAT_BODY | {"return_token_ids": True}),
    (CHAT, says("abc"), CHAT_BODY | {"stop": "c"}),
    (COMPLETIONS, endless, {"prompt": [5, 6, 8], "max_tokens": 6}),
    (COMPLETIONS, says("abc"), {"prompt": "x", "max_tokens": 6}),
    (GENERATE, endless, BODY),
]


@pytest.mark.parametrize(("route", "script", "body"), STREAMED)
def test_continuous_usage_grows_with_every_choice_of_a_stream(route: str, script: Script, body: dict[str, Any]) -> None:
    """peer-suites-3 A17: vLLM's tests read them so."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = site(script).events(route, body | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == (0 if route == CHAT else 1)
    assert all(before < after for before, after in itertools.pairwise(counts[:-1])), counts
    assert counts[-1] == counts[-2] and events[-1]["choices"] == []
    full = site(script).post(route, body).json()
    assert events[-1]["usage"] == full["usage"] and events[-2]["choices"][0]["finish_reason"]
    if route == CHAT:
        text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
        assert text == full["choices"][0]["message"]["content"]


def test_the_role_of_another_choice_counts_what_others_have() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = site().events(CHAT, CHAT_BODY | {"n": 2, "stream_options": options})
    roles = [event["usage"]["completion_tokens"] for event in events if "role" in str(event["choices"])]
    assert roles == [0, 1]


def test_packed_columns_in_a_stream_have_no_per_token_objects() -> None:
    params = BODY["sampling_params"] | {"logprobs": 1}  # type: ignore[operator]
    for event in site().events(GENERATE, BODY | {"sampling_params": params, "logprobs_format": "base64"}):
        assert event["choices"][0]["logprobs"]["shape"] == [1, 1]


SCORED = {"max_tokens": 6, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
LONG: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, BODY | {"sampling_params": SCORED}),
    (GENERATE, BODY | {"sampling_params": SCORED | {"n": 3, "prompt_logprobs_start": 2}, "token_ids": [5, 6, 8, 9]}),
    (GENERATE, BODY | {"sampling_params": SCORED, "logprobs_format": "arrays"}),
    (GENERATE, BODY | {"sampling_params": SCORED, "logprobs_format": "base64"}),
    (GENERATE, BODY | {"sampling_params": SCORED, "token_ids": [5]}),
    (CHAT, CHAT_BODY | {"logprobs": True, "top_logprobs": 2, "n": 2, "prompt_logprobs": 2}),
    (COMPLETIONS, {"prompt": [5, 6, 8], "max_tokens": 6, "seed": 3, "logprobs": 2, "echo": True, "n": 2}),
    (COMPLETIONS, {"prompt": ["abc", "de"], "max_tokens": 2, "seed": 3, "prompt_logprobs": 2, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 2, "seed": 3, "logprobs": -1, "echo": True}),
]


@pytest.mark.parametrize(("path", "body"), LONG[:4] + LONG[5:])
def test_a_long_reply_is_encoded_in_parts_in_a_thread(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site(max_logprobs=-1)
    reply = s.post(path, body | {"request_id": "r"})
    monkeypatch.setattr(sse, "PARTED", 1)
    monkeypatch.setattr(reply_parts, "PART", 3)
    parts = s.post(path, body | {"request_id": "r"})
    assert reply.status_code == parts.status_code == 200, parts.text
    assert reply.json() | {"created": 0} == parts.json() | {"created": 0}
    assert reply.headers["content-length"] and "content-length" not in parts.headers
    assert reply.headers["content-type"] == parts.headers["content-type"]
    assert parts.headers["x-request-id"] == "r"


@pytest.mark.parametrize(("path", "body"), LONG)
def test_large_deltas_of_a_stream_are_encoded_in_a_thread(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def events() -> list[dict[str, Any]]:
        return [event | {"created": 0} for event in site(max_logprobs=-1).events(path, body | {"request_id": "r"})]

    def tokens(events: list[dict[str, Any]]) -> dict[int, list[Any]]:
        """What each choice says, however it is cut into events."""
        reported: dict[int, list[Any]] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            logprobs = choice["logprobs"] or {}
            reported.setdefault(choice["index"], []).extend(logprobs.get("content") or logprobs.get("tokens") or [])
        return reported

    at_once = events()
    monkeypatch.setattr(sse, "LARGE", 1)
    later = events()
    assert tokens(later) == tokens(at_once)
    assert sum("prompt_logprobs" in event for event in later) == sum("prompt_logprobs" in event for event in at_once)
    for name in ("finish_reason", "stop_reason"):
        assert later[-1]["choices"][0][name] == at_once[-1]["choices"][0][name]


def test_deltas_that_are_large_together_are_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    make = logprobs.objects

    def objects(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make(*args)

    body = BODY | {"sampling_params": {"max_tokens": 6, "seed": 3, "logprobs": 2, "n": 4}}
    at_once = joined(site().events(GENERATE, body))
    monkeypatch.setattr(logprobs, "objects", objects)
    one = ChoiceOutput(0, [5], columns={LOGPROBS: columns([5], 2, ())})
    monkeypatch.setattr(sse, "LARGE", 3 * sse.columns_size(one))
    assert joined(site().events(GENERATE, body)) == at_once
    assert any(name.startswith("tokserve-work") for name in threads)


def test_a_large_delta_that_cannot_be_encoded_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(sse, "LARGE", 1)
    monkeypatch.setattr(logprobs, "objects", fail)
    body = BODY | {"sampling_params": {"max_tokens": 6, "logprobs": 2}}
    assert site().events(GENERATE, body)[-1]["error"]["type"] == "internal_error"


def test_a_reply_that_would_be_too_large_is_refused() -> None:
    s = site(max_reply_bytes=1 << 20, max_model_len=4096, max_logprobs=20)
    params = {"max_tokens": 4000, "logprobs": 20, "n": 2}
    answer = s.post(GENERATE, BODY | {"sampling_params": params})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "reply_too_large"
    assert answer.json()["error"]["param"] == "sampling_params.logprobs"
    assert not s.llm.calls, "it is refused before the engine knows"
    columns = BODY | {"sampling_params": params | {"n": 1}, "logprobs_format": "arrays"}
    assert s.post(GENERATE, columns).status_code == 400
    fewer = BODY | {"sampling_params": params | {"n": 100, "max_tokens": 6}}
    assert s.post(GENERATE, fewer).status_code == 400
    assert s.post(GENERATE, fewer | {"logprobs_format": "arrays"}).status_code == 200, "columns take less"
    assert s.post(GENERATE, BODY | {"sampling_params": params | {"max_tokens": 20}}).status_code == 200
    assert s.events(GENERATE, BODY | {"sampling_params": params | {"max_tokens": 100}})
    echo = {"prompt": [5] * 500, "logprobs": 20, "echo": True, "max_tokens": 1, "n": 64, "stream": True}
    assert s.post(COMPLETIONS, echo).json()["error"]["param"] == "logprobs"


def test_events_that_are_ready_are_sent_in_one_write() -> None:
    async def scene() -> Caller:
        s = site()
        params = BODY["sampling_params"] | {"n": 4}  # type: ignore[operator]
        caller = Caller(s, GENERATE, BODY | {"stream": True, "sampling_params": params})
        await caller.task
        return caller

    caller = asyncio.run(scene())
    assert [write.count(b"data: {") for write in caller.writes] == [4] * 6 + [0]
    assert caller.writes[-1] == b"data: [DONE]\n\n"


# silence


def test_comments_are_sent_while_there_are_no_tokens() -> None:
    async def scene() -> Caller:
        s = site(keep_alive=0.02)
        s.llm.hold = True
        caller = Caller(s, GENERATE, BODY | {"stream": True})
        await caller.wait_for(lambda c: len(c.writes) >= 3)
        s.llm.wake()
        await caller.task
        await asyncio.sleep(0.05)  # nothing may come after the end
        return caller

    caller = asyncio.run(scene())
    assert caller.status == 200 and caller.done
    assert caller.writes[:3] == [b": keep-alive\n\n"] * 3
    assert sum(len(e["choices"]) for e in parse_events(b"".join(caller.writes).decode())) == 6


def test_no_comment_is_sent_within_a_write_or_after_the_end() -> None:
    async def scene() -> list[bytes]:
        sent: list[bytes] = []
        slow, freed = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message["body"])
            await slow.wait()

        wire = StreamWriter(send, 60.0)
        wire.start(freed.set, lambda stalled: None)
        wire.write(b"slow")
        assert wire.blocked
        wire._last = -60.0
        wire._tick()  # silence, but the client does not even read what there is
        slow.set()
        await freed.wait()
        assert not wire.blocked
        await wire.end(b"end")
        assert wire._timer is not None and wire._timer.cancelled()
        return sent

    assert asyncio.run(scene()) == [b"slow", b"end"]


def test_the_end_waits_for_a_blocked_comment() -> None:
    async def scene() -> list[bytes]:
        sent: list[bytes] = []
        slow = asyncio.Event()

        async def send(message: Any) -> None:
            await slow.wait()
            sent.append(message["body"])

        wire = StreamWriter(send, 60.0)
        wire.start(lambda: None, lambda stalled: None)
        wire._last = -60.0
        wire._tick()
        ending = asyncio.create_task(wire.end(b"end"))
        await asyncio.sleep(0)
        slow.set()
        await ending
        return sent

    assert asyncio.run(scene()) == [b": keep-alive\n\n", b"end"]


class SlowReader(Caller):
    """Reads two writes, then nothing until told."""

    def __init__(self, site: Site, path: str, body: Any) -> None:
        self.going = asyncio.Event()
        super().__init__(site, path, body)

    async def _send(self, message: Any) -> None:
        await super()._send(message)
        if len(self.writes) >= 2:
            await self.going.wait()


def test_a_slow_reader_is_waited_for_and_then_gets_everything_in_one_write() -> None:
    async def scene() -> list[bytes]:
        s = site()
        caller = SlowReader(s, GENERATE, BODY | {"stream": True, "sampling_params": {"max_tokens": 20}})
        await caller.wait_for(lambda _: any(len(stream._state.choices[0]._token_ids) == 18 for stream in s.llm.streams))
        assert len(caller.writes) == 2
        caller.going.set()
        await caller.task
        return caller.writes

    writes = asyncio.run(scene())
    assert [write.count(b"data: {") for write in writes] == [1, 1, 1, 0]
    events = parse_events(b"".join(writes).decode())
    assert len(joined(events)[0]["token_ids"]) == 20


def test_an_unread_stream_gets_no_tokens_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> tuple[list[bool], Site]:
        s = site()
        body = BODY | {"stream": True, "request_id": "slow", "sampling_params": {"max_tokens": 400, "n": 2}}
        caller = SlowReader(s, GENERATE, body)
        await caller.wait_for(lambda _: bool(s.llm.stalls))
        caller.going.set()
        await caller.task
        return s.llm.stalls, s

    monkeypatch.setattr(sse, "PATIENCE", 0.01)
    seen, s = asyncio.run(scene())
    assert seen == [True, False] and not s.llm.num_inflight and not s.llm.released


def test_a_reader_that_is_a_little_slow_is_not_stalled() -> None:
    async def scene() -> list[bool]:
        stalls: list[bool] = []
        slow, freed = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            await slow.wait()

        wire = StreamWriter(send, 60.0)
        wire.start(freed.set, stalls.append)
        wire.write(b"slow")
        slow.set()
        await freed.wait()
        assert wire._patience is not None and wire._patience.cancelled()
        wire.stop()
        return stalls

    assert asyncio.run(scene()) == []


def test_a_reader_that_does_not_read_what_a_thread_has_made_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> list[bool]:
        stalls: list[bool] = []
        slow, stalled, freed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            await slow.wait()

        async def large_event() -> bytes:
            return b"made"

        def on_stall(value: bool) -> None:
            stalls.append(value)
            stalled.set()

        wire = StreamWriter(send, 60.0)
        wire.start(freed.set, on_stall)
        wire.write_later(b"", large_event())
        async with asyncio.timeout(60):
            await stalled.wait()
            slow.set()
            await freed.wait()
        wire.stop()
        return stalls

    monkeypatch.setattr(sse, "PATIENCE", 0.01)
    assert asyncio.run(scene()) == [True, False]


def test_a_slow_reader_that_leaves_aborts() -> None:
    async def scene() -> Site:
        s = site()
        body = BODY | {"stream": True, "request_id": "slow", "sampling_params": {"max_tokens": 400}}
        caller = SlowReader(s, GENERATE, body)
        await caller.wait_for(lambda c: len(c.writes) == 2)
        caller.hang_up()
        await caller.task
        return s

    s = asyncio.run(scene())
    assert s.llm.released == {"slow#0"} and s.llm.num_inflight == 0


def test_no_comments_while_tokens_come() -> None:
    answer = site(keep_alive=5.0).post(GENERATE, BODY | {"stream": True})
    assert "keep-alive" not in answer.text


# errors after the start


def test_the_engines_death_in_a_stream() -> None:
    async def scene() -> Caller:
        s = site()
        caller = Caller(s, GENERATE, BODY | {"stream": True})
        s.llm.hold = True
        await caller.wait_for(lambda _: s.llm.num_inflight == 1)
        s.llm.die()
        await caller.task
        assert not metrics_of(s.app.state.serving).inflight
        return caller

    caller = asyncio.run(scene())
    events = parse_events(b"".join(caller.writes).decode())
    assert events[-1]["error"]["code"] == "engine_dead" and caller.status == 200


@pytest.mark.parametrize(("route", "body"), [(GENERATE, BODY), (CHAT, CHAT_BODY)])
def test_a_request_that_failed_in_a_stream(route: str, body: dict[str, Any]) -> None:
    s = site()
    s.llm.fails = lambda index: True
    events = s.events(route, body)
    assert events[-1]["error"]["message"] == "the model's logits are not finite"
    assert events[-2]["choices"][0]["finish_reason"] == "error"


def test_an_unexpected_error_in_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> Caller:
        s = site()
        s.llm.hold = True
        caller = Caller(s, GENERATE, BODY | {"stream": True})
        await caller.wait_for(lambda _: s.llm.num_inflight == 1)
        s.llm.streams[0]._state.fail(IndexError("a defect"))  # type: ignore[arg-type]
        await caller.task
        return caller

    events = parse_events(b"".join(asyncio.run(scene()).writes).decode())
    assert events[-1]["error"]["message"] == "internal error" and "IndexError" in caplog.text


# clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("route", "body"), [(GENERATE, BODY), (CHAT, CHAT_BODY), (COMPLETIONS, {"prompt": "ab", "max_tokens": 6})]
)
def test_a_client_that_leaves_aborts(route: str, body: dict[str, Any], stream: bool) -> None:
    async def scene() -> Site:
        s = site()
        s.llm.hold = True
        caller = Caller(s, route, body | {"stream": stream, "request_id": "mine"})
        await caller.wait_for(lambda c: s.llm.num_inflight == 1 and (c.status is not None or not stream))
        caller.hang_up()
        async with asyncio.timeout(PATIENCE):
            await caller.task
        assert caller.status == (200 if stream else 499)
        return s

    s = asyncio.run(scene())
    assert s.llm.released == {"mine#0"} and s.llm.num_inflight == 0 and not metrics_of(s.app.state.serving).inflight
    assert 'request_aborts_total{cause="abort_disconnect",engine="0",model_name="tiny"} 1.0' in s.get("/metrics").text


def test_a_client_that_leaves_in_the_middle() -> None:
    async def scene() -> tuple[Site, Caller]:
        s = site()
        long = BODY | {"stream": True, "sampling_params": {"max_tokens": 400}}
        caller = Caller(s, GENERATE, long)
        await caller.wait_for(lambda c: len(c.writes) > 3)
        caller.hang_up()
        await caller.task
        return s, caller

    s, caller = asyncio.run(scene())
    assert len(s.llm.released) == 1 and 3 < len(caller.writes) < 400 and not caller.done


def test_a_client_that_leaves_a_batch_aborts_all_of_it() -> None:
    async def scene() -> Site:
        s = site()
        s.llm.hold = True
        caller = Caller(s, COMPLETIONS, {"prompt": ["a", "b", "c"], "request_id": "x"})
        await caller.wait_for(lambda _: s.llm.num_inflight == 3)
        caller.hang_up()
        await caller.task
        return s

    assert asyncio.run(scene()).llm.released == {"x#0", "x#1", "x#2"}


def test_a_client_that_leaves_before_its_body_has_come() -> None:
    async def scene() -> Site:
        s = site()
        caller = Caller(s, GENERATE, b"")
        caller._incoming.clear()
        caller.hang_up()
        await caller.task
        return s

    assert not asyncio.run(scene()).llm.calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_engine_has_accepted(stream: bool) -> None:
    async def scene() -> Site:
        s = site()
        s.llm.undecided = True
        caller = Caller(s, GENERATE, BODY | {"stream": stream, "request_id": "mine"})
        await caller.wait_for(lambda _: s.llm.num_inflight == 1)
        caller.hang_up()
        async with asyncio.timeout(PATIENCE):
            await caller.task
        assert caller.status == 499 and caller.writes == [b""]
        return s

    s = asyncio.run(scene())
    assert s.llm.released == {"mine#0"} and not metrics_of(s.app.state.serving).inflight
    assert 'request_aborts_total{cause="abort_disconnect",engine="0",model_name="tiny"} 1.0' in s.get("/metrics").text


def test_the_servers_own_cancellation_is_not_swallowed() -> None:
    async def scene() -> None:
        s = site()
        s.llm.hold = True
        caller = Caller(s, GENERATE, BODY | {"stream": True})
        await caller.wait_for(lambda _: s.llm.num_inflight == 1)
        caller.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller.task
        assert not s.llm.num_inflight and len(s.llm.released) == 1

    asyncio.run(scene())


# the text routes


@pytest.mark.parametrize("n", [1, 2])
def test_chat_stream_joined_equals_the_full_answer(n: int) -> None:
    s = site()
    body = CHAT_BODY | {"n": n, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    full = s.post(CHAT, body).json()
    events = s.events(CHAT, body | {"stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["prompt_token_ids"] == full["prompt_token_ids"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == full["usage"]
    for choice in full["choices"]:
        choice_events = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in choice_events) == choice["message"]["content"]
        assert [entry for c in choice_events for entry in (c["logprobs"] or {}).get("content", [])] == choice[
            "logprobs"
        ]["content"]
        assert [token for c in choice_events for token in c.get("token_ids", [])] == choice["token_ids"]
        assert choice_events[-1]["delta"] == {} and choice_events[-1]["finish_reason"] == choice["finish_reason"]
        assert [c["finish_reason"] for c in choice_events[:-1]] == [None] * (len(choice_events) - 1)
        assert choice_events[0]["delta"]["role"] == "assistant" and all(
            "role" not in c["delta"] for c in choice_events[1:]
        )


def test_half_a_character_is_not_sent() -> None:
    events = site(says("aé€")).events(CHAT, CHAT_BODY | {"max_tokens": 20})
    deltas = [c["delta"]["content"] for e in events for c in e["choices"] if c["delta"].get("content")]
    assert deltas == ["a", "é", "€"]


@pytest.mark.parametrize("body", [{"prompt": ["ab", "cd"], "n": 2}, {"prompt": [[5, 6], [7, 9]]}, {"prompt": "ab"}])
@pytest.mark.parametrize("echo", [True, False])
def test_completions_stream_joined_equals_the_full_answer(body: dict[str, Any], echo: bool) -> None:
    s = site()
    body = body | {"max_tokens": 5, "seed": 1, "logprobs": 2, "echo": echo, "return_token_ids": True}
    full = s.post(COMPLETIONS, body).json()
    events = s.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == full["usage"]
    for choice in full["choices"]:
        choice_events = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in choice_events) == choice["text"]
        for column, values in choice["logprobs"].items():
            assert [value for c in choice_events for value in c["logprobs"][column]] == values
        assert [token for c in choice_events for token in c["token_ids"]] == choice["token_ids"]
        assert (
            choice_events[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            and "prompt_token_ids" not in choice_events[-1]
        )
        assert choice_events[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_every_event_is_json() -> None:
    for line in site().post(CHAT, CHAT_BODY | {"stream": True}).text.split("\n\n")[:-2]:
        assert json.loads(line[6:])["object"] == "chat.completion.chunk"
    assert ids("a")


# events that are put together from prepared parts


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("kind", ["objects", "arrays", "base64"])
@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("usage", [False, True])
def test_an_event_in_the_middle_reads_as_if_it_were_encoded_whole(
    logprobs: int | None, kind: Any, mode: Any, usage: bool
) -> None:
    requested = GenerateBody(
        token_ids=[5], logprobs_format=kind, output_mode=mode, stream=True, stream_options=StreamOptions(usage)
    )
    params = SamplingParams(logprobs=logprobs, n=2)
    generation: Any = SimpleNamespace(key='a"\\\x00é')
    render = TokenRender(site().app.state.serving, generation, requested, params, packed=False)
    render._first = False
    for index, new in enumerate(([7], [4, 450_000, 0], [])):
        rows = {} if logprobs is None or not new else {LOGPROBS: columns(new, logprobs, [])}
        delta = ChoiceOutput(index, new, 'say "\\é\x01"' if mode == "text" else None, rows)
        assert render._plain_event(delta) == render._event(delta) == render.delta(delta)


@pytest.mark.parametrize("read", [True, False])
def test_prompt_logprobs_wait_for_a_choice_that_has_read_the_prompt(read: bool) -> None:
    params = SamplingParams(prompt_logprobs=0, n=2)
    requested = GenerateBody(token_ids=[5, 6], stream=True)
    generation: Any = SimpleNamespace(key="r", ended=False, seed=1, prompt_ids=lambda: [5, 6])
    render = TokenRender(site().app.state.serving, generation, requested, params, packed=False)
    never = ChoiceOutput(0, [], finish_reason="deadline", stop_detail="queue_timeout")
    assert "prompt_logprobs" not in json.loads(render.delta(never).removeprefix(b"data: "))
    other = ChoiceOutput(1, [7], values={PROMPT_LOGPROBS: columns([6], 0, [])}) if read else never
    generation.ended = not read
    scores = json.loads(render.delta(other).removeprefix(b"data: "))["prompt_logprobs"]
    assert scores == [None, {"6": {"logprob": -0.125, "rank": 1, "decoded_token": None}} if read else None]


def test_parameters_that_forbid_every_token_are_a_400() -> None:
    refused, other, sound = (
        ChoiceOutput(0, [], finish_reason=reason, stop_detail=detail, message="why")
        for reason, detail in (("error", "forbidden"), ("error", "nan"), ("length", "max_tokens"))
    )
    assert request_failure([refused, sound]) is None and request_failure([]) is None
    for ends, status in (([refused, refused], 400), ([refused, other], 500), ([other], 500)):
        error = request_failure(ends)
        assert error is not None and error.status == status and error.message == "why"
