"""Random requests over HTTP to a server that speculates and to one that does not: every reply is equal.

The one that speculates has several API processes or engines, gets drafts of all kinds, and its weights are replaced by
the same ones, with recomputed keys and values, while it generates.  Images, mixtures with routed experts, adapters,
sampling masks and several choices come at random.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.adapters import write_adapter
from tests.chaos.crossings import ADAPTERS, GENERATE, VOCAB, request
from tests.e2e.server import Server
from tests.e2e.test_speculation import comparable
from tests.models.pictures import png, write_served
from tests.runner.test_speculation import drafts_for
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PAD, START, END = 288, 290, 291  # of an image in the prompt
TOGETHER = 12  # requests in flight
TOO_SLOW = "compiling it takes more than"  # what is said of a grammar then
KINDS: dict[str, list[str]] = {
    "text": ["--api-server-count", "2"],
    "text-engines": ["--data-parallel-size", "2"],
    "mixture": ["--enable-return-routed-experts"],
    "images": ["--spec-method", "self-int8"],
}


class Pair:
    """The same model served without drafts and with them."""

    def __init__(self, kind: str, model: Path, plain: Server, drafting: Server) -> None:
        self.kind, self.model, self.plain, self.drafting = kind, model, plain, drafting


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, root = request.param, tmp_path_factory.mktemp("pair")
    common = ["--max-model-len", "512", "--dtype", "bfloat16", "--cpu-arithmetic", "fma"]
    model = DEMO_DIR
    if kind == "mixture":
        shape = tiny_config("qwen3_moe", dtype="bfloat16") | {"vocab_size": VOCAB}
        model = write_checkpoint(root / "model", shape, seed=1)
        common += ["--tokens-only", "--enable-return-routed-experts"]
    elif kind == "images":
        model = write_served(root / "model")
    else:
        common += ["--enable-lora", "--lora-modules"]
        common += [f"{name}={write_adapter(root / name, DEMO_DIR, seed=seed)}" for seed, name in enumerate(ADAPTERS)]
    with (
        Server(str(model), "--spec-method", "none", *common) as plain,
        Server(str(model), *KINDS[kind], *common) as drafting,
    ):
        yield Pair(kind, model, plain, drafting)


def bodies(pair: Pair, rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests; some come again, with the same seed or another."""
    drawn: list[dict[str, Any]] = []
    for _ in range(count):
        if drawn and rng.random() < 0.35:
            again = rng.choice(drawn)
            drawn.append(again | {"sampling_params": again["sampling_params"] | {"seed": rng.randrange(99)}})
            continue
        body = request(rng)
        params = body["sampling_params"]
        if not pair.kind.startswith("text"):
            body.pop("model", None)
        if pair.kind == "mixture":
            params = {name: value for name, value in params.items() if name not in TEXT_PARAMETERS}
        if pair.kind == "images" and rng.random() < 0.7:
            url = f"data:image/png;base64,{base64.b64encode(png(40, 32, seed=rng.randrange(3))).decode()}"
            body["content_parts"] = [{"type": "image_url", "image_url": {"url": url}}]
            body["token_ids"] = [START, PAD, END, *body["token_ids"][:100]]
        if rng.random() < 0.3:
            params["return_sampling_mask"] = True
        body["sampling_params"] = params | {"n": rng.choice([1, 1, 1, 3])}
        drawn.append(body | {"cache_salt": rng.choice([None, None, "s"]), "logprobs_format": "arrays"})
    return drawn


TEXT_PARAMETERS = (
    "stop",
    "bad_words",
    "structured_outputs",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


async def replies(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(TOGETHER)
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=TOGETHER)) as client:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                answer = await client.post(server.url + GENERATE, json=body)
            reply: dict[str, Any] = answer.json()
            return comparable(reply) if answer.status_code == 200 else reply["error"]

        return await asyncio.gather(*map(ask, requests))


async def replies_while_weights_are_replaced(pair: Pair, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send the requests while the weights are replaced by the same weights under the same version."""
    tensors = load_file(pair.model / "model.safetensors")
    generating = asyncio.create_task(replies(pair.drafting, requests))
    async with TokserveClient(pair.drafting.url) as client:
        while not generating.done():
            await client.update_weights(tensors, version="0", recompute_kv=True)
            await asyncio.wait([generating], timeout=1.0)
    return generating.result()


def with_drafts(body: dict[str, Any], reply: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    if "choices" not in reply or rng.random() < 0.4:
        return body
    output = reply["choices"][0]["token_ids"]
    drafts = [token % VOCAB for token in drafts_for(output, rng)][:500]
    return body | {"draft_token_ids": drafts, "draft_group": rng.choice([None, "g"])}


@pytest.mark.parametrize("seed", range(4))
def test_every_reply_is_equal(pair: Pair, seed: int) -> None:
    rng = random.Random(f"{pair.kind} {seed}")
    requests = bodies(pair, rng, 150)
    expected = asyncio.run(replies(pair.plain, requests))
    assert sum("choices" in reply for reply in expected) > 100
    drafted = [with_drafts(body, reply, rng) for body, reply in zip(requests, expected, strict=True)]
    accepted = pair.drafting.metric("tokserve:spec_decode_num_accepted_tokens_total")
    if seed % 2:
        actual = asyncio.run(replies_while_weights_are_replaced(pair, drafted))
    else:
        actual = asyncio.run(replies(pair.drafting, drafted))
    for body, one, other in zip(drafted, actual, expected, strict=True):
        late = any(TOO_SLOW in reply.get("message", "") for reply in (one, other))  # on a machine that others use
        assert late or one == other, body
    assert pair.drafting.metric("tokserve:spec_decode_num_accepted_tokens_total") > accepted + 100
