"""The text drafter: which outputs are drafts of which requests, predictions of several choices, and the commands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.engine.harness import Engine
from tests.engine.solo import VOCAB
from tokserve.config import SpeculationPlan
from tokserve.features.speculation.drafter import TextDrafter
from tokserve.protocol.messages import Submit
from tokserve.protocol.prompt import pack_ids

PROMPT = [3, 4, 5, 6, 7]
RUN: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


def drafting(**options: Any) -> tuple[Engine, TextDrafter]:
    engine = Engine(**options)
    drafter = engine.draft_with(TextDrafter(SpeculationPlan("suffix", 16, 1 << 20), VOCAB))
    return engine, drafter


def accepted(engine: Engine, rid: str, **fields: Any) -> int:
    """The number of drafts accepted for one request, whose output is that of the request alone."""
    before = sum(engine.stats.rooms["accepted_by_position"])
    client = fields.pop("client", "")
    engine.add(rid, PROMPT, client=client, **(RUN | {"seed": 5} | fields))
    engine.run()
    engine.check_complete(rid)
    engine.check_empty()
    return sum(engine.stats.rooms["accepted_by_position"]) - before


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_is_drafted_from_the_last_output_of_its_seed(depth: int) -> None:
    engine, _ = drafting(depth=depth)
    accepted(engine, "a", client="c")
    steps = engine.stats.steps
    assert accepted(engine, "b", client="c") >= 18
    assert engine.stats.steps - steps <= (4 if depth == 1 else 8)


def test_tenants_do_not_draft_for_each_other() -> None:
    engine, _ = drafting()
    accepted(engine, "a", client="c", cache_salt="s")
    variants: list[dict[str, Any]] = [
        {"client": "d", "cache_salt": "s"},
        {"client": "c"},
        {"client": "c", "cache_salt": "t"},
        {"client": "c", "cache_salt": "s", "draft_group": "g"},
        {"client": "c", "cache_salt": "s", "speculate": False},
    ]
    for number, fields in enumerate(variants):
        assert accepted(engine, f"b{number}", **fields) < 12, fields
    assert accepted(engine, "c", client="c", cache_salt="s") >= 18


def test_a_named_group_is_shared_by_clients_and_prompts() -> None:
    engine, _ = drafting()
    accepted(engine, "a", client="c", draft_group="g")
    assert accepted(engine, "b", client="d", draft_group="g") >= 18


def test_an_output_without_speculation_is_not_kept() -> None:
    engine, drafter = drafting()
    accepted(engine, "a", speculate=False)
    assert len(drafter.history) == 0


def test_choices_share_a_prediction() -> None:
    engine, drafter = drafting()
    requests = [
        msgspec.structs.replace(engine.make(f"k#{i}", PROMPT, seed=i, **RUN), drafts=pack_ids([3] * 50))
        for i in range(3)
    ]
    engine.core.receive(b"A", Submit(7, "k", requests))
    predictions = {id(drafter._predictions[request]) for request in engine.core.intake.live}
    assert len(predictions) == 1
    engine.run()
    for i in range(3):
        engine.check_complete(f"k#{i}")


def test_the_commands_of_a_corpus() -> None:
    engine, drafter = drafting()
    assert drafter.add_corpus("g", [pack_ids([3, 4, 5, 6]), pack_ids([7] * 9)]) == {"outputs": 2}
    assert drafter.remove_corpus("h") == {"removed": 0}
    assert drafter.remove_corpus("g") == {"removed": 2}
    engine.call("reset_prefix_cache", reset_external=True)
    assert engine.replies[-1].result is True
