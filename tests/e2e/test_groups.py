"""Groups over HTTP: requests that share prompts, whole or in part, reply as each of them does alone.  Only `==`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.adapters import write_adapter
from tests.chaos.crossings import ADAPTERS, FORMS, GENERATE, VOCAB
from tests.e2e.server import Served
from tests.replies import good
from tests.runner.test_speculation import drafts_for
from tests.threads import ServerThread
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient

CONTEXT = 512
TOGETHER = 24  # requests in flight
Body = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model with two adapters, and with pages for four contexts: prefixes are evicted, requests preempted."""
    root = tmp_path_factory.mktemp("adapters")
    modules = [f"{name}={write_adapter(root / name, DEMO_DIR, seed=seed)}" for seed, name in enumerate(ADAPTERS)]
    options = ["--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "2M", "--max-num-seqs", str(TOGETHER)]
    with ServerThread("demo", *options, "--enable-lora", "--lora-modules", *modules) as running:
        yield running


def token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 285) for _ in range(count)]


Outcome = tuple[Any, list[Body]]


def outcome(reply: Body) -> Outcome:
    """Logprobs of the prompt, and the choices."""
    return reply["prompt_logprobs"], [choice | {"index": 0} for choice in reply["choices"]]


def alone(server: Served, bodies: Sequence[Body]) -> list[Outcome]:
    """Each choice by itself, one after the other, none of which finds another's pages."""
    outcomes = []
    salts = (f"alone {random.getrandbits(64)}" for _ in iter(int, 1))
    with httpx.Client(base_url=server.url, timeout=300, verify=False) as client:
        for body in bodies:
            params = body["sampling_params"]
            seeds = range(params["seed"], params["seed"] + params.get("n", 1))
            requests = [body | {"sampling_params": params | {"n": 1, "seed": seed}} for seed in seeds]
            replies = [good(client.post(GENERATE, json=one | {"cache_salt": next(salts)})) for one in requests]
            choices = [choice for reply in replies for choice in outcome(reply)[1]]
            outcomes.append((replies[0]["prompt_logprobs"], choices))
    return outcomes


async def ask_all(server: Served, bodies: Sequence[Body]) -> list[Outcome]:
    gate = asyncio.Semaphore(TOGETHER)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=False) as client:

        async def ask(body: Body) -> Outcome:
            async with gate:
                return outcome(good(await client.post(GENERATE, json=body)))

        return await asyncio.gather(*map(ask, bodies))


async def ask_during_updates(server: Served, bodies: Sequence[Body]) -> list[Outcome]:
    """The same, while the weights are replaced by the same ones, and keys and values are computed again."""
    tensors = load_file(DEMO_DIR / "model.safetensors")
    asking = asyncio.create_task(ask_all(server, bodies))
    async with TokserveClient(server.url) as client:
        while not asking.done():
            await client.update_weights(tensors, version="0", recompute_kv=True)
            await asyncio.wait([asking], timeout=0.2)
    return asking.result()


def with_drafts(body: Body, expected: Outcome, rng: random.Random) -> Body:
    """The request with drafts, some of which are right."""
    drafts = [token % VOCAB for token in drafts_for(expected[1][0]["token_ids"], rng)]
    return body | {"draft_token_ids": drafts}


def test_choices_of_one_prompt(server: Served) -> None:
    prompt = token_ids(random.Random(1), 200 + 7)
    params = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    bodies = [{"token_ids": prompt, "sampling_params": params | {"n": 16, "seed": 5}}]
    shared = server.metric("tokserve:shared_attention_keys_total")
    [(_, choices)] = asyncio.run(ask_all(server, bodies))
    assert server.metric("tokserve:shared_attention_keys_total") > shared
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 16
    assert alone(server, bodies) == [(None, choices)]


@pytest.mark.slow
def test_one_system_prompt_with_adapters_masks_and_grammars(server: Served) -> None:
    """What differs within a run of shared pages: the adapter has keys of its own, the rest shares them."""
    rng = random.Random(2)
    system = token_ids(rng, 160)
    special: list[Body] = [
        {"return_sampling_mask": True, "top_k": 20},
        {"structured_outputs": FORMS[0]},
        {"allowed_token_ids": token_ids(rng, 40)},
        {"prompt_logprobs": 1},
        {"frequency_penalty": 0.5},
        {},
    ]
    bodies: list[Body] = [
        {
            "token_ids": system + token_ids(rng, rng.randrange(1, 30)),
            "sampling_params": {"temperature": 1.0, "max_tokens": 12, "seed": i, "logprobs": 1} | special[i % 6],
            **({"model": ADAPTERS[i % 2]} if i % 3 else {}),
        }
        for i in range(24)
    ]
    expected = alone(server, bodies)
    drafted = [with_drafts(body, reply, rng) for body, reply in zip(bodies, expected, strict=True)]
    assert asyncio.run(ask_all(server, drafted)) == expected


@pytest.mark.slow
def test_branches_of_a_conversation(server: Served) -> None:
    """Each turn goes on from an earlier one's output, several from the same."""
    rng = random.Random(3)
    params = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True, "logprobs": 0}
    turns = [token_ids(rng, 90)]
    for level in range(4):
        bodies = [
            {
                "token_ids": turn + token_ids(rng, rng.randrange(1, 9)),
                "sampling_params": params | {"seed": 10 * level + i},
            }
            for i, turn in enumerate(turns[-3:] * 3)
        ]
        outcomes = asyncio.run(ask_all(server, bodies))
        assert outcomes == alone(server, bodies)
        turns += [
            body["token_ids"] + choices[0]["token_ids"] for body, (_, choices) in zip(bodies, outcomes, strict=True)
        ]


def random_tree(rng: random.Random, count: int) -> list[Body]:
    """Requests whose prompts branch off earlier ones anywhere, with parameters of all sorts."""
    prompts: list[list[int]] = []
    bodies: list[Body] = []
    for _ in range(count):
        prompt: list[int] = []
        if prompts and rng.random() < 0.9:
            parent = rng.choice(prompts[-40:])
            prompt = parent[: rng.choice([len(parent), len(parent), rng.randrange(len(parent) + 1)])]
        if not prompt or rng.random() < 0.6:
            prompt = (prompt + token_ids(rng, rng.choice([1, 5, 16, 40, 130])))[: CONTEXT - 60]
        prompts.append(prompt)
        options: list[tuple[float, Body]] = [
            (0.2, {"top_k": 20}),
            (0.2, {"frequency_penalty": 0.4}),
            (
                0.2,
                rng.choice([{"structured_outputs": rng.choice(FORMS[:3])}, {"allowed_token_ids": token_ids(rng, 30)}]),
            ),
            (0.2, {"return_sampling_mask": True}),
            (0.3, {"logprobs": rng.choice([0, 2])}),
            (0.1, {"prompt_logprobs": 0}),
            (0.2, {"n": 4}),
        ]
        params = {name: value for share, entry in options if rng.random() < share for name, value in entry.items()}
        params |= {"temperature": rng.choice([0.7, 1.0, 1.0]), "seed": rng.randrange(99)}
        params |= {"max_tokens": rng.choice([1, 2, 7, 16, 33]), "ignore_eos": True}
        model = {"model": rng.choice(ADAPTERS)} if rng.random() < 0.25 else {}
        bodies.append({"token_ids": prompt, "sampling_params": params, **model})
    return bodies


def check_tree(server: Served, seed: int, count: int, *, update: bool) -> None:
    rng = random.Random(seed)
    bodies = random_tree(rng, count)
    expected = alone(server, bodies)
    drafted = [
        with_drafts(body, reply, rng) if rng.random() < 0.4 else body
        for body, reply in zip(bodies, expected, strict=True)
    ]
    actual = asyncio.run((ask_during_updates if update else ask_all)(server, drafted))
    for body, one, other in zip(drafted, actual, expected, strict=True):
        assert one == other, body


@pytest.mark.slow
@pytest.mark.parametrize("update", [False, True], ids=["same weights", "weights replaced"])
def test_a_random_tree(server: Served, update: bool) -> None:
    check_tree(server, 4 + update, 100, update=update)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_many_random_trees(server: Served, seed: int) -> None:
    """500 requests each; all seeds took 16 minutes on two cores with a load of 10, 6 of the processor."""
    check_tree(server, 100 + seed, 500, update=seed % 2 == 1)
