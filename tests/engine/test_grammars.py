"""The grammars of an engine: caching, sharing, remembered refusals and cancellation."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress

import pytest

from tests.engine.test_trials import BOMB, PATIENCE, children, until, words
from tokserve.base.errors import QueueFull, RequestError, Unavailable
from tokserve.checkpoint import DEMO_DIR
from tokserve.config import CacheConfig, Config, ModelConfig
from tokserve.features.grammar import grammars as module
from tokserve.features.grammar import trials as trials_module
from tokserve.features.grammar.grammar import Grammar
from tokserve.features.grammar.grammars import Grammars
from tokserve.protocol.params import StructuredOutputs

WIDTH, EOS = 300, 287
MIB = 1 << 20


def make_grammars(limit: int = 128 * MIB) -> Grammars:
    model, cache = ModelConfig(model=str(DEMO_DIR)), CacheConfig(grammar_cache_bytes=limit)
    return Grammars(Config(model=model, cache=cache), WIDTH, [EOS])


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    shared = make_grammars()
    yield shared
    shared.close()


@pytest.fixture
def small() -> Iterator[Grammars]:
    """Keeps 8 MiB."""
    pool = make_grammars(8 * MIB)
    yield pool
    pool.close()


def many(seed: int) -> StructuredOutputs:
    """A grammar of some MiB."""
    return StructuredOutputs(choice=words(seed))


def test_what_has_been_compiled_is_kept(grammars: Grammars) -> None:
    form = StructuredOutputs(regex="abc")
    first = grammars.compile(form).result(PATIENCE)
    again = grammars.compile(form)
    assert again.done() and again.result() is first


def test_requests_at_the_same_time_share_one_trial(grammars: Grammars) -> None:
    form = StructuredOutputs(regex="shared")
    futures = [grammars.compile(form, client) for client in "abc"]
    assert grammars.num_compiling == 1
    assert len({id(future.result(PATIENCE)) for future in futures}) == 1


def test_a_refusal_is_remembered_for_a_while(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = StructuredOutputs(regex="(")
    with pytest.raises(RequestError, match="unclosed group"):
        grammars.compile(wrong).result(PATIENCE)
    again = grammars.compile(wrong)
    assert again.done()
    with pytest.raises(RequestError, match="unclosed group") as caught:
        again.result()
    assert caught.value.field == "structured_outputs.regex"
    monkeypatch.setattr(module, "REFUSAL_SECONDS", -1.0)
    later = grammars.compile(wrong)
    assert not later.done()
    with pytest.raises(RequestError, match="unclosed group"):
        later.result(PATIENCE)


def test_the_memory_of_refusals_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSALS_KEPT", 3)
    for i in range(6):
        with pytest.raises(RequestError):
            grammars.compile(StructuredOutputs(regex="(" * (i + 1))).result(PATIENCE)
    assert len(grammars._refusals) == 3


def test_a_refusal_is_not_kept_with_what_its_traceback_names(grammars: Grammars) -> None:
    class Named:
        """A value in the frame that receives the refusal."""

    def ask() -> weakref.ref[Named]:
        named = Named()
        with suppress(RequestError):
            grammars.compile(StructuredOutputs(regex="[not closed")).result(PATIENCE)
        return weakref.ref(named)

    named = ask()
    until(lambda: not grammars._jobs)
    gc.collect()
    assert named() is None and grammars.compile(StructuredOutputs(regex="[not closed")).done()


def test_a_costly_grammar_is_refused_at_once_the_second_time(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials_module, "SECONDS", 0.5)
    with pytest.raises(RequestError, match="compiling it takes more than"):
        grammars.compile(StructuredOutputs(grammar=BOMB)).result(PATIENCE)
    assert grammars.compile(StructuredOutputs(grammar=BOMB)).done()


def test_compilations_without_waiting_requests_are_cancelled(grammars: Grammars) -> None:
    form = StructuredOutputs(grammar=BOMB + "\n// cancelled")
    one, other = grammars.compile(form), grammars.compile(form)
    until(lambda: children(grammars.trials))
    one.cancel()
    assert grammars.num_compiling == 1
    other.cancel()
    assert grammars.num_compiling == 0
    until(lambda: not children(grammars.trials))


def test_a_grammar_that_reached_a_limit_is_compiled_again(grammars: Grammars) -> None:
    form, other = StructuredOutputs(regex="ab+"), StructuredOutputs(regex="ab*")
    first, second = grammars.compile(form).result(PATIENCE), grammars.compile(other).result(PATIENCE)
    grammars.forget(first)
    assert grammars.compile(other).result(PATIENCE) is second
    assert grammars.compile(form).result(PATIENCE) is not first


@pytest.mark.slow
def test_the_least_recently_used_grammar_is_evicted(small: Grammars) -> None:
    first = small.compile(many(0)).result(PATIENCE)
    assert MIB < first.size < 8 * MIB
    tiny = StructuredOutputs(regex="tiny")
    small.compile(tiny).result(PATIENCE)
    for seed in range(1, 6):
        small.compile(many(seed)).result(PATIENCE)
        assert small.compile(tiny).done()  # and used
        assert small.num_bytes <= 8 * MIB
    assert not small.compile(many(0)).done()


def test_a_grammar_larger_than_the_cache_is_refused_by_name(small: Grammars) -> None:
    chance = random.Random(5)
    huge = StructuredOutputs(choice=["".join(chance.choice("abcde f") for _ in range(640)) for _ in range(100)])
    tight = make_grammars(64 << 10)
    try:
        with pytest.raises(RequestError, match="--grammar-cache-bytes") as caught:
            tight.compile(huge).result(PATIENCE)
        assert caught.value.field == "structured_outputs.choice"
    finally:
        tight.close()


@pytest.mark.slow
def test_grammars_in_use_are_bounded_too(small: Grammars) -> None:
    held: list[Grammar] = []
    refused: Future[Grammar] | None = None
    for seed in range(40):
        future = small.compile(many(seed))
        if future.exception(PATIENCE) is not None:
            refused = future
            break
        held.append(future.result())
    assert refused is not None and isinstance(refused.exception(), QueueFull)
    assert sum(grammar.size for grammar in held) <= (module.IN_USE + 1) * 8 * MIB
    held.clear()
    gc.collect()
    assert small.compile(many(99)).result(PATIENCE)


def test_an_unexpected_error_reaches_waiting_requests(small: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(outputs: StructuredOutputs) -> Grammar:
        raise MemoryError("none left")

    form = StructuredOutputs(regex="unforeseen")
    with monkeypatch.context() as patch:
        patch.setattr(small._compiler, "compile", fail)
        with pytest.raises(MemoryError):
            small.compile(form).result(PATIENCE)
    assert small.num_compiling == 0
    assert isinstance(small.compile(form).result(PATIENCE), Grammar), "it was not the grammar's fault"


def test_after_the_end_nothing_is_compiled() -> None:
    closed = make_grammars()
    closed.close()
    with pytest.raises(Unavailable):
        closed.compile(StructuredOutputs(regex="late")).result(PATIENCE)
