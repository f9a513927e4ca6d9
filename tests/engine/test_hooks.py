"""Hooks are collected from the features that define them; an engine without features serves plain requests."""

from __future__ import annotations

import pytest

from tests.engine.harness import Engine
from tokserve.engine import features
from tokserve.engine.hooks import EngineFeature, Hooks
from tokserve.engine.request import Request
from tokserve.protocol.messages import Submit, SubmitReply


class Refusing(EngineFeature):
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def refuse(self, submit: Submit) -> SubmitReply | None:
        return SubmitReply(submit.call_id, "invalid", self.reason)


class Late(Refusing):
    def may_enter(self, request: Request) -> bool:
        return False


def test_only_hooks_that_a_feature_defines_are_collected_in_order() -> None:
    one, two = Refusing("one"), Late("two")
    hooks = Hooks((one, two))
    assert hooks.refuse == (one.refuse, two.refuse)
    assert hooks.may_enter == (two.may_enter,)
    assert hooks.plan == hooks.poll == hooks.status == ()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_without_features_serves_plain_requests(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "contributions", lambda kind: iter(()))
    engine = Engine(depth=depth)
    assert engine.core.features == ()
    for number in range(5):
        engine.add(f"r{number}", [3, 4, number], max_tokens=9, ignore_eos=True, logprobs=1)
    named = engine.make("named", [3, 4], adapter="a", max_tokens=2)
    assert engine.submit("named", named) == SubmitReply(7, "invalid", "this server serves no adapters")
    engine.run()
    for number in range(5):
        engine.check_complete(f"r{number}")
    engine.check_empty()
