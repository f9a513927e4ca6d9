"""SmolLM2 over HTTP: the main features, on the GGUF file and on safetensors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file

from tests.adapters import write_adapter
from tests.e2e.server import Server
from tests.real.conftest import Model
from tests.replies import good
from tokserve.rl import TokserveClient

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Name the largest ocean on Earth."}]


@pytest.fixture(scope="module", params=["gguf", "directory"])
def server(request: pytest.FixtureRequest, smollm2: Model) -> Iterator[Server]:
    flags = ["--dtype", "bfloat16", "--max-model-len", "2048", "--served-model-name", "smollm2"]
    with Server(getattr(smollm2, request.param), *flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_chat_answers_whole_and_streamed(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    text = reply.choices[0].message.content or ""
    assert "Pacific" in text and reply.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None and reply.usage is not None
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens


def test_a_conversation_of_several_turns(client: openai.OpenAI) -> None:
    turns = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    reply = client.chat.completions.create(model="smollm2", messages=turns, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    assert "Rome" in (reply.choices[0].message.content or "")


def test_choices_logprobs_and_stop_strings(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Tell me a story."}],
        n=3,
        seed=5,
        temperature=1.0,
        max_tokens=24,
        logprobs=True,
        top_logprobs=3,
    )
    assert len({choice.message.content for choice in reply.choices}) == 3
    for choice in reply.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        for row in choice.logprobs.content:
            tops = [top.logprob for top in row.top_logprobs]
            assert tops == sorted(tops, reverse=True) and len(tops) >= 3 and row.logprob <= max(tops)
            assert sum(math.exp(top) for top in tops[:3]) <= 1 + 1e-5
    counted = client.completions.create(
        model="smollm2", prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=60, stop=[" 9"]
    )
    assert counted.choices[0].text == " 6, 7, 8," and counted.choices[0].finish_reason == "stop"


def test_a_json_schema_is_kept(client: openai.OpenAI) -> None:
    for seed in range(3):
        reply = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Describe a person called Ann as JSON."}],
            temperature=0.8,
            seed=seed,
            max_tokens=120,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        )
        person = json.loads(reply.choices[0].message.content or "")
        assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 120 and len(person["name"]) <= 20


def test_sampling_masks_and_speculation(server: Server, smollm2: Model) -> None:
    def reply(**body: Any) -> dict[str, Any]:
        return good(server.post("/inference/v1/generate", {"token_ids": smollm2.prompts[3]} | body))["choices"][0]

    params = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 32, "logprobs": 2, "ignore_eos": True}
    plain = reply(sampling_params=params)
    masked = reply(sampling_params=params, return_sampling_mask=True)
    assert {name: masked[name] for name in ("token_ids", "logprobs")} == {
        n: plain[n] for n in ("token_ids", "logprobs")
    }
    for token, row, kept in zip(masked["token_ids"], masked["sampling_mask"], masked["kept_logprob"], strict=True):
        assert row is None or (token in row and math.log(0.9) - 1e-4 <= kept <= 0.0)
    assert any(row is not None for row in masked["sampling_mask"])
    assert reply(sampling_params=params, draft_token_ids=plain["token_ids"]) == plain


def test_speculation_changes_nothing(smollm2: Model) -> None:
    requested = [
        {
            "token_ids": prompt,
            "sampling_params": {"temperature": temperature, "seed": 1, "max_tokens": 48, "logprobs": 1},
        }
        for prompt in smollm2.prompts
        for temperature in (0.0, 0.7)
    ]
    replies = []
    for method in ("none", "ngram"):
        with Server(
            smollm2.directory, "--dtype", "bfloat16", "--max-model-len", "512", "--spec-method", method
        ) as server:
            replies.append([server.post("/inference/v1/generate", body).json()["choices"] for body in requested])
    assert replies[0] == replies[1]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_as_it_loads(smollm2: Model, scheme: str) -> None:
    with Server(smollm2.directory, "--max-model-len", "512", "--quantization", scheme) as server:
        body = {"model": str(smollm2.directory), "messages": QUESTION, "temperature": 0, "max_tokens": 30}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert "Pacific" in answer.json()["choices"][0]["message"]["content"]


def test_an_adapter_and_a_pushed_delta(smollm2: Model, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", smollm2.directory, gain=0.02)
    flags = ["--dtype", "bfloat16", "--max-model-len", "512", "--enable-lora", "--lora-modules", f"mine={adapter}"]
    prompt = smollm2.prompts[0]

    def text(server: Server, model: str) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 24, "logprobs": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    weights = load_file(smollm2.directory / "model.safetensors")
    changed = dict(weights)
    name = "model.layers.3.mlp.down_proj.weight"
    changed[name] = weights[name].clone()
    changed[name][:4] *= 1.5

    async def push(url: str) -> None:
        async with TokserveClient(url) as client:
            assert (await client.push(weights, "1", delta=True)).mode == "full"
            done = await client.push(changed, "2", delta=True)
            assert done.mode == "delta" and 0 < done.num_changed <= changed[name][:4].numel()

    with Server(smollm2.directory, *flags) as server:
        base = str(smollm2.directory)
        first, adapted = text(server, base), text(server, "mine")
        assert adapted["logprobs"] != first["logprobs"]
        asyncio.run(push(server.url))
        pushed = text(server, base)
        assert pushed["logprobs"] != first["logprobs"]
