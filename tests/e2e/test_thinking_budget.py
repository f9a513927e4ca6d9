"""A budget of reasoning on a real server: where thoughts end, and the same tokens with drafts and in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Served
from tests.replies import good
from tests.server.site import parse_events
from tests.text.tool_templates import THINKER
from tests.threads import ServerThread

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
OPENED = THINKER + "{% if add_generation_prompt %}<think>\n{% endif %}"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 47 + 38?"}],
    "max_tokens": 60,
    "temperature": 1.0,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": True,
}
BUDGETS = (0, 1, 5, 17)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "thinker.jinja"
    Path(template).write_text(OPENED)
    with ServerThread("demo", "--chat-template", str(template), "--reasoning-parser", "qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def closes(server: Served) -> list[int]:
    """The ids of the marker that ends a thought; the demo's tokenizer has several for it."""
    ids: list[int] = good(server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}))["tokens"]
    assert len(ids) > 1
    return ids


def ask(server: Served, seed: int, **fields: Any) -> dict[str, Any]:
    reply = good(server.post(CHAT, ASK | {"seed": seed} | fields))
    choice: dict[str, Any] = reply["choices"][0]
    return choice | {"reasoning_tokens": reply["usage"]["completion_tokens_details"]["reasoning_tokens"]}


def begins_at(ids: list[int], marker: list[int]) -> int:
    """Where the marker is."""
    return next(at for at in range(len(ids)) if ids[at : at + len(marker)] == marker)


@pytest.mark.some(2)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_thought_ends_at_its_budget_and_is_as_it_was_before(server: Served, closes: list[int], budget: int) -> None:
    for seed in range(3):
        free = ask(server, seed)["token_ids"]
        choice = ask(server, seed, thinking_token_budget=budget)
        ids = choice["token_ids"]
        end = begins_at(ids, closes)
        assert end <= budget and ids[:end] == free[:end]
        assert len(ids) == ASK["max_tokens"] and choice["message"]["content"]
        assert choice["reasoning_tokens"] == (end + len(closes) if choice["message"]["reasoning"] else 0)
        certain = [entry["logprob"] for entry in choice["logprobs"]["content"][end : end + len(closes)]]
        assert len(certain) == len(closes)  # of the model's own distribution: what was forced shows there


def test_a_budget_that_is_not_used_up_changes_nothing(server: Served) -> None:
    for seed in range(3):
        assert ask(server, seed) == ask(server, seed, thinking_token_budget=1000)


@pytest.mark.some(2)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_same_tokens_with_drafts_right_and_wrong(server: Served, budget: int) -> None:
    prompt = good(server.post(CHAT + "/render", ASK | {"thinking_token_budget": budget}))
    assert prompt["sampling_params"]["thinking_markers"]["inside"] is True
    params = prompt["sampling_params"] | {"seed": 5, "temperature": 0.9, "logprobs": 2}
    body = {"token_ids": prompt["token_ids"], "sampling_params": params}
    alone = good(server.post(GENERATE, body | {"speculate": False}))["choices"][0]
    free = {name: value for name, value in params.items() if name != "thinking_token_budget"}
    unlimited = good(server.post(GENERATE, body | {"sampling_params": free}))["choices"][0]
    for drafts in (alone["token_ids"], unlimited["token_ids"], alone["token_ids"][:9] + [7] * 30):
        drafted = good(server.post(GENERATE, body | {"draft_token_ids": drafts}))["choices"][0]
        assert (drafted["token_ids"], drafted["logprobs"]) == (alone["token_ids"], alone["logprobs"])


@pytest.mark.slow
def test_the_same_tokens_streamed_and_in_a_batch(server: Served) -> None:
    alone = {budget: ask(server, 9, thinking_token_budget=budget) for budget in BUDGETS}
    with ThreadPoolExecutor(8) as pool:
        together = [(b, pool.submit(ask, server, 9, thinking_token_budget=b)) for b in (*BUDGETS, *BUDGETS)]
        assert all(reply.result() == alone[budget] for budget, reply in together)
    for budget in BUDGETS:
        body = ASK | {"seed": 9, "thinking_token_budget": budget, "stream": True}
        parts = [event["choices"][0] for event in parse_events(server.post(CHAT, body).text)]
        assert [token for part in parts for token in part.get("token_ids", [])] == alone[budget]["token_ids"]


def test_a_forced_form_follows_the_thought(server: Served, closes: list[int]) -> None:
    choice = ask(server, 1, thinking_token_budget=4, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    assert begins_at(choice["token_ids"], closes) <= 4
    assert choice["message"]["content"] in ("yes", "no") and choice["finish_reason"] == "stop"
