"""The bounds of the store, and trees of unusual shapes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sessions.simulation import CONTEXT
from tokserve.base.errors import NotFound, QueueFull, RequestError
from tokserve.features.sessions.canonical import canonical, chain
from tokserve.features.sessions.store import SESSION_BYTES, SessionStore
from tokserve.features.sessions.turns import TurnAnswer, TurnPrompt
from tokserve.protocol.prompt import pack_ids

QUESTION = {"role": "user", "content": "q"}


def store(**bounds: Any) -> SessionStore:
    return SessionStore(**{"max_sessions": 10, "max_bytes": 1 << 30, "ttl": 100.0} | bounds)


def add(sessions: SessionStore, messages: list[dict[str, Any]], text: str, now: float = 0.0) -> list[dict[str, Any]]:
    """Answer the messages with a text; returns those of the next request."""
    digests = chain(messages)
    match = sessions.match("", "s", CONTEXT, digests, now)
    prompt = TurnPrompt(
        context=CONTEXT,
        parent=match.turn_id,
        because=match.because,
        new_ids=pack_ids([1, 2]),
        chain=digests[match.num_messages :],
        messages=b"[]",
    )
    answer = TurnAnswer(
        token_ids=pack_ids([3]),
        token_logprobs=b"abcd",
        mode="raw",
        finish_reason="stop",
        stop_detail="eos",
        seed=0,
        weight_versions=[],
        prompt_weight_versions=[],
        message={"role": "assistant", "content": text},
        request_id="r",
    )
    assert sessions.add("", "s", match.number, prompt, answer, now) is not None
    return [*messages, answer.message, QUESTION]


def test_a_session_of_ten_thousand_turns() -> None:
    sessions, messages = store(), [QUESTION]
    for index in range(100):
        messages = add(sessions, messages, f"a{index}")
    session = sessions.get("", "s")
    last = session.turns["t99"]
    for index in range(100, 10_000):  # as `add` does, without the digests of all messages before
        answer = {"role": "assistant", "content": f"a{index}"}
        digests = chain([QUESTION], last.key)
        prompt = TurnPrompt(
            context=CONTEXT, parent=last.turn_id, because=None, new_ids=pack_ids([1, 2]), chain=digests, messages=b"[]"
        )
        next_answer = last.answer.__class__(**_fields(last.answer) | {"message": answer})
        sessions.add("", "s", session.number, prompt, next_answer, 0.0)
        last = session.turns[f"t{index}"]
    assert (last.depth, last.num_ids, len(session.ids(last))) == (9_999, 30_000, 120_000)
    assert sessions.num_bytes == session.num_bytes < 100 << 20


def _fields(answer: TurnAnswer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in answer.__struct_fields__}


def test_a_thousand_branches() -> None:
    sessions = store()
    messages = add(sessions, [QUESTION], "a")
    for index in range(1000):
        add(sessions, [*messages[:-1], {"role": "user", "content": str(index)}], "b")
    turns = sessions.get("", "s").turns.values()
    assert [turn.prompt.parent for turn in turns] == [None] + ["t0"] * 1000


def test_memory_is_counted_and_given_back() -> None:
    sessions = store()
    add(sessions, [QUESTION], "a")
    assert sessions.num_bytes > SESSION_BYTES
    sessions.add_metadata("", "s", {"x": "y" * 1000}, None, 0.0)
    sessions.add_metadata("", "s", {"x": "y" * 2000}, "t0", 0.0)
    counted = sessions.num_bytes
    sessions.add_metadata("", "s", {"x": "y"}, None, 0.0)
    assert sessions.num_bytes == counted - 999
    sessions.delete("", "s")
    assert sessions.num_bytes == len(sessions) == 0


def test_sessions_that_are_not_used_make_room() -> None:
    sessions = store(max_sessions=2, ttl=10.0)
    for name in ("a", "b"):
        sessions.create("", name, {}, 0.0)
    sessions.begin("", "a", sessions.get("", "a").number, "r", b"", 1.0)
    with pytest.raises(QueueFull, match="--max-sessions"):
        sessions.create("", "c", {}, 5.0)
    sessions.create("", "c", {}, 12.0)
    with pytest.raises(NotFound):
        sessions.get("", "b")
    assert sessions.get("", "a").running == {"r": b""}, "a request of it is being answered"


def test_metadata_has_a_bound() -> None:
    sessions = store()
    with pytest.raises(RequestError, match="metadata must have at most"):
        sessions.create("", "s", {"x": "y" * (1 << 20)}, 0.0)
    assert sessions.num_bytes == len(sessions) == 0


def test_only_little_metadata_is_taken_beyond_the_bound() -> None:
    sessions = store(max_bytes=1 << 16)
    sessions.create("", "s", {"x": "y" * (1 << 16)}, 0.0)
    large = {"x": "y" * 5000}
    with pytest.raises(QueueFull, match="--max-session-bytes"):
        sessions.create("", "t", large, 0.0)
    sessions.create("", "t", {"task": 1}, 0.0)
    sessions.add_metadata("", "t", {"reward": 1.0}, None, 0.0)
    with pytest.raises(QueueFull, match="--max-session-bytes"):
        sessions.add_metadata("", "t", large, None, 0.0)
    sessions.delete("", "s")
    sessions.add_metadata("", "t", large, None, 0.0)


def test_an_owner_has_a_bound() -> None:
    sessions = store(max_per_owner=2)
    for name in ("a", "b"):
        sessions.create("one", name, {}, 0.0)
    with pytest.raises(QueueFull, match="--max-sessions-per-key"):
        sessions.create("one", "c", {}, 0.0)
    sessions.create("other", "c", {}, 0.0)
    sessions.delete("one", "a")
    sessions.create("one", "c", {}, 0.0)


def test_a_turn_of_a_session_that_is_gone_is_dropped() -> None:
    sessions = store()
    add(sessions, [QUESTION], "a")
    session = sessions.get("", "s")
    turn = session.turns["t0"]
    sessions.delete("", "s")
    assert sessions.add("", "s", session.number, turn.prompt, turn.answer, 0.0) is None
    add(sessions, [QUESTION], "b")  # a later session with the same id
    sessions.begin("", "s", session.number, "r", b"", 0.0)
    assert sessions.add("", "s", session.number, turn.prompt, turn.answer, 0.0) is None
    assert sessions.get("", "s").state == "idle" and len(sessions.get("", "s").turns) == 1


def test_leases_end_and_are_ended_by_deletion() -> None:
    sessions = store(max_sessions=300)
    for index in range(200):
        sessions.create("", f"s{index}", {}, 0.0)
        sessions.close("", f"s{index}", 0.0)
    taken = [sessions.take("", lease, 1.0) for lease in (5.0, 3.0, 0.0)]
    assert [one and one.session_id for one in taken] == ["s0", "s1", "s2"]
    assert sessions.next_lease_end("", 1.0) == 4.0
    sessions.delete("", "s1")
    assert sessions.next_lease_end("", 1.0) == 6.0
    for index in range(3, 200):
        session = sessions.take("", 9.0, 2.0)
        assert session is not None and session.session_id == f"s{index}"
        sessions.delete("", session.session_id)
    assert [one and one.session_id for one in (sessions.take("", 9.0, 6.0) for _ in range(3))] == ["s2", "s0", None]
    assert sessions.take("other", 9.0, 6.0) is None


def test_what_has_changed_is_known() -> None:
    sessions = store()
    for name in ("a", "b"):
        sessions.create("one", name, {}, 0.0)
    seen = sessions.num_changes
    assert not sessions.has_changed("one", None, seen) and sessions.has_changed("one", "open", seen - 1)
    sessions.close("one", "a", 0.0)
    assert sessions.has_changed("one", "closed", seen) and sessions.has_changed("one", None, seen)
    assert not sessions.has_changed("one", "open", seen) and not sessions.has_changed("other", None, seen)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "ab"}, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        ({"content": None, "tool_calls": []}, {"content": ""}),
        ({"content": "a\n"}, {"content": " a", "reasoning_content": "thought", "extra": 1}),
        ({"content": [{"type": "thinking", "thinking": "x"}, "a"]}, {"content": "a"}),
    ],
)
def test_answers_that_say_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical({"role": "assistant"} | one) == canonical({"role": "assistant"} | other)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": [2.0]}', '{ "b":[2],"a":1.0}', True),
        ("", "{}", True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": 10000000000000000000001}', '{"a": 10000000000000000000000}', True),
        ('{"a": 1}', '{"a": 2}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1', '{"a": 1}', False),
    ],
)
def test_arguments_are_compared_as_values(one: str, other: str, *, same: bool) -> None:
    forms = [
        canonical({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]})
        for arguments in (one, other)
    ]
    assert (forms[0] == forms[1]) is same


@pytest.mark.parametrize(
    "message", [None, 5, {}, {"content": 5}, {"tool_calls": [None, {"function": 3}]}, {"content": [None, {"x": {}}]}]
)
def test_any_message_has_a_form(message: Any) -> None:
    assert canonical(message)
