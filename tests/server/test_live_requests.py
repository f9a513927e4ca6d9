"""GET /inference/v1/requests."""

import pytest

from tests.engine.harness import Engine
from tests.server.site import command_site


def test_the_route_returns_the_engines_list() -> None:
    s = command_site()
    engine = Engine()
    engine.add("a", [3, 4, 5], max_tokens=9, group_id="g")
    engine.call("requests", limit=100)
    s.llm.answers["requests"] = answer = engine.replies[-1].result
    assert [row["request_id"] for row in answer["requests"]] == ["a"]
    assert s.get("/inference/v1/requests").json() == answer
    assert s.get("/inference/v1/requests?limit=7").json() == answer
    assert s.llm.commands == [("requests", {"limit": 100}), ("requests", {"limit": 7})]


@pytest.mark.parametrize("limit", ["", "-1", "x", "1.5", "10001", "1" * 30, "²"])
def test_a_limit_out_of_range_is_refused(limit: str) -> None:
    answer = command_site().get("/inference/v1/requests", params={"limit": limit})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"


def test_a_dead_engine_has_none() -> None:
    s = command_site()
    s.llm.die()
    assert s.get("/inference/v1/requests").status_code == 503
