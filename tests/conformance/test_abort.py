"""Aborting: by id, group or all; acknowledged after the fact; the waiting call returns what it has."""

from typing import Any

import httpx
import pytest

from tests.conformance.api import ABORTS, CHAT, GENERATE, PROMPT, Api, Long

STRICT = ABORTS[0]


@pytest.mark.parametrize("route", ABORTS)
@pytest.mark.parametrize("body", [{"all": False}, {"group_id": ""}, {"group_id": None}], ids=str)
def test_no_ids_are_refused(api: Api, route: str, body: Any) -> None:
    api.refused(api.post(route, body), 400, "request_ids")


@pytest.mark.parametrize("body", [{}, {"request_ids": None}], ids=str)
def test_the_strict_route_refuses_a_body_without_ids(api: Api, body: Any) -> None:
    api.refused(api.post(STRICT, body), 400, "request_ids")


def test_an_empty_list_aborts_nothing(api: Api) -> None:
    nothing = {"status": "aborted", "aborted": 0, "results": {}}
    with Long(api, "stays") as call:
        assert api.ok(STRICT, {"request_ids": []}) == nothing
        for route in ABORTS:
            for body in ({"request_ids": [], "all": False}, {"request_ids": [], "group_id": None}):
                assert api.ok(route, body) == nothing
            assert api.ok(route, {"request_ids": [], "group_id": "nobody"}) == nothing
        assert api.load()["running"] > 0
        assert api.ok(STRICT, {"request_ids": [], "all": True}) == nothing | {
            "aborted": 1,
            "results": {"stays": "aborted"},
        }
        assert call.reply()


@pytest.mark.parametrize("body", [{}, {"request_ids": None}, {"request_ids": []}], ids=str)
def test_the_bare_route_without_ids_aborts_all(api: Api, body: Any) -> None:
    with Long(api, "ends") as call:
        assert api.ok("/abort_requests", body)["results"]["ends"] == "aborted"
        assert call.reply()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"request_ids": "x"}, "request_ids"),
        ({"request_ids": ["x", 5]}, "request_ids[1]"),
        ({"all": 1}, "all"),
        ({"group_id": 5}, "group_id"),
        ({"request_ids": ["x"], "all": True}, "all"),
        ({"ids": ["x"]}, "ids"),
        ({"request_ids": ["x"], "group_id": "g"}, "group_id"),
    ],
    ids=str,
)
def test_a_bad_abort_is_refused_by_name(api: Api, body: Any, param: str) -> None:
    api.refused(api.post(ABORTS[0], body), 400, param)


@pytest.mark.parametrize("prefix", ["", "generate-tokens-", "chatcmpl-", "cmpl-"])
@pytest.mark.parametrize("route", ABORTS)
def test_abort_by_id_with_any_prefix(api: Api, route: str, prefix: str) -> None:
    with Long(api, "long", params={"logprobs": 0}) as call:
        answer = api.ok(route, {"request_ids": [prefix + "long", "nobody"]})
        assert answer == {
            "status": "aborted",
            "aborted": 1,
            "results": {prefix + "long": "aborted", "nobody": "not_found"},
        }
        assert api.load()["running"] == 0, "freed before the answer"
        for choice in call.reply()["choices"]:
            assert choice["finish_reason"] == "abort" and choice["stop_reason"] is None
            assert choice["stop_detail"] == {"kind": "abort_user"}
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) < api.max_model_len - len(PROMPT)


def test_what_came_before_an_abort_is_kept_and_exact(api: Api) -> None:
    with Long(api, "kept", n=1, params={"seed": 5}) as call:
        api.ok(ABORTS[0], {"request_ids": ["kept"]})
        ids = call.reply()["choices"][0]["token_ids"]
    expected = api.choice({"seed": 5, "ignore_eos": True, "max_tokens": len(ids) or 1})["token_ids"]
    assert ids == expected[: len(ids)]


def test_abort_by_group(api: Api) -> None:
    with Long(api, "g-1", group_id="team"), Long(api, "g-2", group_id="team"):
        assert api.ok(ABORTS[0], {"group_id": "nobody"}) == {"status": "aborted", "aborted": 0, "results": {}}
        answer = api.ok(ABORTS[0], {"group_id": "team"})
        assert answer == {"status": "aborted", "aborted": 2, "results": {"g-1": "aborted", "g-2": "aborted"}}


def test_abort_all(text: Api) -> None:
    with Long(text, "a-1") as first, Long(text, "a-2", CHAT) as second:
        answer = text.ok(ABORTS[0], {"all": True})
        assert answer == {"status": "aborted", "aborted": 2, "results": {"a-1": "aborted", "a-2": "aborted"}}
        assert {choice["finish_reason"] for choice in first.reply()["choices"]} == {"abort"}
        assert {choice["finish_reason"] for choice in second.reply()["choices"]} == {"abort"}


def test_an_abort_with_zero_tokens_is_a_200_with_empty_lists(api: Api) -> None:
    slots = api.config["scheduler"]["max_num_seqs"]
    if slots > 1000:
        pytest.skip("nothing would wait")
    with Long(api, "crowd", n=slots + 2, params={"logprobs": 0}) as call:
        api.ok(ABORTS[0], {"request_ids": ["crowd"]})
        for choice in call.reply()["choices"][slots:]:
            assert choice["token_ids"] == [] and choice["logprobs"] == {"content": []}
            assert choice["finish_reason"] == "abort"


def test_aborts_are_counted_in_the_metrics(api: Api) -> None:
    name = "request_success_total"
    before = api.metric(name)
    with Long(api, "counted", n=3) as call:
        api.ok(ABORTS[0], {"request_ids": ["counted"]})
        call.reply()
    assert api.metric(name) == before + 3


def test_an_aborted_stream_ends_as_streams_do(api: Api) -> None:
    params = {"ignore_eos": True, "max_tokens": None}
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": True, "request_id": "streaming"}
    with httpx.stream("POST", api.url + GENERATE, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert api.ok(ABORTS[0], {"request_ids": ["streaming"]})["aborted"] == 1
        rest = [line for line in lines if line]
    assert '"finish_reason":"abort"' in rest[-2] and '"abort_user"' in rest[-2] and rest[-1] == "data: [DONE]"


def test_a_finished_request_is_not_aborted(api: Api) -> None:
    api.generate(request_id="over")
    answer = api.ok(ABORTS[0], {"request_ids": ["over"]})
    assert answer["aborted"] == 0 and answer["results"]["over"] in ("finished", "not_found")


def test_odd_ids_are_not_found(api: Api) -> None:
    odd = ["", "#0", "over#0", "chatcmpl-", "\u00e9\u0000", "x" * 10_000]
    assert api.ok(ABORTS[0], {"request_ids": odd}) == {
        "status": "aborted",
        "aborted": 0,
        "results": dict.fromkeys(odd, "not_found"),
    }
