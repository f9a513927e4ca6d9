"""Earlier outputs are drafts only for their tenant: draft statistics reveal no other tenant's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.e2e.server import Served
from tests.threads import ServerThread
from tokserve.checkpoint import DEMO_DIR

PROMPT = [9, 4, 200, 31, 77, 120]  # nothing in it repeats


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b")):
        write_adapter(root / name, DEMO_DIR, seed=seed, gain=0.0)  # both change nothing, so outputs are the model's
    flags = ["--enable-lora", "--lora-modules", f"a={root / 'a'}", f"b={root / 'b'}", "--api-server-count", "2"]
    with ServerThread("demo", "--tokens-only", "--api-key", "one", "--api-key", "two", *flags) as running:
        yield running


def from_history(server: Served, *, client: str = "one", prompt: list[int] = PROMPT, **fields: Any) -> int:
    """Tokens of a request's output that were accepted from earlier outputs."""
    params = {"max_tokens": 40, "ignore_eos": True, "seed": 5, "temperature": 1.4, "logprobs": 0}
    body = {"token_ids": prompt, "sampling_params": params, "spec_decode_metrics": "summary"} | fields
    headers = {"Authorization": f"Bearer {client}"}
    reply = httpx.post(f"{server.url}/inference/v1/generate", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    report = reply.json()["metrics"]["speculative_decoding"]
    history = report["sources"].get("history", {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0})
    assert history["num_accepted_draft_tokens"] or not history["num_draft_tokens"], "not even tried"
    accepted: int = history["num_accepted_draft_tokens"]
    return accepted


OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"client": "one"}, {"client": "two"}),
    ({"cache_salt": "x"}, {"cache_salt": "y"}),
    ({"cache_salt": "z"}, {}),
    ({"model": "a"}, {"model": "b"}),
    ({"model": "a"}, {}),
    ({"draft_group": "g", "cache_salt": "x"}, {"draft_group": "g", "cache_salt": "y"}),
    ({"draft_group": "g", "model": "a"}, {"draft_group": "g"}),
    ({"draft_group": "g"}, {"draft_group": "h"}),
    ({"draft_group": "g"}, {}),
]


@pytest.mark.some(2)
@pytest.mark.parametrize(("owner", "other"), OTHERS, ids=str)
def test_outputs_are_drafts_only_for_their_tenant(
    server: Served, owner: dict[str, Any], other: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prompt = [*PROMPT, 40 + request.node.callspec.indices["owner"]]  # each case has a prompt and groups of its own
    owner, other = (
        {name: f"{value} {prompt[-1]}" if name == "draft_group" else value for name, value in fields.items()}
        for fields in (owner, other)
    )
    assert from_history(server, prompt=prompt, **owner) == 0
    assert from_history(server, prompt=prompt, **other) == 0
    assert from_history(server, prompt=prompt, **owner) > 20
    assert from_history(server, prompt=prompt, **other) > 20, "its own"


def test_a_corpus_drafts_for_its_salt_and_adapter_alone(server: Served) -> None:
    headers = {"Authorization": "Bearer one"}
    prompt, corpus = [*PROMPT, 90], {"draft_group": "c", "cache_salt": "s", "model": "a"}
    params = {"max_tokens": 40, "ignore_eos": True, "seed": 5, "temperature": 1.4}
    body = {"token_ids": prompt, "sampling_params": params, "speculate": False, "cache_salt": "elsewhere"}
    reply = httpx.post(f"{server.url}/inference/v1/generate", json=body, headers=headers, timeout=60).json()
    output = reply["choices"][0]["token_ids"]
    added = corpus | {"token_ids": [output]}
    response = httpx.post(f"{server.url}/add_draft_corpus", json=added, headers=headers, timeout=60)
    assert response.json() == {"outputs": 1}, response.text
    for wrong in ({"cache_salt": "t"}, {"model": "b"}, {"draft_group": "d"}):
        assert from_history(server, prompt=prompt, **(corpus | wrong)) == 0
    assert from_history(server, prompt=prompt, **corpus) > 20
