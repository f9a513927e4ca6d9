"""Each attack on the front end, while a good client is served: the replies, and no effect on the good client."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.server import Server
from tests.hostile import attack
from tests.hostile.attack import Answer, Scene
from tests.hostile.stream_attacks import connect, large


@contextmanager
def attacked(*flags: str) -> Iterator[Scene]:
    with Server("demo", *flags) as server:
        running = Scene(server)
        yield running
        running.metronome.end()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with attacked(
        "--body-timeout", "120", "--stream-stall-timeout", "120"
    ) as running:  # a busy machine is slow to send
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[Scene]:
    with attacked("--body-timeout", "4", "--stream-stall-timeout", "3") as running:
        yield running


def errors(answers: list[Answer]) -> set[tuple[int, str | None, str | None]]:
    return {(answer.status, answer.code, answer.field) for answer in answers}


TOO_LONG = (400, "context_length_exceeded")


@pytest.mark.slow
def test_texts_that_cannot_fit_are_refused_unread(scene: Scene) -> None:
    *answers, of_messages = scene.under(attack.long_text)
    assert of_messages.status == 400  # an error of that route has no code
    fields = ["prompt", "messages", "prompt", "input", "prompt[1]", "prompt"]
    assert [(answer.status, answer.code, answer.field) for answer in answers] == [(*TOO_LONG, name) for name in fields]
    assert errors(scene.under(attack.many_texts)) == {(*TOO_LONG, "prompt")}
    assert errors(scene.under(attack.longest_text)) == {(413, "too_many_values", None)}, "its commas may be values"


@pytest.mark.slow
def test_long_texts_are_tokenized_in_a_thread(scene: Scene) -> None:
    assert errors(scene.under(attack.text_to_count)) == {(200, None, None)}


@pytest.mark.slow
def test_stop_strings(scene: Scene) -> None:
    assert errors(scene.under(attack.many_stops)) == {(400, None, "stop")}
    assert errors(scene.under(attack.as_many_stops_as_allowed)) == {(200, None, None)}


def test_bad_words(scene: Scene) -> None:
    refused, served = scene.under(attack.many_bad_words)
    assert (refused.status, refused.field, served.status) == (400, "bad_words", 200)


@pytest.mark.slow
def test_bodies_that_never_end(impatient: Scene) -> None:
    counts = Counter((answer.status, answer.code) for answer in impatient.under(attack.endless_bodies))
    assert counts[503, "body_memory"] > 0 and counts[408, "body_timeout"] > 0, counts
    assert counts[503, "body_memory"] + counts[408, "body_timeout"] + counts[0, None] == sum(counts.values())


def test_bodies_in_tiny_pieces(scene: Scene) -> None:
    assert {answer.code for answer in scene.under(attack.tiny_chunks) if answer.status} <= {"small_chunks"}
    assert {answer.status for answer in scene.under(attack.tiny_segments)} == {200}


@pytest.mark.slow
def test_requests_behind_others_on_a_connection(scene: Scene) -> None:
    assert scene.under(attack.pipelined_requests) == []


@pytest.mark.slow
def test_large_replies_are_sent_while_they_are_made(scene: Scene) -> None:
    answers = scene.under(attack.large_replies)
    assert [answer.status for answer in answers] == [200, 200] and all(answer.size > 50e6 for answer in answers)


@pytest.mark.slow
def test_a_client_that_never_reads_is_disconnected_and_its_request_aborted(impatient: Scene) -> None:
    server = impatient.server
    aborted = 'tokserve:request_aborts_total{cause="abort_stalled"'

    def aborts() -> float:
        return next(float(line.split()[-1]) for line in server.get("/metrics").text.splitlines() if aborted in line)

    async def unread() -> None:
        streams = [await connect(server.url, large(random.Random(i), n=8)) for i in range(2)]
        while aborts() < 16:
            assert await asyncio.to_thread(impatient.good) == impatient.expected
        for sock in streams:
            sock.close()

    asyncio.run(asyncio.wait_for(unread(), 60))
    assert aborts() == 16 and sum("did not read its reply" in line for line in server.log) == 2
    server.wait_idle()


def test_replies_that_would_be_too_large_are_refused(scene: Scene) -> None:
    [answer] = scene.under(attack.reply_beyond_all_bounds)
    assert (answer.status, answer.code, answer.field) == (400, "reply_too_large", "sampling_params.logprobs")


@pytest.mark.slow
def test_all_logprobs_where_they_are_allowed() -> None:
    with attacked("--max-logprobs", "-1") as scene:
        [answer] = scene.under(attack.whole_vocabulary)
        assert answer.status == 200 and answer.size > 50e6


@pytest.mark.slow
def test_many_messages(scene: Scene) -> None:
    first, second, third = scene.under(attack.many_messages)
    assert (first.status, first.field) == (third.status, third.field) == (400, "messages")
    assert (second.status, second.code) == (413, "too_many_values")


@pytest.mark.slow
def test_many_ids(scene: Scene) -> None:
    answers = scene.under(attack.many_ids)
    assert [answer.status for answer in answers] == [400, 413, 400, 413, 200, 413]


@pytest.mark.slow
def test_values_that_decoding_would_multiply(scene: Scene) -> None:
    assert errors(scene.under(attack.nothing_but_lists)) == {(413, "too_many_values", None)}


def test_another_host_reaches_no_control(scene: Scene) -> None:
    assert errors(scene.under(attack.another_host)) == {(403, "host_not_allowed", None)}
    assert not scene.server.get("/is_sleeping").json()["is_sleeping"]


def test_odd_requests(scene: Scene) -> None:
    version, level, *names = scene.under(attack.odd_requests)
    assert (version.status, version.code) == (505, "http_version")
    assert (level.status, level.field) == (400, "level")
    assert errors(names) == {(400, None, "new_version")}


@pytest.mark.slow
def test_a_signal_ends_the_server_while_it_is_attacked() -> None:
    """Ten seconds are for the requests in flight, and a few for the rest."""
    with Server("demo", "--shutdown-timeout", "1") as server:
        body = {"prompt": "a", "stop": [f"stop {i}" for i in range(1024)], "n": 64, "max_tokens": 2000, "seed": 1}
        attack.leave(server.url, attack.COMPLETIONS, body | {"ignore_eos": True}, 3)
        attack.leave(server.url, attack.TOKENIZE, {"prompt": attack.words(1_000_000)}, 20)
        assert server.stop(seconds=30) == 0
