"""Embeddings through real servers: transformers' hidden states, the same bits in any batch, and OpenAI's client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tests.e2e.server import Served
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint
from tests.waiting import until
from tokserve import LLM, PoolingParams
from tokserve.base.errors import RequestError

pytestmark = pytest.mark.usefixtures("engine_threads")

PROMPTS = [list(range(start, start + length)) for start, length in ((5, 70), (90, 33), (5, 64), (150, 1))]
OPTIONS: dict[str, Any] = {"tokens_only": True, "max_model_len": 128, "runner": "pooling", "cpu_threads": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3", dtype="float32") | {"matryoshka_dimensions": [16, 32]}
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), config, seed=1)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with ServerThread(str(checkpoint), "--runner", "pooling", "--tokens-only", "--max-model-len", "128") as one:
        yield one


def states(checkpoint: Path, ids: list[int]) -> NDArray[np.float32]:  # [T, hidden], after the final norm
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        hidden: NDArray[np.float32] = model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return hidden


def vectors(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, **options)]


@pytest.mark.parametrize("kind", ["LAST", pytest.param("MEAN", marks=pytest.mark.slow)])
def test_vectors_equal_transformers_and_do_not_depend_on_the_batch(checkpoint: Path, kind: str) -> None:
    with LLM(str(checkpoint), enable_prefix_caching=False, pooler_config={"pooling_type": kind}, **OPTIONS) as llm:
        alone = [vectors(llm, [prompt])[0] for prompt in PROMPTS]
        assert vectors(llm, PROMPTS) == alone
        raw = vectors(llm, PROMPTS, normalize=False)
        check_dimensions(llm)
    for prompt, vector, length_one in zip(PROMPTS, raw, alone, strict=True):
        hidden = states(checkpoint, prompt)
        expected = hidden[-1] if kind == "LAST" else hidden.mean(0)
        assert np.allclose(vector, expected, atol=1e-4)
        assert np.allclose(length_one, expected / np.linalg.norm(expected), atol=1e-5)
    with LLM(str(checkpoint), max_num_batched_tokens=9, pooler_config={"pooling_type": kind}, **OPTIONS) as llm:
        assert vectors(llm, PROMPTS) == alone, "in chunks"
        assert vectors(llm, PROMPTS) == alone, "from the prefix cache"


def check_dimensions(llm: LLM) -> None:
    """Fewer dimensions are cut before the length becomes one."""
    vector = np.array(vectors(llm, PROMPTS[:1], normalize=False)[0])
    cut = vectors(llm, PROMPTS[:1], dimensions=16)[0]
    assert np.allclose(cut, vector[:16] / np.linalg.norm(vector[:16]), atol=1e-6)
    for wrong, message in ((17, "one of 16, 32"), (0, "from 1 to")):
        with pytest.raises(RequestError, match=message):
            llm.embed(PROMPTS[:1], dimensions=wrong)
    one_each = [PoolingParams(dimensions=16), PoolingParams(use_activation=False, task="embed")]
    assert vectors(llm, PROMPTS[:1] * 2, pooling_params=one_each) == [cut, vector.tolist()]
    pooled = llm.encode(PROMPTS[:1], PoolingParams(dimensions=16), pooling_task="embed")
    assert pooled[0].outputs.data.tolist() == cut
    tail = vectors(llm, [PROMPTS[0][-20:]])
    assert vectors(llm, PROMPTS[:1], tokenization_kwargs={"truncate_prompt_tokens": 20}) == tail
    assert vectors(llm, PROMPTS[:1], pooling_params=PoolingParams(truncate_prompt_tokens=20)) == tail
    with pytest.raises(RequestError, match=r"pooling_params\.task must be embed, got 'classify'"):
        llm.embed(PROMPTS[:1], pooling_params=PoolingParams(task="classify"))


def test_the_openai_client_and_all_encodings(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    default = client.embeddings.create(model="", input=PROMPTS)  # the client asks for base64
    assert default.usage.prompt_tokens == sum(map(len, PROMPTS)) == default.usage.total_tokens
    floats = client.embeddings.create(model="", input=PROMPTS, encoding_format="float")
    assert [one.embedding for one in default.data] == [one.embedding for one in floats.data]
    assert [one.index for one in floats.data] == [0, 1, 2, 3]
    one = client.embeddings.create(model="", input=PROMPTS[1], dimensions=32)
    assert len(one.data) == 1 and len(one.data[0].embedding) == 32

    def post(**body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/embeddings", json={"input": PROMPTS} | body)

    packed = post(encoding_format="bytes")
    about = json.loads(packed.headers["metadata"])
    values = np.frombuffer(packed.content, "<f4").reshape(len(PROMPTS), -1)
    assert values.tolist() == [one.embedding for one in floats.data]
    assert [row["start"] for row in about["data"]] == [i * 4 * values.shape[1] for i in range(len(PROMPTS))]
    assert post(encoding_format="bytes_only").content == packed.content
    text = post(encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == floats.data[0].embedding
    cut = post(input=PROMPTS[0], truncate_prompt_tokens=64, truncation_side="right").json()
    assert cut["data"][0]["embedding"] == floats.data[2].embedding and cut["usage"]["prompt_tokens"] == 64


BAD: list[tuple[dict[str, Any], str, int]] = [
    ({}, "input", 400),
    ({"input": []}, "input", 400),
    ({"input": [[]]}, "input[0]", 400),
    ({"input": [5, "x"]}, "input[1]", 400),
    ({"input": [[5], 5]}, "input[1]", 400),
    ({"input": 5}, "input", 400),
    ({"input": [9999]}, "input", 400),
    ({"input": [5] * 129}, "input", 400),
    ({"input": [[5], [5] * 129]}, "input[1]", 400),
    ({"input": [5], "dimensions": 7}, "dimensions", 400),
    ({"input": [5], "encoding_format": "hex"}, "encoding_format", 400),
    ({"input": [5], "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", 400),
    ({"input": [5], "model": "other"}, "model", 404),
    ({"input": [5], "priority": "high"}, "priority", 400),
    ({"input": [5], "messages": []}, "input", 400),
]


@pytest.mark.some(8)
@pytest.mark.parametrize(("body", "field", "status"), BAD, ids=lambda value: str(value)[:40])
def test_bad_bodies_name_the_field(server: Served, body: dict[str, Any], field: str, status: int) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body)
    assert answer.status_code == status and answer.json()["error"]["param"] == field, answer.text


def test_a_model_either_generates_or_makes_embeddings(server: Served, demo: Served) -> None:
    refused = httpx.post(f"{server.url}/inference/v1/generate", json={"token_ids": [5]})
    assert refused.status_code == 400 and "--runner pooling" in refused.text
    refused = httpx.post(f"{demo.url}/v1/embeddings", json={"input": "x"})
    assert refused.status_code == 400 and "--runner pooling" in refused.text


@pytest.fixture(scope="module")
def slow(checkpoint: Path) -> Iterator[Served]:
    """A server that computes one prompt at a time, a part of it in each step."""
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    with ServerThread(checkpoint, "--runner", "pooling", "--tokens-only", "--sglang-api", *flags) as one:
        yield one


def paused_among_many(server: Served, asks: ThreadPoolExecutor, mode: str) -> Future[httpx.Response]:
    """A request for vectors, of which some were there and others not when a pause came: for as many as it takes."""
    for count in (300 << power for power in range(8)):
        before = server.metric("tokserve:prompt_tokens_total")
        ids = [[5 + i % 90, *range(5, 70)] for i in range(count)]
        answer = asks.submit(server.post, "/encode", {"input_ids": ids})
        until(lambda before=before: server.metric("tokserve:prompt_tokens_total") >= before + 200)  # type: ignore[misc]
        assert server.post(f"/pause?mode={mode}", {}).status_code == 200
        if not answer.done() if mode == "keep" else answer.result().status_code != 200:
            return answer
        assert server.post("/resume", {}).status_code == 200
    raise AssertionError("vectors are computed faster than a pause comes")


@pytest.mark.slow
def test_one_version_of_the_weights_makes_all_vectors(slow: Served, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3", dtype="float32"), seed=2)
    with ThreadPoolExecutor(1) as asks:
        answer = paused_among_many(slow, asks, "keep")
        assert slow.post("/update_weights", {"weight_dir": str(tmp_path), "weight_version": "new"}).status_code == 200
        assert slow.post("/resume", {}).status_code == 200
        items = answer.result().json()
    assert {one["meta_info"]["weight_version"] for one in items} == {"new"}
    assert slow.post("/encode", {"input_ids": [[5, *range(5, 70)]]}).json()[0]["embedding"] == items[0]["embedding"]


def test_what_a_pause_aborts_may_be_sent_again(slow: Served) -> None:
    with ThreadPoolExecutor(1) as asks:
        answer = paused_among_many(slow, asks, "abort")
        assert answer.result().status_code == 503 and answer.result().headers["retry-after"] == "1"
        assert "(abort_pause)" in answer.result().json()["error"]["message"]
    assert slow.post("/resume", {}).status_code == 200
