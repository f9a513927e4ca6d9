"""Attacks with sessions, while a good client is served: refusals by name, and memory within the bounds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.hostile import session_attacks as attack
from tests.hostile.attack import MIB, Answer, Scene
from tests.hostile.test_front_end import attacked

pytestmark = pytest.mark.slow
MAX_SESSIONS = 10_000


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with attacked("--sessions", "--max-session-bytes", str(100 * MIB), "--max-sessions", str(MAX_SESSIONS)) as running:
        yield running


def outcomes(answers: list[Answer]) -> Counter[tuple[int, str | None]]:
    return Counter((answer.status, answer.code) for answer in answers)


@pytest.mark.timeout(1800)
def test_a_hundred_thousand_sessions(scene: Scene) -> None:
    answers = scene.under(attack.many_sessions)
    assert outcomes(answers) == {(200, None): MAX_SESSIONS, (429, "too_many_sessions"): 90_000}
    assert all(answer.retry_after for answer in answers if answer.status == 429)
    assert outcomes(scene.under(attack.delete_all)) == {(200, None): MAX_SESSIONS}


def test_a_session_of_ten_thousand_turns_and_its_slow_readers(scene: Scene) -> None:
    assert outcomes(scene.under(attack.many_turns)) == {(200, None): 200}
    turns = json.loads(attack.read(scene.server.url, "/sessions/turns/tree"))["turns"]
    assert len(turns) == 10_000 and {turn["parent"] for turn in turns} == {None}
    rows = json.loads(attack.read(scene.server.url, "/sessions/turns/sequences?shared=all"))["sequences"]
    assert len(rows) == 10_000
    scene.under(attack.slow_readers)


def test_a_thousand_branches_of_an_answer(scene: Scene) -> None:
    assert outcomes(scene.under(attack.many_branches)) == {(200, None): 1001}
    turns = json.loads(attack.read(scene.server.url, "/sessions/branches/tree"))["turns"]
    assert Counter(turn["parent"] for turn in turns) == {None: 1, "t0": 1000}


def test_trainers_that_wait_and_hang_up(scene: Scene) -> None:
    assert outcomes(scene.under(attack.trainers_that_hang_up)) == {(200, None): 111}
    taken = json.loads(attack.read(scene.server.url, "/sessions/next"))
    assert taken["session_id"] == "waited-0", "a trainer that has gone was given the session"


def test_ids_of_a_megabyte(scene: Scene) -> None:
    of_body, of_session, of_turn, *of_head = scene.under(attack.long_ids)
    assert (of_body.status, of_body.field) == (of_session.status, of_session.field) == (400, "session_id")
    assert of_turn.status == 404 and of_turn.size < 1000
    assert all(answer.status in (0, 400, 414, 431) and answer.size < 1000 for answer in of_head), of_head


def test_metadata_beyond_the_memory_of_sessions(scene: Scene) -> None:
    answers = scene.under(attack.large_metadata)
    created, reward, deleted = answers[1:201], answers[201], answers[202:]
    counts = outcomes(created)
    assert counts.keys() == {(200, None), (429, "session_bytes")} and 60 <= counts[200, None] <= 100
    assert reward.status == 200, "a reward is taken nevertheless"
    assert outcomes(deleted)[200, None] == counts[200, None]
