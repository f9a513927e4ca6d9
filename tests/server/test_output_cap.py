"""`max_new_tokens` of the operator: a default and a cap of every route's outputs, as in vLLM (peer suites A16)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.scripted_llm import says
from tests.server.site import Site, site

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "x"}]
MESSAGE: dict[str, Any] = {"messages": TALK}


def limit(server: Site, route: str, body: dict[str, Any]) -> int | None:
    """The most output tokens of the request that the engine gets for this body."""
    response = server.post(route, body)
    assert response.status_code == 200, response.text
    return server.llm.calls[-1].params.max_tokens


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (GENERATE, {"token_ids": [5]}, "sampling_params.max_tokens"),
        (CHAT, MESSAGE, "max_completion_tokens"),
        (CHAT, MESSAGE, "max_tokens"),
        (COMPLETIONS, {"prompt": "x"}, "max_tokens"),
        (RESPONSES, {"input": "x"}, "max_output_tokens"),
        (MESSAGES, {**MESSAGE, "model": "demo", "max_tokens": 7}, "max_tokens"),
    ],
)
def test_no_request_has_more_output_tokens_than_the_operator_allows(
    route: str, body: dict[str, Any], field: str
) -> None:
    server = site(says("ok"), override_generation_config={"max_new_tokens": 5})
    outer, _, inner = field.rpartition(".")

    def with_limit(value: int | None) -> dict[str, Any]:
        fields: dict[str, Any] = {inner: value}
        return body | ({outer: fields} if outer else fields)

    assert limit(server, route, body) == 5
    assert limit(server, route, with_limit(3)) == 3 and limit(server, route, with_limit(50)) == 5
    if route != MESSAGES:
        assert limit(server, route, with_limit(None)) == 5


def test_a_recommended_length_is_a_default_only(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 9}')
    server = site(says("ok"), generation_config=str(tmp_path))
    assert limit(server, CHAT, MESSAGE) == 9
    assert limit(server, COMPLETIONS, {"prompt": "x", "max_tokens": None}) == 9
