"""Requests that real clients sent (`tests/clients/run.py --record`): each is answered as it was then.

Clients read fields by name, so every path of the recorded reply must be there again, with its type.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.api import Api
from tests.conformance.shapes import lacking, reply_shape, shape

TOKENS_ONLY = ("/inference/", "/v1/models", "/health")
RECORDED = [
    pytest.param(json.loads(line), id=f"{path.stem}-{number}")
    for path in sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))
    for number, line in enumerate(path.read_text().splitlines())
]


def test_every_client_has_been_recorded() -> None:
    clients = {str(param.id).rpartition("-")[0] for param in RECORDED}
    assert clients == {"anthropic", "frameworks", "guidellm", "lm_eval", "openai", "renderers", "trl", "vllm_bench"}
    assert len(RECORDED) >= 40


@pytest.mark.some(35)
@pytest.mark.parametrize("seen", RECORDED)
def test_a_recorded_request_is_answered_as_it_was(api: Api, seen: dict[str, Any]) -> None:
    if api.tokens_only and not seen["path"].startswith(TOKENS_ONLY):
        pytest.skip("a tokens-only server")
    body, path = seen["body"], seen["path"].replace("/v1/models/demo", f"/v1/models/{api.model}")
    if body is not None and body.get("model") == "demo":
        body["model"] = api.model
    answer = api.http.request(seen["method"], path, json=body, headers=seen["headers"])
    assert answer.status_code == seen["status"], answer.text
    missing = lacking(seen["reply"], reply_shape(answer.headers["content-type"], answer.text))
    assert not missing, f"the reply lacks {missing}: {answer.text[:2000]}"


def test_shapes() -> None:
    old = shape({"a": [{"b": 1}, {"b": None, "5": True}], "token_id:7": "x"})
    assert old == {"": "object", "#": "str", "a": "list", "a[]": "object", "a[].#": "bool", "a[].b": "number"}
    assert lacking(old, shape({"a": [{"b": 2.5, "9": False, "c": 1}], "8": None})) == []
    assert lacking(old, shape({"a": [{"b": "2", "9": False}], "8": "y"})) == ["a[].b: number"]
    assert lacking(old, shape({"a": [], "8": "y"})) == ["a[]: object", "a[].#: bool", "a[].b: number"]
