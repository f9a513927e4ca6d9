"""`model` names an adapter on every route; /v1/models lists it; who asks for an unknown one gets a 404."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.site import Site, site
from tokserve.base.errors import refused
from tokserve.protocol.messages import LoadedAdapter, Status

LOADED = Status(adapters=[LoadedAdapter("sql", "/adapters/sql", 3), LoadedAdapter("tone", "/adapters/tone", 1)])
ROUTES: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/chat/completions/tokens": {"tokens": [5, 6], "max_tokens": 2},
}


def with_adapters(**options: Any) -> Site:
    running = site(enable_lora=True, max_loras=4, **options)
    for name in ("tone", "sql"):
        running.llm.load_adapter(name, f"/adapters/{name}")
    return running


@pytest.mark.parametrize("route", ROUTES)
def test_an_adapter_is_a_model_on_every_route(route: str) -> None:
    s = with_adapters(served_model_name=["base", "alias"])
    for model, adapter, shown in (("sql", "sql", "sql"), ("tone", "tone", "tone"), ("alias", "", "base")):
        answer = s.post(route, ROUTES[route] | {"model": model})
        assert answer.status_code == 200, answer.text
        assert s.llm.calls[-1].options["adapter"] == adapter and answer.json()["model"] == shown
    assert s.post(route, ROUTES[route]).json()["model"] == "base"
    assert s.llm.calls[-1].options["adapter"] == "" and s.llm.num_refreshes == 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_carries_the_adapters_name(route: str) -> None:
    s = with_adapters()
    text = s.post(route, ROUTES[route] | {"model": "sql", "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert events[0]["model"] == "sql" and {event.get("model", "sql") for event in events} == {"sql"}


@pytest.mark.parametrize("route", [*ROUTES, "/tokenize"])
def test_an_unknown_adapter_is_asked_of_the_engine_and_then_a_404(route: str) -> None:
    body = ROUTES.get(route, {"prompt": "a"})
    s = with_adapters()
    answer = s.post(route, body | {"model": "late"})
    assert answer.status_code == 404 and s.llm.num_refreshes == 1
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "sql" in error["message"] and "tone" in error["message"]
    s.llm.link.call_elsewhere("load_lora_adapter", lora_name="late", lora_path="/l")  # by another front end
    assert s.post(route, body | {"model": "late"}).status_code == 200


def test_a_server_without_adapters_sends_the_engine_nothing() -> None:
    s = site()
    assert s.post("/inference/v1/generate", ROUTES["/inference/v1/generate"] | {"model": "sql"}).status_code == 404
    assert s.llm.num_refreshes == 0


def test_an_adapter_that_goes_before_its_request_comes_is_a_404() -> None:
    s = with_adapters()
    s.llm.refuse = refused("model_not_found", "no adapter 'sql' is loaded")
    answer = s.post("/inference/v1/generate", ROUTES["/inference/v1/generate"] | {"model": "sql"})
    assert answer.status_code == 404
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("model_not_found", "model")


def test_models_lists_adapters_with_their_parent() -> None:
    s = with_adapters(served_model_name=["base"])
    actual = {model["id"]: model for model in s.get("/v1/models").json()["data"]}
    assert list(actual) == ["base", "sql", "tone"]
    assert (actual["base"]["parent"], actual["base"]["root"]) == (None, "demo")
    assert (actual["sql"]["parent"], actual["sql"]["root"]) == ("base", "/adapters/sql")
    assert s.get("/v1/models/sql").json() == actual["sql"]
    assert s.get("/v1/models/none").status_code == 404
    assert s.get("/server_info").json()["adapters"] == {"sql": 2, "tone": 1}


def test_load_and_unload_answer_and_name_what_is_wrong() -> None:
    s = with_adapters()
    answer = s.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/p"})
    assert answer.json() == {
        "success": True,
        "message": "Success: LoRA adapter 'a' loaded",
        "lora_name": "a",
        "lora_path": "/p",
        "generation": 3,
    }
    assert s.post("/v1/unload_lora_adapter", {"lora_name": "a"}).json()["success"] is True
    for body, field in (
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "p"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "p", "rank": 4}, "rank"),
    ):
        answer = s.post("/load_lora_adapter", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    answer = s.post("/unload_lora_adapter", {"lora_name": "b"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "lora_name"


def test_the_description_does_not_fix_the_names_where_adapters_come_and_go() -> None:
    for running, fixed in ((with_adapters(), False), (site(), True)):
        schemas = running.get("/openapi.json").json()["components"]["schemas"]
        for kind in ("GenerateBody", "ChatBody", "CompletionBody"):
            assert ("enum" in schemas[kind]["properties"]["model"]) is fixed


def test_an_adapter_under_the_models_name_stands_before_the_model() -> None:
    """rl-faults E1."""
    s = site(enable_lora=True, served_model_name=["tiny", "alias"])
    s.llm.load_adapter("tiny", "/policy")

    def adapters_of(*names: str | None) -> list[Any]:
        for name in names:
            sent = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}} | (
                {} if name is None else {"model": name}
            )
            assert s.post("/inference/v1/generate", sent).status_code == 200
        return [call.options.get("adapter") for call in s.llm.calls[-len(names) :]]

    assert adapters_of("tiny", None, "alias") == ["tiny", "tiny", ""]
    cards = s.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "alias"]
    assert cards[0]["root"] == "/policy" and cards[0]["parent"] and not cards[1].get("parent")
    s.llm.link.call_elsewhere("unload_lora_adapter", lora_name="tiny")
    s.llm.link.deliver()
    assert adapters_of("tiny", None) == ["", ""]
