"""A mixture of experts through real engines: the same bits and the same experts, however a request is computed."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.server import Served
from tests.e2e.test_exact import alone, columns, together
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, SamplingParams
from tokserve.base.errors import StartError
from tokserve.checkpoint import DEMO_DIR
from tokserve.config import Config
from tokserve.executor.inline import InlineExecutor
from tokserve.families.mixtures.columns import ExpertRows

pytestmark = pytest.mark.usefixtures("engine_threads")

OPTIONS: dict[str, Any] = {"tokens_only": True, "max_model_len": 256}
ROUTED: dict[str, Any] = {"enable_return_routed_experts": True}
PARAMS = SamplingParams(max_tokens=40, logprobs=2, temperature=0.8, seed=3, ignore_eos=True)
PROMPTS = [
    list(range(start, start + length)) for start, length in ((5, 70), (90, 33), (5, 70), (150, 50), (210, 40), (260, 9))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config("glm4_moe", dtype="bfloat16"), seed=1)


def routed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[list[int], NDArray[Any]]]:
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(output.token_ids, output.routed_experts) for output in outputs]


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> tuple[list[tuple[list[int], NDArray[Any]]], int]:
    """Each request alone; and the KV cache's bytes per token."""
    with LLM(checkpoint, enable_prefix_caching=False, cpu_threads=1, **ROUTED, **OPTIONS) as llm:
        per_token = llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        return [routed(llm, [prompt], PARAMS)[0] for prompt in PROMPTS], per_token


@pytest.fixture(scope="module")
def expected(solo: tuple[list[tuple[list[int], NDArray[Any]]], int]) -> list[tuple[list[int], NDArray[Any]]]:
    return solo[0]


@pytest.fixture(scope="module")
def short_steps(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, max_num_batched_tokens=48, **ROUTED, **OPTIONS) as llm:
        yield llm


@pytest.mark.slow
def test_same_bits_alone_among_others_chunked_preempted_and_cached(checkpoint: Path) -> None:
    with LLM(checkpoint, enable_prefix_caching=False, cpu_threads=1, **OPTIONS) as llm:
        per_token = llm.ready.facts["kv_bytes"] // (llm.ready.num_blocks * llm.ready.block_size)
        bits = alone(llm)
        assert llm.generate([PROMPTS[0]], [PARAMS], use_tqdm=False)[0].outputs[0].routed_experts is None
    assert len({tuple(tokens) for tokens, _ in bits}) == len(bits)
    small: dict[str, Any] = {"kv_cache_memory_bytes": per_token * 264, "block_size": 8, "max_num_batched_tokens": 37}
    with LLM(checkpoint, depth=2, cpu_threads=2, **small, **ROUTED, **OPTIONS) as llm:
        assert together(llm) == bits
        assert together(llm) == bits, "second time, from the prefix cache"
        assert llm.stats.preemptions > 0


def test_experts_of_all_positions_but_the_last(expected: list[tuple[list[int], NDArray[Any]]]) -> None:
    for prompt, (tokens, experts) in zip(PROMPTS, expected, strict=True):
        assert experts.shape == (len(prompt) + len(tokens) - 1, 3, 3) and experts.dtype == np.uint8
        assert not experts[:, 0].any(), "the first layer has no experts"
        assert all(len(set(ids.tolist())) == 3 for layers in experts for ids in layers[1:])
        assert experts.max() < 16 and len(np.unique(experts[:, 1:])) > 8


def test_experts_survive_batches_chunks_preemption_and_the_prefix_cache(
    checkpoint: Path, solo: tuple[list[tuple[list[int], NDArray[Any]]], int]
) -> None:
    expected, per_token = solo
    small: dict[str, Any] = {"kv_cache_memory_bytes": per_token * 256, "block_size": 8, "max_num_batched_tokens": 19}
    with LLM(checkpoint, depth=2, **small, **ROUTED, **OPTIONS) as llm:
        for _ in range(2):
            for (tokens, experts), (expected_tokens, expected_experts) in zip(
                routed(llm, PROMPTS, PARAMS), expected, strict=True
            ):
                assert tokens == expected_tokens and np.array_equal(experts, expected_experts)
        assert llm.stats.preemptions > 0 and llm.stats.prefix_hits > 0
        tokens, expected_experts = expected[1]
        rescore = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scored = routed(llm, [PROMPTS[1] + tokens], rescore)[0][1]
        assert np.array_equal(scored[:-1], expected_experts)
        late = routed(llm, [PROMPTS[1]], SamplingParams(**{**OUTPUT, "routed_experts_prompt_start": 30}))[0][1]
        assert np.array_equal(late, expected_experts[30:])
        beyond = routed(llm, [PROMPTS[1]], SamplingParams(**{**OUTPUT, "routed_experts_prompt_start": 999}))[0][1]
        assert np.array_equal(beyond, expected_experts[33:]), "all of the output's, whatever is left out of the prompt"


OUTPUT: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}


def test_experts_and_sampling_masks_of_one_request(short_steps: LLM) -> None:
    params = SamplingParams(**OUTPUT, logprobs=2, top_k=20, return_sampling_mask=True)
    both = [output.outputs[0] for output in short_steps.generate(PROMPTS[:3], params, use_tqdm=False)]
    for prompt, choice in zip(PROMPTS, both, strict=False):
        assert choice.sampling_mask is not None and choice.routed_experts is not None
        assert [len(row) for row in choice.sampling_mask if row is not None] == [20] * 40
        assert all(token in row for token, row in zip(choice.token_ids, choice.sampling_mask, strict=True))
        rescore = SamplingParams(max_tokens=1)
        scored = routed(short_steps, [prompt + choice.token_ids], rescore)[0][1]
        assert np.array_equal(scored[:-1], choice.routed_experts)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense = write_checkpoint(tmp_path, tiny_config("qwen3"))
    with pytest.raises(StartError, match="enable_return_routed_experts: the model has no experts"):
        InlineExecutor(Config.make(model=str(dense), device="cpu", dtype="float32", **ROUTED, **OPTIONS)).start()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    vocab = json.loads((DEMO_DIR / "config.json").read_text())["vocab_size"]
    write_checkpoint(directory, tiny_config("qwen3_moe", vocab_size=vocab))
    for file in DEMO_DIR.glob("tokenizer*"):
        shutil.copy(file, directory)
    with ServerThread(directory, "--enable-return-routed-experts", "--sglang-api", "--max-model-len", "256") as served:
        yield served


def events_of(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = served.post(path, body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def unpacked(npy: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(npy)), allow_pickle=False)
    return array


@pytest.mark.slow
def test_routes_return_the_same_experts_whole_and_streamed(server: Served) -> None:
    prompt, common = list(range(20, 60)), {"temperature": 0.7, "seed": 5, "max_tokens": 9}
    sampling = common | {"ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": sampling}
    first_choice = server.post("/inference/v1/generate", body).json()["choices"][0]
    expected = unpacked(first_choice["routed_experts"])
    assert expected.shape == (48, 3, 3)
    events = events_of(server, "/inference/v1/generate", body | {"stream": True})
    actual = [choice["routed_experts"] for event in events for choice in event["choices"] if "routed_experts" in choice]
    assert actual == [first_choice["routed_experts"]], "with the last event"
    late = server.post("/inference/v1/generate", body | {"routed_experts_prompt_start": 10}).json()["choices"][0]
    assert np.array_equal(unpacked(late["routed_experts"]), expected[10:])
    text = {"prompt": prompt, "return_token_ids": True} | sampling
    for changes, rest in (({}, expected), ({"routed_experts_prompt_start": 25}, expected[25:])):
        choice = server.post("/v1/completions", text | changes).json()["choices"][0]
        assert choice["token_ids"] == first_choice["token_ids"] and np.array_equal(
            unpacked(choice["routed_experts"]), rest
        )
    chat = {"messages": [{"role": "user", "content": "What is an expert?"}], "return_token_ids": True} | sampling
    reply = server.post("/v1/chat/completions", chat).json()
    experts = unpacked(reply["choices"][0]["routed_experts"])
    assert len(experts) == len(reply["prompt_token_ids"]) + 8
    events = events_of(server, "/v1/chat/completions", chat | {"stream": True})
    actual = [choice["routed_experts"] for event in events for choice in event["choices"] if "routed_experts" in choice]
    assert [unpacked(npy).tolist() for npy in actual] == [experts.tolist()]
    again = {"token_ids": prompt + first_choice["token_ids"], "sampling_params": {"max_tokens": 1}}
    scored = unpacked(server.post("/inference/v1/generate", again).json()["choices"][0]["routed_experts"])
    assert np.array_equal(scored[:48], expected)


@pytest.mark.slow
def test_experts_in_the_forms_of_trainers(server: Served) -> None:
    """prime-rl's `serialize_routed_experts`, SkyRL's `generate_wire`, and SGLang's meta_info, as miles reads it."""
    prompt, sampling = list(range(20, 60)), {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": sampling}
    expected = unpacked(server.post("/inference/v1/generate", body).json()["choices"][0]["routed_experts"])

    prime = body | {"routed_experts_format": "object", "routed_experts_prompt_start": 10}
    within = {"token_ids": prompt, "sampling_params": sampling | {k: prime[k] for k in prime if k not in body}}
    for sent in (prime, within):
        shown = server.post("/inference/v1/generate", sent).json()["choices"][0]["routed_experts"]
        assert list(shown) == ["data", "shape", "start", "dtype"] and shown["start"] == 10
        ids = np.frombuffer(base64.b64decode(shown["data"]), shown["dtype"]).reshape(shown["shape"])
        assert ids.dtype == np.uint8 and np.array_equal(ids, expected[10:])
    reply = server.post("/skyrl/v1/generate", body)
    assert b'"routed_experts":{"data":"' in reply.content, "what its client cuts out"
    shown = reply.json()["choices"][0]["routed_experts"]
    assert shown["dtype"] == "uint8" and base64.b64decode(shown["data"]) == expected.tobytes()
    text = {"prompt": prompt, "routed_experts_format": "object", "stream": True} | sampling
    events = events_of(server, "/v1/completions", text)
    [late] = [choice for event in events for choice in event["choices"] if "routed_experts" in choice]
    assert base64.b64decode(late["routed_experts"]["data"]) == expected.tobytes()

    flag = {"return_routed_experts": True}
    sglang = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}}
    assert "routed_experts" not in server.post("/generate", sglang).json()["meta_info"]
    for start in (0, 40):
        details = server.post("/generate", sglang | flag | {"routed_experts_start_len": start}).json()["meta_info"]
        ids = np.frombuffer(base64.b64decode(details["routed_experts"]), np.int32).reshape(-1, 3, 3)
        assert details["routed_experts_start_len"] == start and np.array_equal(ids, expected[start:])
    answer = server.post("/generate", sglang | flag | {"routed_experts_start_len": 41})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "routed_experts_start_len"
    chat = {"input_ids": prompt, "return_meta_info": True} | flag | sampling
    details = server.post("/v1/chat/completions", chat).json()["choices"][0]["meta_info"]
    assert np.array_equal(np.frombuffer(base64.b64decode(details["routed_experts"]), np.int32), expected.ravel())


def test_the_smallest_dtype_holds_the_ids() -> None:
    for largest, dtype in ((0, "uint8"), (255, "uint8"), (256, "int16"), (32767, "int16"), (32768, "int32")):
        ids = ExpertRows(np.array([[[0, largest]]], np.uint16), 0, "compact").compact()
        assert ids.dtype == dtype and ids.ravel().tolist() == [0, largest]
    assert ExpertRows(np.zeros((0, 3, 2), np.uint16), 0, "compact").compact().dtype == np.uint8


def test_decode_logprobs_equal_rescored_prompt_logprobs(short_steps: LLM) -> None:
    prompt = PROMPTS[0]
    short_steps.reset_prefix_cache()
    decoded = short_steps.generate([prompt], [PARAMS], use_tqdm=False)[0].outputs[0]
    rescore = SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprobs_start=len(prompt))
    for _ in range(2):
        scored = short_steps.generate([prompt + list(decoded.token_ids)], [rescore], use_tqdm=False)[0]
        assert columns(scored.prompt_logprobs) == columns(decoded.logprobs)
