"""Hooks are collected from the features that define them; an engine without features serves plain requests."""

from __future__ import annotations

import pytest

from tests.engine.harness import Engine
from tokserve.engine import features
from tokserve.engine.hooks import EngineFeature, Hooks
from tokserve.engine.request import Gate, Request
from tokserve.protocol.messages import EngineRequest, Submit, SubmitReply


class Refusing(EngineFeature):
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def refuse(self, submit: Submit) -> SubmitReply | None:
        return SubmitReply(submit.call_id, "invalid", self.reason)


class Late(Refusing):
    def kept_for(self, request: Request) -> str | None:
        return "the test"


def test_only_hooks_that_a_feature_defines_are_collected_in_order() -> None:
    one, two = Refusing("one"), Late("two")
    hooks = Hooks((one, two))
    assert hooks.refuse == (one.refuse, two.refuse)
    assert hooks.kept_for == (two.kept_for,)
    assert hooks.plan == hooks.poll == hooks.status == ()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_without_features_serves_plain_requests(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "contributions", lambda kind: iter(()))
    engine = Engine(depth=depth)
    assert engine.core.features == ()
    for number in range(5):
        engine.add(f"r{number}", [3, 4, number], max_tokens=9, ignore_eos=True, logprobs=1)
    named = engine.make("named", [3, 4], adapter="a", max_tokens=2)
    assert engine.submit("named", named) == SubmitReply(7, "invalid", "this server serves no adapters", field="model")
    engine.run()
    for number in range(5):
        engine.check_complete(f"r{number}")
    engine.check_empty()


class Counting(EngineFeature):
    """Has attached itself to these requests and not heard of their end."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.tokens: list[int] = []
        self.is_open = True

    def attach(self, request: Request, spec: EngineRequest) -> None:
        self.requests.append(request.request_id)
        request.listeners += (self.tokens.append,)
        request.gates += (Gate("test", lambda: self.is_open),)

    def on_end(self, request: Request) -> None:
        self.requests.remove(request.request_id)


def counting() -> tuple[Engine, Counting]:
    engine, feature = Engine(), Counting()
    engine.core._hooks.collect((*engine.core.features, feature))
    return engine, feature


def test_features_hear_of_the_end_of_requests_that_are_refused_after_others_were_made() -> None:
    engine, feature = counting()
    requests = [engine.make("r#0", [3, 4], max_tokens=2), engine.make("r#1", [3, 4] * 40, max_tokens=2)]
    assert engine.submit("r", *requests).refusal == "invalid"
    assert feature.requests == []
    engine.check_empty()


def test_a_gate_holds_a_request_and_a_listener_hears_its_tokens() -> None:
    engine, feature = counting()
    engine.add("r", [3, 4], max_tokens=6, ignore_eos=True)
    engine.steps(3)
    feature.is_open = False
    engine.steps(3)
    held = list(feature.tokens)
    assert len(held) < 6 and not engine.core.scheduler.in_flight
    feature.is_open = True
    engine.run()
    assert feature.tokens == engine.tokens("r") and feature.requests == []
    engine.check_complete("r")
