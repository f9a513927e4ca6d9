"""The shapes that SGLang's callers send (slime, miles, AReaL, verl, smg) against a real server with --sglang-api."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Served
from tests.replies import good
from tests.server.site import parse_events

IDS = [5, 20, 31, 44, 7]
SLIME = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 12,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


@pytest.fixture(scope="module")
def server(float32: Served) -> Served:
    return float32


def generate(server: Served, body: dict[str, Any], **params: Any) -> Any:
    return good(server.post("/generate", body | {"sampling_params": params}))


def test_slimes_rollout(server: Served) -> None:
    """Ids in, triples out; the logprobs are those of the temperature, and the same as the token route's."""
    body = {"input_ids": IDS, "return_logprob": True}
    answer = httpx.post(
        server.url + "/generate",
        json=body | {"sampling_params": SLIME | {"temperature": 0.6, "sampling_seed": 3}},
        headers={"X-SMG-Routing-Key": "group-1"},
        timeout=600,
    )
    reply = answer.json()
    info = reply["meta_info"]
    tokens = [entry[1] for entry in info["output_token_logprobs"]]
    assert tokens == reply["output_ids"] and isinstance(reply["text"], str)
    assert info["finish_reason"]["type"] in ("stop", "length") and info["weight_version"] == "0"
    same = server.generate(IDS, temperature=0.6, seed=3, max_tokens=12, logprobs=0, logprobs_mode="temperature")
    choice = same["choices"][0]
    assert choice["token_ids"] == tokens
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [
        entry[0] for entry in info["output_token_logprobs"]
    ]
    continued = generate(server, body | {"input_ids": IDS + tokens}, **SLIME)
    assert continued["meta_info"]["prompt_tokens"] == len(IDS) + len(tokens)


def test_sglang_replies_report_their_drafts(server: Served) -> None:
    """The option is for all routes."""
    body = {"input_ids": [5, 6] * 12}
    generate(server, body, max_new_tokens=30, temperature=0, ignore_eos=True)
    counts = generate(server, body, max_new_tokens=30, temperature=0, ignore_eos=True)["meta_info"]
    histogram = counts["spec_correct_drafts_histogram"]
    assert sum(histogram) == counts["spec_verify_ct"] > 0
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    assert counts["spec_accept_length"] == 1 + accepted / counts["spec_verify_ct"] > 2
    assert 0 < counts["spec_accept_rate"] <= 1
    reply = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": [5, 6] * 9, "temperature": 0}, timeout=600
    ).json()
    assert reply["metrics"]["speculative_decoding"]["per_step_drafted"]
    request = {"prompt": [5, 6], "spec_decode_metrics": "none"}
    assert "metrics" not in httpx.post(f"{server.url}/v1/completions", json=request, timeout=600).json()


def test_sampling_masks_add_up(server: Served) -> None:
    info = generate(
        server, {"input_ids": IDS, "return_sampling_mask": True, "return_logprob": True}, top_k=4, max_new_tokens=6
    )["meta_info"]
    masks, logprobs = info["output_token_sampling_mask"], info["output_token_sampling_logprobs"]
    tokens = [entry[1] for entry in info["output_token_logprobs"]]
    assert info["output_token_sampling_mask_length"] == len(tokens) == len(masks) == len(logprobs)
    for token, mask, logprob, entry in zip(tokens, masks, logprobs, info["output_token_logprobs"], strict=True):
        assert token in mask and len(mask) <= 4 and entry[0] <= logprob <= 0


def test_areals_scoring(server: Served) -> None:
    """One token, the prompt's last logprobs: the first entry is null, the others are the prompt logprobs."""
    target = 3
    body = {
        "input_ids": IDS,
        "image_data": [],
        "return_logprob": True,
        "logprob_start_len": len(IDS) - target - 1,
        "top_logprobs_num": 0,
        "stream": False,
    }
    info = generate(server, body, max_new_tokens=1, temperature=0.7)["meta_info"]
    entries = info["input_token_logprobs"]
    assert entries[0][0] is None and [entry[1] for entry in entries] == IDS[-target - 1 :]
    scored = server.generate(IDS, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    expected = [scored[index][str(IDS[index])]["logprob"] for index in range(len(IDS) - target, len(IDS))]
    assert [entry[0] for entry in entries[1:]] == expected and all(map(math.isfinite, expected))


def test_a_stream_ends_with_the_whole_reply(server: Served) -> None:
    body = {"text": "Hello", "return_logprob": True, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    reply = server.post("/generate", body).json()
    events = parse_events(server.post("/generate", body | {"stream": True}).text)
    assert events[-1]["output_ids"] == reply["output_ids"] and events[-1]["text"] == reply["text"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == reply["meta_info"]["output_token_logprobs"]
    assert all(before["text"] in after["text"] for before, after in pairwise(events))


def test_a_batch_is_what_its_prompts_are_alone(server: Served) -> None:
    params = {"temperature": 0, "max_new_tokens": 6}
    alone = [generate(server, {"text": text}, **params)["output_ids"] for text in ("One", "The second")]
    both = generate(server, {"text": ["One", "The second"]}, **params)
    assert [one["output_ids"] for one in both] == alone


def test_abort_all_returns_partial_outputs(server: Served) -> None:
    """slime at the end of a rollout: what runs comes back with status 200."""
    with ThreadPoolExecutor(2) as pool:
        body = {"input_ids": IDS, "return_logprob": True}
        long = {"max_new_tokens": 1900, "ignore_eos": True, "temperature": 2.0}  # no draft of earlier outputs is right
        running = [pool.submit(generate, server, body, **long) for _ in range(2)]
        while sum(server.get("/v1/loads").json()["loads"][0][name] for name in ("num_running_reqs",)) < 2:
            assert not any(one.done() for one in running)
            time.sleep(0.01)
        answer = server.post("/abort_request", {"rid": "", "abort_all": True})
        assert answer.status_code == 200 and answer.content == b""
        for one in running:
            reply = one.result()
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"]) < 1900


def test_an_update_between_pause_and_continue(server: Served, demo_dir: Path) -> None:
    """AReaL's and slime's order of calls, from disk."""
    before = generate(server, {"input_ids": IDS}, temperature=0, max_new_tokens=6)["output_ids"]
    assert server.post("/pause_generation", {}).json()["status"] == "ok"
    flushed = httpx.get(server.url + "/flush_cache", timeout=600)
    assert flushed.status_code == 200
    assert server.get("/health_generate").status_code == 503
    body = {"model_path": str(demo_dir), "load_format": "auto", "abort_all_requests": True, "weight_version": "step-2"}
    updated = server.post("/update_weights_from_disk", body)
    assert updated.status_code == 200 and updated.json()["success"] is True, updated.text
    assert server.post("/continue_generation", {}).json()["status"] == "ok"
    reply = generate(server, {"input_ids": IDS}, temperature=0, max_new_tokens=6)
    assert reply["output_ids"] == before and reply["meta_info"]["weight_version"] == "step-2"
    assert server.get("/get_weight_version").json() == {"weight_version": "step-2"}
    assert server.post("/update_weight_version", {"new_version": "0"}).json()["success"] is True
    missing = server.post("/update_weights_from_disk", {"model_path": "/no/such/directory"})
    assert missing.status_code == 400 and missing.json()["success"] is False


def test_memory_is_released_and_resumed(server: Served, demo_dir: Path) -> None:
    """verl's and slime's order when a trainer shares the device: all is released, weights come first."""
    before = generate(server, {"input_ids": IDS}, temperature=0, max_new_tokens=6)["output_ids"]
    assert server.post("/release_memory_occupation", {}).json() is None
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.post("/update_weights_from_disk", {"model_path": str(demo_dir)}).status_code == 200
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}).status_code == 200
    assert generate(server, {"input_ids": IDS}, temperature=0, max_new_tokens=6)["output_ids"] == before
    assert server.get("/health_generate").status_code == 200


def test_a_router_recognises_the_server(server: Served) -> None:
    assert server.get("/v1/models").json()["data"][0]["owned_by"] == "sglang"
    info = server.get("/server_info").json()
    assert (info["tp_size"], info["dp_size"], info["disaggregation_mode"]) == (1, 1, "null")
    assert server.get("/model_info").json()["is_generation"] is True
    assert server.get("/v1/loads?include=core").json()["loads"][0]["max_total_num_tokens"] > 0
