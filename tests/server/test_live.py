"""GET /inference/v1/requests."""

import pytest

from tests.server.fake_llm import site


def test_it_is_the_engines_answer() -> None:
    s = site()
    s.llm.answers["requests"] = answer = {"weight_version": "7", "total": 1, "requests": [{"request_id": "a"}]}
    assert s.get("/inference/v1/requests").json() == answer
    assert s.get("/inference/v1/requests?limit=7").json() == answer
    assert s.llm.asked == [("requests", {"limit": 100}), ("requests", {"limit": 7})]


@pytest.mark.parametrize("limit", ["", "-1", "x", "1.5", "10001", "1" * 30, "²"])
def test_limits(limit: str) -> None:
    answer = site().get("/inference/v1/requests", params={"limit": limit})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"


def test_a_dead_engine_has_none() -> None:
    s = site()
    s.llm.die()
    assert s.get("/inference/v1/requests").status_code == 503
