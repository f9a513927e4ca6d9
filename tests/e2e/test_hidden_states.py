"""`hidden_states` through real engines: the same however a position is computed, and what transformers computes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.server import Served
from tests.replies import good
from tests.server.site import parse_events
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM, SamplingParams
from tokserve.checkpoint import DEMO_DIR

pytestmark = pytest.mark.usefixtures("engine_threads")

GENERATE = "/inference/v1/generate"
PROMPTS = [[5 + seed, 6, 7, 8] * (2 + 5 * seed) for seed in range(4)]
LAYERS, LIMIT = [0, 1, 4], 1 << 20
SERVED: dict[str, Any] = {"dtype": "float32", "max_hidden_state_bytes": LIMIT}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with ServerThread("demo", "--dtype", "bfloat16", "--max-hidden-state-bytes", str(LIMIT)) as one:
        yield one


def params(number: int, **more: Any) -> SamplingParams:
    length = len(PROMPTS[number])
    positions = [0, 1, 5, length - 1, length, length + 9, length + 22, length + 23, length + 500]
    fields = {"temperature": 0.0 if number == 0 else 0.8, "seed": number, "max_tokens": 24, "ignore_eos": True}
    return SamplingParams(**fields | {"hidden_states": {"layers": LAYERS, "positions": positions}} | more)


def outcome(llm: LLM, numbers: range) -> list[tuple[list[int], list[int], bytes]]:
    """The tokens, and the positions and bits of hidden states, of prompts that are computed together."""
    outputs = llm.generate([PROMPTS[i] for i in numbers], [params(i) for i in numbers], use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    states = [choice.others["hidden_states"] for choice in choices]
    return [
        (choice.token_ids, one.positions, one.values().tobytes()) for choice, one in zip(choices, states, strict=True)
    ]


@pytest.mark.slow
def test_states_are_the_same_in_a_batch_alone_in_chunks_cached_with_drafts_and_from_transformers() -> None:
    with LLM("demo", **SERVED) as llm:
        alone = [outcome(llm, range(i, i + 1))[0] for i in range(4)]
        assert outcome(llm, range(4)) == alone  # and their prompts are cached
        scored = llm.generate([PROMPTS[1]], [params(1, max_tokens=0)], use_tqdm=False)[0].outputs[0]
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "spec_method": "ngram"}
    with LLM("demo", **SERVED, **options) as llm:
        assert outcome(llm, range(4)) == alone
    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)
    for number, (tokens, positions, bits) in enumerate(alone):
        length = len(PROMPTS[number])
        assert positions == [0, 1, 5, length - 1, length, length + 9, length + 22]  # the last token is not computed
        with torch.no_grad():
            states = model(torch.tensor([PROMPTS[number] + tokens]), output_hidden_states=True).hidden_states
        expected = torch.stack([states[layer][0, positions] for layer in LAYERS], dim=1)
        served = np.frombuffer(bits, np.float32).reshape(expected.shape)
        assert LAYERS[-1] == len(states) - 1 and np.allclose(served, expected.numpy(), atol=1e-4)
        if number == 1:
            prompt = scored.others["hidden_states"]
            assert prompt.positions == [0, 1, 5, length - 1]
            assert prompt.values().tobytes() == served[:4].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "cohere", "deepseek_v3", "qwen3_next"])
def test_states_of_other_blocks_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tiny_config(family, dtype="float32"), seed=1)
    prompts, options = [PROMPTS[1], PROMPTS[2]], {"tokens_only": True, "max_model_len": 128} | SERVED
    with LLM(directory, **options) as llm:
        layers = list(range(llm.ready.facts["hidden_layers"] + 1))
        task = params(0, hidden_states={"layers": layers, "positions": [0, 9, len(PROMPTS[1]) + 7]})
        outputs = [llm.generate([prompt], [task], use_tqdm=False)[0].outputs[0] for prompt in prompts]
        small = llm.ready.facts["kv_bytes"] // llm.ready.num_blocks * 10
    with LLM(directory, **options, max_num_batched_tokens=16, kv_cache_memory_bytes=small) as llm:
        again = llm.generate(prompts, [task, task], use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for prompt, output, other in zip(prompts, outputs, again, strict=True):
        states = output.others["hidden_states"]
        assert states == other.outputs[0].others["hidden_states"]
        with torch.no_grad():
            rows = model(torch.tensor([prompt + output.token_ids]), output_hidden_states=True).hidden_states
        expected = torch.stack([row[0, states.positions] for row in rows], dim=1)
        assert np.allclose(states.values(), expected.numpy(), atol=1e-3)


def test_a_route_returns_states_with_the_last_delta(server: Served) -> None:
    chosen = {"layers": [4], "positions": [0, 3, 7]}
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "hidden_states": chosen}
    body = {"token_ids": PROMPTS[0], "sampling_params": sampling}
    states = good(server.post(GENERATE, body))["choices"][0]["hidden_states"]
    hidden = states["shape"][2]
    assert states["shape"] == [3, 1, hidden] and states["dtype"] == "bfloat16"
    assert (states["layers"], states["positions"]) == ([4], [0, 3, 7])
    assert len(base64.b64decode(states["data"])) == 3 * hidden * 2
    events = parse_events(server.post(GENERATE, body | {"stream": True}).text)
    assert [one["hidden_states"] for event in events for one in event["choices"] if "hidden_states" in one] == [states]
    several = good(server.post(GENERATE, body | {"sampling_params": sampling | {"n": 2}}))["choices"]
    assert [one["hidden_states"] for one in several] == [states, states]
    plain = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 1}}
    assert "hidden_states" not in good(server.post(GENERATE, plain))["choices"][0]


def test_states_behind_the_end_are_not_returned_though_drafts_had_them_computed(server: Served) -> None:
    sampling = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    ids = good(server.post(GENERATE, {"token_ids": PROMPTS[0], "sampling_params": sampling}))["choices"][0]["token_ids"]
    end = len(PROMPTS[0]) + ids.index(ids[1])
    for positions, returned in (([end, end + 1], []), ([end - 1, end, end + 1], [end - 1])):
        chosen = {"stop_token_ids": [ids[1]], "hidden_states": {"layers": [4], "positions": positions}}
        body = {"token_ids": PROMPTS[0], "sampling_params": sampling | chosen}
        plain = good(server.post(GENERATE, body | {"speculate": False}))["choices"]
        assert good(server.post(GENERATE, body | {"draft_token_ids": ids}))["choices"] == plain
        assert plain[0].get("hidden_states", {"positions": []})["positions"] == returned


def test_what_cannot_be_returned_is_refused_by_name(server: Served) -> None:
    for chosen, field in (
        ({"layers": [], "positions": [0]}, "hidden_states.layers"),
        ({"layers": [5], "positions": [0]}, "hidden_states.layers"),
        ({"layers": [1, 1], "positions": [0]}, "hidden_states.layers"),
        ({"layers": [0], "positions": [2, 1]}, "hidden_states.positions"),
        ({"layers": [0], "positions": [-1]}, "hidden_states.positions"),
        ({"layers": [0], "positions": [10**6]}, "hidden_states.positions"),
        ({"layers": [0]}, "hidden_states"),
        ({"layers": [0], "positions": [0], "dtype": "float16"}, "hidden_states"),
        (True, "hidden_states"),
    ):
        answer = server.post(GENERATE, {"token_ids": [5], "sampling_params": {"hidden_states": chosen}})
        error = answer.json()["error"]
        assert answer.status_code == 400 and field in error["message"] and field in error["param"], answer.text
    long = {"layers": [0, 1, 2], "positions": list(range(1200))}
    answer = server.post(GENERATE, {"token_ids": [5], "sampling_params": {"hidden_states": long, "max_tokens": 1}})
    assert answer.status_code == 400 and "hidden_states" in answer.text, answer.text
    chosen = {"hidden_states": {"layers": [0], "positions": [0]}}
    with ServerThread("demo") as off:
        answer = off.post(GENERATE, {"token_ids": [5], "sampling_params": chosen})
    assert answer.status_code == 400 and "--max-hidden-state-bytes" in answer.text
