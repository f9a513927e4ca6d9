"""Sampling masks of real processes: random crossings of parameters, the routes, and the trainer.

The crossings run in the offline API, many in a batch; each row is compared with the model's whole distribution.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.e2e.server import Server
from tests.e2e.test_routes_agree import CHAT, COMPLETIONS, GENERATE, append, ask, events, maybe
from tokserve import ops
from tokserve.client.results import CompletionOutput
from tokserve.features.offline.llm import LLM
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.rl import TokserveClient
from tokserve.train import PolicyModel

pytestmark = pytest.mark.usefixtures("engine_threads")

MAX_MASK = 40
EDITS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
FORMS: list[dict[str, Any]] = [
    {"regex": r"[a-z ]{2,9}[0-9]*"},
    {"choice": ["yes", "no", "né🙂"]},
    {"json_object": True},
    {"regex": "(ab|cd)+"},
]
FIELDS = ("sampling_mask", "sampling_logprobs", "kept_logprob", "sampling_mask_truncated")


def crossing(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters of all sorts, with a seed."""
    temperature = rng.choice([0.0, 0.4, 1.0, 1.0, 1.6])
    most = rng.randrange(1, 12)
    return {
        "temperature": temperature,
        "seed": rng.randrange(2**40),
        "max_tokens": most,
        **maybe(rng, 0.3, n=rng.randrange(1, 4)),
        **maybe(rng, 0.4, top_k=rng.choice([1, 2, 5, 20, 40, 41, 60])),
        **maybe(rng, 0.4, top_p=rng.uniform(0.05, 1.0)),
        **maybe(rng, 0.3, min_p=rng.choice([0.001, 0.05, 0.4, 1.0])),
        **maybe(rng, 0.2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.4),
        **maybe(rng, 0.2, logit_bias={64: 3.0, 77: -2.5}),
        **maybe(rng, 0.2, bad_words=["n", " a"]),
        **maybe(rng, 0.2, allowed_token_ids=sorted(rng.sample(range(280), rng.randrange(30, 200)))),
        **maybe(rng, 0.2, bad_token_ids=rng.sample(range(280), 9), bad_token_sequences=[[64, 77], [3]]),
        **maybe(rng, 0.2, min_tokens=rng.randrange(0, most + 1)),
        **maybe(rng, 0.2, no_repeat_ngram_size=2),
        **maybe(rng, 0.2, stop=["e", "al"]),
        **maybe(rng, 0.2, ignore_eos=True),
        **maybe(rng, 0.25, structured_outputs=rng.choice(FORMS)),
    }


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(288) for _ in range(rng.randrange(1, 30))]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_logprobs=-1, max_sampling_mask=MAX_MASK, return_sampling_mask=True, max_num_seqs=64) as engine:
        yield engine


def check_rows(output: CompletionOutput, params: dict[str, Any]) -> list[int]:
    """Compare each token's row with the distribution at the temperature; returns the rows' lengths, 0 for None."""
    columns = output.logprobs
    assert columns is not None and output.sampling_mask is not None
    assert output.sampling_logprobs is not None and output.kept_logprob is not None
    assert len(output.sampling_mask) == len(output.sampling_logprobs) == len(output.kept_logprob) == len(columns)
    edited = any(name in params for name in EDITS)
    cut = 0
    for i, (token, row) in enumerate(zip(output.token_ids, output.sampling_mask, strict=True)):
        logprob, kept = float(output.sampling_logprobs[i]), float(output.kept_logprob[i])
        token_logprob = float(columns.token_logprobs[i])
        if row is None:
            # the logarithm of nearly all of the mass rounds to 0, too; only the whole vocabulary leaves the bits
            cut += kept != 0.0 or not (edited or logprob == token_logprob)
            assert kept <= 0.0
        else:
            ids = row.tolist()
            assert 0 < len(ids) <= MAX_MASK and ids == sorted(set(ids)) and token in ids
            table = dict(zip(columns.top_ids[i].tolist(), columns.top_logprobs[i].astype(float).tolist(), strict=True))
            assert kept == pytest.approx(np.log(np.exp([table[kept_token] for kept_token in ids]).sum()), abs=1e-5)
        if params["temperature"] == 0.0:
            assert row is not None and row.tolist() == [token] and logprob == 0.0
            assert kept == pytest.approx(token_logprob, abs=1e-5)
        elif not edited:
            assert logprob + kept == pytest.approx(token_logprob, abs=1e-5)
    assert cut <= output.sampling_mask_truncated <= sum(row is None for row in output.sampling_mask)
    return [0 if row is None else len(row) for row in output.sampling_mask]


def check_crossings(llm: LLM, seeds: range) -> None:
    rng = random.Random(seeds.start)
    crossings = [(prompt(rng), crossing(random.Random(seed))) for seed in seeds]
    params = []
    for _, options in crossings:
        form = options.get("structured_outputs")
        changes = {} if form is None else {"structured_outputs": StructuredOutputs(**form)}
        params.append(options | changes)
    prompts = [ids for ids, _ in crossings]
    with_rows = [SamplingParams(**options, logprobs=-1, logprobs_mode="temperature") for options in params]
    lengths: list[int] = []
    outputs = llm.generate(prompts, with_rows, use_tqdm=False)
    for output, (_, options) in zip(outputs, crossings, strict=True):
        for choice in output.outputs:
            lengths += check_rows(choice, options)
    assert len(set(lengths)) > 15 and lengths.count(0) > len(seeds) // 8
    # the tokens are those without masks, and the logprobs are those of `processed`, to the bit
    plain = [SamplingParams(**o, logprobs=0, logprobs_mode="processed", return_sampling_mask=False) for o in params]
    for output, again, options in zip(outputs, llm.generate(prompts, plain, use_tqdm=False), params, strict=True):
        for choice, other in zip(output.outputs, again.outputs, strict=True):
            assert other.sampling_mask is None and other.token_ids == choice.token_ids
            assert other.logprobs is not None and choice.sampling_logprobs is not None
            if options["temperature"]:
                assert other.logprobs.token_logprobs.tolist() == choice.sampling_logprobs.tolist()


@pytest.mark.slow
def test_crossings(llm: LLM) -> None:
    check_crossings(llm, range(300))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_crossings(llm: LLM, part: int) -> None:
    check_crossings(llm, range(1000 + 500 * part, 1500 + 500 * part))


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo.url, timeout=120) as http:
        yield http


def joined(stream: list[Any]) -> dict[int, dict[str, Any]]:
    """The mask's fields of each choice of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for event in stream:
        for choice in event["choices"]:
            present = {name: choice[name] for name in FIELDS if name in choice}
            append(choices.setdefault(choice["index"], {}), present, (*FIELDS[:3], "counts", "ids"))
    return choices


def fields(reply: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {choice["index"]: {name: choice[name] for name in FIELDS} for choice in reply["choices"]}


def rows_of(counts: list[int], ids: list[int]) -> list[list[int] | None]:
    rows: list[list[int] | None] = []
    for count in counts:
        rows.append(None if count < 0 else ids[:count])
        ids = ids[max(0, count) :]
    assert not ids
    return rows


def unpacked(packed: bytes, kind: str) -> list[Any]:
    return list(np.frombuffer(packed, kind).tolist())


def packed_fields(reply: dict[str, Any], in_base64: bool) -> dict[int, dict[str, Any]]:
    by_index = {}
    for choice in reply["choices"]:
        columns = choice["sampling_mask"]
        values = [columns["counts"], columns["ids"], choice["sampling_logprobs"], choice["kept_logprob"]]
        if in_base64:
            values = [base64.b64decode(value) for value in values]
        counts, ids, logprobs, kept = map(unpacked, values, ("<i4", "<i4", "<f4", "<f4"))
        by_index[choice["index"]] = dict(
            zip(FIELDS, (rows_of(counts, ids), logprobs, kept, choice["sampling_mask_truncated"]), strict=True)
        )
    return by_index


@pytest.mark.parametrize("seed", range(8))
def test_formats_and_streams_are_equal(client: httpx.Client, seed: int) -> None:
    rng = random.Random(seed)
    params = crossing(rng) | {"logit_bias": {"64": 1.0}}
    body = {"token_ids": prompt(rng), "sampling_params": params, "return_sampling_mask": True}
    body |= maybe(rng, 0.5, output_mode="text")
    expected = fields(ask(client, GENERATE, body))
    assert all(len(choice["sampling_mask"]) == len(choice["kept_logprob"]) for choice in expected.values())
    within = body | {"return_sampling_mask": None, "sampling_params": params | {"return_sampling_mask": True}}
    assert fields(ask(client, GENERATE, within)) == expected
    assert joined(events(client, GENERATE, body)) == expected
    arrays = ask(client, GENERATE, body | {"logprobs_format": "arrays"})
    streamed = joined(events(client, GENERATE, body | {"logprobs_format": "arrays"}))
    assert streamed == fields(arrays)
    for index, choice in fields(arrays).items():
        assert choice | {"sampling_mask": rows_of(**choice["sampling_mask"])} == expected[index]
    assert packed_fields(ask(client, GENERATE, body | {"logprobs_format": "base64"}), True) == expected
    answer = client.post(GENERATE, json=body | {"logprobs_format": "arrays"}, headers={"Accept": "application/msgpack"})
    assert packed_fields(msgspec.msgpack.decode(answer.content), False) == expected
    off = ask(client, GENERATE, body | {"return_sampling_mask": False})
    assert not set(FIELDS) & set(off["choices"][0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_text_routes_have_the_token_routes_rows(client: httpx.Client, path: str, seed: int) -> None:
    rng = random.Random(seed)
    params = crossing(rng) | {"logit_bias": {"64": 1.0}, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
    ids = {"messages": [{"role": "user", "content": "né 🙂 hi"}]} if path == CHAT else {"prompt": "né 🙂 hi"}
    body = params | ids | {"return_sampling_mask": True, "return_token_ids": True}
    reply = ask(client, path, body)
    assert joined(events(client, path, body)) == fields(reply)
    tokens = (reply if path == CHAT else reply["choices"][0])["prompt_token_ids"]
    again = ask(client, GENERATE, {"token_ids": tokens, "sampling_params": params, "return_sampling_mask": True})
    assert fields(again) == fields(reply)
    plain = ask(client, path, body | {"return_sampling_mask": None})
    assert not set(FIELDS) & set(plain["choices"][0])


@pytest.mark.slow
def test_large_replies_are_made_in_parts(client: httpx.Client) -> None:
    body: dict[str, Any] = {
        "token_ids": [286, 84],
        "return_sampling_mask": True,
        "sampling_params": {"n": 6, "max_tokens": 400, "ignore_eos": True, "top_k": 60, "seed": 5, "temperature": 2.0},
    }
    expected = fields(ask(client, GENERATE, body))
    assert [len(choice["sampling_mask"]) for choice in expected.values()] == [400] * 6
    assert joined(events(client, GENERATE, body)) == expected
    assert packed_fields(ask(client, GENERATE, body | {"logprobs_format": "base64"}), True) == expected
    completion = {"prompt": [286, 84], "return_sampling_mask": True} | body["sampling_params"]
    assert fields(ask(client, COMPLETIONS, completion)) == expected


def test_refusals(client: httpx.Client) -> None:
    for path, body, field in (
        (GENERATE, {"token_ids": [1], "return_sampling_mask": 1}, "return_sampling_mask"),
        (
            GENERATE,
            {"token_ids": [1], "sampling_params": {"return_sampling_mask": "yes"}},
            "sampling_params.return_sampling_mask",
        ),
        (
            GENERATE,
            {"token_ids": [1], "return_sampling_mask": True, "sampling_params": {"return_sampling_mask": False}},
            "return_sampling_mask",
        ),
        (CHAT, {"messages": [{"role": "user", "content": ""}], "return_sampling_mask": "x"}, "return_sampling_mask"),
        (COMPLETIONS, {"prompt": "a", "return_sampling_mask": 0}, "return_sampling_mask"),
        ("/v1/responses", {"input": "a", "return_sampling_mask": True}, "return_sampling_mask"),
        (
            GENERATE,
            {"token_ids": [1], "return_sampling_mask": True, "sampling_params": {"n": 1024}},
            "sampling_params.return_sampling_mask",
        ),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
    assert client.post("/v1/responses", json={"input": "a", "return_sampling_mask": False}).status_code == 200


@pytest.mark.slow
def test_truncated_masks_are_counted() -> None:
    with Server("demo", "--max-sampling-mask", "5", "--return-sampling-mask") as server:
        params = {"max_tokens": 20, "ignore_eos": True, "seed": 3, "n": 2}
        body: dict[str, Any] = {"token_ids": [286, 84], "sampling_params": params | {"top_k": 6}}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            choices = fields(ask(client, GENERATE, body))
            for choice in choices.values():
                assert choice["sampling_mask"] == [None] * 20 and choice["sampling_mask_truncated"] == 20
                assert all(kept < 0.0 for kept in choice["kept_logprob"])
            five = fields(ask(client, GENERATE, {"token_ids": [286, 84], "sampling_params": params | {"top_k": 5}}))
            assert {len(row) for row in five[1]["sampling_mask"]} == {5} and five[1]["sampling_mask_truncated"] == 0
            expected = fields(ask(client, GENERATE, {"token_ids": [286, 84], "sampling_params": params}))
            assert expected[0]["sampling_mask"] == [None] * 20 and expected[0]["sampling_mask_truncated"] == 0
            assert expected[0]["kept_logprob"] == [0.0] * 20
            assert joined(events(client, GENERATE, body)) == choices
            assert "sampling_mask" not in client.post("/v1/responses", json={"input": "hi"}).text
            metrics = client.get("/metrics").text
            assert 'tokserve:sampling_masks_truncated_total{engine="0",model_name="demo"} 80.0' in metrics


TRAINED: list[dict[str, Any]] = [
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.02},
    {"top_p": 0.9},
    {"temperature": 0.0},
    {},
    {"allowed_token_ids": list(range(60, 200)), "top_p": 0.95},
    {"bad_token_ids": [64, 68]},
    {"min_tokens": 9},
    {"structured_outputs": {"regex": "[a-z]{3,9}x[0-9]*"}, "temperature": 1.7},
    {"temperature": 2.0**-9, "top_k": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_policy_scores_what_was_drawn_to_the_bit(dtype: str, request: pytest.FixtureRequest) -> None:
    """`sampling_logprobs` are what `PolicyModel` computes from the returned masks, in every form."""
    with (
        nullcontext(request.getfixturevalue("demo")) if dtype == "bfloat16" else Server("demo", "--dtype", dtype)
    ) as server:
        state = server.get("/inference/v1/state").json()
        ops.bind("cpu", {})
        policy = PolicyModel.from_pretrained("demo", dtype=dtype, cpu_arithmetic=str(state["arithmetic"]))
        for number, params in enumerate(TRAINED):
            params = params | {"seed": number, "max_tokens": 12, "n": 2, "logit_bias": None}
            temperature = params.get("temperature", 1.0)
            token_ids = [286, 84, 82, 68, 81, 198, 10 + number]
            body = {"token_ids": token_ids, "sampling_params": params, "return_sampling_mask": True}
            for form in ("objects", "arrays", "base64"):
                choices = server.post(GENERATE, body | {"logprobs_format": form}).json()["choices"]
                rows = [token_ids + choice["token_ids"] for choice in choices]
                masks = [choice["sampling_mask"] for choice in choices]
                starts = [len(token_ids)] * 2
                scored = policy.logprobs(rows, starts, temperature, "processed", masks)
                at_temperature = policy.logprobs(rows, starts, temperature, "temperature")
                for choice, row, others in zip(choices, scored, at_temperature, strict=True):
                    values, kept = choice["sampling_logprobs"], choice["kept_logprob"]
                    if form == "base64":
                        values, kept = (unpacked(base64.b64decode(column), "<f4") for column in (values, kept))
                    assert row.tolist() == np.float32(values).tolist(), params
                    assert [a + b for a, b in zip(row.tolist(), kept, strict=True)] == pytest.approx(
                        others.tolist(), abs=2e-5
                    )

        async def scene() -> None:
            async with TokserveClient(server.url) as client:
                options: dict[str, Any] = {"max_tokens": 9, "top_p": 0.9, "return_sampling_mask": True}
                for rollout in await client.generate([[286, 84], [5]], n=2, seeds=[1, 2], **options):
                    assert rollout.sampling_mask is not None and rollout.kept_logprob is not None
                    assert rollout.sampling_logprobs is not None and rollout.mask_truncated is not None
                    assert len(rollout.sampling_mask) == len(rollout.token_ids) == len(rollout.kept_logprob)
                    assert not rollout.mask_truncated.any()
                    row = [*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]
                    (scored,) = policy.logprobs(
                        [row], [len(rollout.prompt_ids)], 1.0, "processed", [rollout.sampling_mask]
                    )
                    assert scored.tolist() == rollout.sampling_logprobs.tolist()
                (plain,) = await client.generate([[5]], max_tokens=2)
                assert plain.sampling_mask is None and plain.kept_logprob is None

        asyncio.run(scene())
