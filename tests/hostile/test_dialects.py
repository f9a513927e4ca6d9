"""Attacks on the routes of other dialects, and on drafts, masks and tools: served or refused, and others are served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.hostile import dialect_attacks as dialects
from tests.hostile.attack import Answer, Scene

pytestmark = pytest.mark.slow
REFUSED = {400, 413}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Server("demo", "--sglang-api") as server:
        running = Scene(server)
        yield running
        running.metronome.end()


def statuses(answers: list[Answer]) -> list[int]:
    return [answer.status for answer in answers]


def test_blocks(scene: Scene) -> None:
    assert set(statuses(scene.under(dialects.many_blocks))) == {400}


def test_tools(scene: Scene) -> None:
    assert set(statuses(scene.under(dialects.many_tools))) == {400}
    assert set(statuses(scene.under(dialects.recursive_tools))) <= {200, 400}


def test_nesting(scene: Scene) -> None:
    answers = scene.under(dialects.nested_bodies)
    assert set(statuses(answers)) == {200, *REFUSED}
    assert set(statuses(answers[3::4])) == {413}, "a million levels are too many values"


def test_prompts(scene: Scene) -> None:
    answers = scene.under(dialects.many_prompts)
    assert statuses(answers) == [400, 400, 200, 200]
    assert [answer.field for answer in answers[:2]] == ["text", "input_ids"]


def test_grammars_of_sglang(scene: Scene) -> None:
    answers = scene.under(dialects.sglang_grammars)
    assert set(statuses(answers)) == {400}
    assert {answer.field for answer in answers} <= {
        "sampling_params.regex",
        "sampling_params.ebnf",
        "sampling_params.json_schema",
    }


def test_drafts(scene: Scene) -> None:
    answers = scene.under(dialects.draft_corpora)
    assert statuses(answers) == [200] * 31 + [400] + [200] * 4
    assert answers[31].field == "token_ids"
    answers = scene.under(dialects.large_predictions)
    assert statuses(answers) == [400, 400, 400, 400, 200, 200, 400, 200]
    fields = {answer.field for answer in answers if answer.status == 400}
    assert fields == {"prediction", "prediction.content", "draft_token_ids"}


def test_masks(scene: Scene) -> None:
    too_large, served, of_sglang = scene.under(dialects.large_masks)
    assert (too_large.status, too_large.code) == (400, "reply_too_large")
    assert (of_sglang.status, of_sglang.code) == (400, None), "the code of SGLang's errors is their status"
    assert served.status == 200 and served.size > 1e6


def test_many_choices_of_disconnected_clients(scene: Scene) -> None:
    assert not scene.under(dialects.many_choices_left)
