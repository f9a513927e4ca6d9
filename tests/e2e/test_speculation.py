"""A server with and one without speculation: every reply is equal, and drafts are accepted.  Only `==`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Served
from tests.threads import ServerThread
from tests.tiers import slow_after
from tokserve import LLM, SamplingParams
from tokserve.base.errors import RequestError, StartError
from tokserve.cli.main import main as cli

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


class Pair:
    """The same request to both servers."""

    def __init__(self, plain: Served, drafting: Served) -> None:
        self.plain, self.drafting = plain, drafting

    def post(self, path: str, body: dict[str, Any], **drafts: Any) -> dict[str, Any]:
        """The reply of the one with drafts, which equals that of the one without."""
        expected = comparable(httpx.post(self.plain.url + path, json=body, timeout=60).json())
        response = httpx.post(self.drafting.url + path, json=body | drafts, timeout=60)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        assert comparable(reply) == expected
        return reply

    def count(self, name: str) -> float:
        """A counter of the server that speculates, over all labels."""
        before, now = -1.0, self._read(name)
        while now != before:  # the engine sends its last counters when it is idle, after the reply
            time.sleep(0.1)
            before, now = now, self._read(name)
        return now

    def _read(self, name: str) -> float:
        text = httpx.get(self.drafting.url + "/metrics", timeout=60).text
        return sum(float(value) for value in re.findall(rf"^vllm:spec_decode_{name}_total\S* (\S+)$", text, re.M))


def comparable(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what differs between two requests, and without what only a prediction adds."""
    usage = {name: value for name, value in reply["usage"].items() if name != "completion_tokens_details"}
    usage.pop("prompt_tokens_details")  # the two servers have seen other requests before
    return {name: value for name, value in reply.items() if name not in ("id", "request_id", "created")} | {
        "usage": usage
    }


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        ServerThread("demo", "--spec-method", "none") as plain,
        ServerThread("demo") as drafting,
    ):
        yield Pair(plain, drafting)


def generate_body(**params: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 40, "ignore_eos": True, "seed": 3} | params}


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", slow_after([{"temperature": 0.5, "logprobs": 2, "n": 2, "frequency_penalty": 0.4}, {}], 1), ids=str
)
def test_generate_with_drafts_of_all_kinds(pair: Pair, params: dict[str, Any]) -> None:
    body = generate_body(**params)
    output = pair.post(GENERATE, body)["choices"][0]["token_ids"]
    before = pair.count("num_accepted_tokens")
    for drafts in (output, output[:20] + [9] * 20, output[7:], [3] * 30, [], output * 3):
        pair.post(GENERATE, body, draft_token_ids=drafts, cache_salt=f"{len(drafts)}{drafts[:3]}")
    assert pair.count("num_accepted_tokens") >= before + 30
    accepted = pair.count("num_accepted_tokens")
    assert pair.count("num_accepted_tokens_per_pos") == accepted <= pair.count("num_draft_tokens")


def test_the_same_prompt_again_is_drafted_from_its_last_output(pair: Pair) -> None:
    body = generate_body(temperature=1.5, seed=11) | {"token_ids": [9, 8, 9, 4]}
    pair.post(GENERATE, body)
    before = pair.count("num_accepted_tokens")
    pair.post(GENERATE, body)
    assert pair.count("num_accepted_tokens") >= before + 30, "the seed is the same"
    assert post(pair, "/reset_prefix_cache", reset_external=True) == {"success": True}


def post(pair: Pair, path: str, **body: Any) -> Any:
    return httpx.post(pair.drafting.url + path, json=body, timeout=60).json()


@pytest.mark.slow
def test_a_corpus_is_added_and_removed(pair: Pair) -> None:
    body = generate_body(temperature=1.3, seed=12) | {"token_ids": [4, 4, 9]}
    output = pair.post(GENERATE, body, cache_salt="x")["choices"][0]["token_ids"]
    corpus = {"draft_group": "g", "token_ids": [output, [3, 4, 5, 6]], "cache_salt": "y"}
    assert post(pair, "/add_draft_corpus", **corpus) == {"outputs": 2}
    before = pair.count("num_accepted_tokens")
    pair.post(GENERATE, body, draft_group="g", cache_salt="y")
    assert pair.count("num_accepted_tokens") >= before + 30
    assert post(pair, "/remove_draft_corpus", draft_group="g") == {"removed": 3}
    before = pair.count("num_accepted_tokens")
    pair.post(GENERATE, body, draft_group="g", cache_salt="y")
    assert pair.count("num_accepted_tokens") <= before + 20
    assert post(pair, "/add_draft_corpus", draft_group="g", token_ids=[[1 << 20]])["error"]["param"] == "token_ids[0]"


@pytest.mark.slow
def test_predictions(pair: Pair) -> None:
    body = {"messages": [{"role": "user", "content": "reverse: stone"}], "max_tokens": 30, "seed": 1}
    text = pair.post(CHAT, body)["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text[:5]}, {"type": "text", "text": "??"}], "nothing of it", ""):
        reply = pair.post(CHAT, body, prediction={"type": "content", "content": content})
        details = reply["usage"]["completion_tokens_details"]
        assert min(details.values()) >= 0
        if content == text:
            assert details["accepted_prediction_tokens"] > 0 == details["rejected_prediction_tokens"]
    completion = {"prompt": "reverse: stone", "max_tokens": 20, "seed": 2, "n": 3}
    reply = pair.post(COMPLETIONS, completion, prediction={"type": "content", "content": "enots"})
    details = reply["usage"]["completion_tokens_details"]
    predicted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert predicted == 3 * len(ids_of(pair, "enots"))


def ids_of(pair: Pair, text: str) -> list[int]:
    ids: list[int] = post(pair, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    return ids


REASONING = f"""
start: /[a-z ]{{4,18}}/ "</think>" answer
answer: %json {json.dumps(SCHEMA)}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", slow_after([{"grammar": REASONING}, {"json": SCHEMA}], 1), ids=["after reasoning", "answer"]
)
def test_drafts_under_a_grammar(pair: Pair, form: dict[str, Any]) -> None:
    """Drafts reach past the end of the reasoning: whole, shifted so that the end comes early, and wrong at the end."""
    body = generate_body(max_tokens=70, temperature=1.2, logprobs=1, structured_outputs=form)
    output = pair.post(GENERATE, body)["choices"][0]["token_ids"]
    before = pair.count("num_accepted_tokens")
    close = ids_of(pair, "</think>")
    end = next((i for i in range(len(output)) if output[i : i + len(close)] == close), 9)
    assert "json" in form or 4 <= end <= 30, "there is an end to cross"
    others = [output[:end] + [3] * 9, output[:end] + output[end + 1 :], output[: end + 1] + [7] * 9, close + output]
    for drafts in (output, output[2:], output[end - 2 :], [7] * 20, *others):
        pair.post(GENERATE, body, draft_token_ids=drafts, cache_salt=f"{len(drafts)}{drafts[:3]}")
    assert pair.count("num_accepted_tokens") > before + 10


def test_a_stream_with_drafts_has_the_same_tokens(pair: Pair) -> None:
    body = generate_body(seed=21)
    output = pair.post(GENERATE, body)["choices"][0]["token_ids"]
    streamed: list[int] = []
    drafts = {"stream": True, "draft_token_ids": output[:25] + output[:9]}
    with httpx.stream("POST", pair.drafting.url + GENERATE, json=body | drafts, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed += choice["token_ids"]
    assert streamed == output


@pytest.mark.slow
def test_the_benchmark_compares_replies(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--check-speculation",
        "--num-prompts",
        "6",
        "--input-len",
        "9",
        "--output-len",
        "30",
        "--logprobs",
        "1",
        "--n",
        "2",
    ]
    for backend in ("tokens", "openai", "openai-chat"):
        with pytest.raises(SystemExit) as ended:
            cli(["bench", "serve", "--base-url", pair.drafting.url, "--backend", backend, *flags])
        assert ended.value.code == 0
        assert "6 requests without and with speculation: equal" in capfd.readouterr().out


def report(reply: dict[str, Any]) -> dict[str, Any]:
    """What a reply says about its drafts, after checks that hold for all of them."""
    statistics: dict[str, Any] = reply["metrics"]["speculative_decoding"]
    histogram = statistics["acceptance_histogram"]
    assert sum(histogram) == statistics["num_spec_steps"] > 0
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    assert accepted == statistics["num_accepted_draft_tokens"] <= statistics["num_draft_tokens"]
    assert statistics["mean_acceptance_length"] == 1 + accepted / statistics["num_spec_steps"]
    assert statistics["draft_acceptance_rate"] == accepted / statistics["num_draft_tokens"]
    assert statistics["num_spec_tokens"] == 32
    return statistics


def test_token_replies_report_their_drafts(pair: Pair) -> None:
    body = generate_body(temperature=1.2, seed=44) | {"token_ids": [7, 7, 3]}
    assert "metrics" not in pair.post(GENERATE, body)
    output = pair.post(GENERATE, body)["choices"][0]["token_ids"]
    request = body | {"draft_token_ids": output[:30], "spec_decode_metrics": "detailed", "cache_salt": "new"}
    statistics = report(post(pair, GENERATE, **request))
    assert statistics["sources"]["prediction"]["num_accepted_draft_tokens"] >= 25
    assert (
        sum(source["num_draft_tokens"] for source in statistics["sources"].values()) == statistics["num_draft_tokens"]
    )
    assert sum(statistics["per_step_accepted"]) == statistics["num_accepted_draft_tokens"]
    assert sum(statistics["per_step_drafted"]) == statistics["num_draft_tokens"]
    again = request | {"draft_token_ids": None, "stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(pair.drafting.url + GENERATE, json=again, timeout=60).text.split("\n")
    last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    assert report(last)["sources"]["history"]["num_accepted_draft_tokens"] > 20
    for off in ({"speculate": False}, {"draft_token_ids": None, "token_ids": [200], "cache_salt": "other"}):
        body = request | off | {"sampling_params": {"max_tokens": 1}}
        nothing = post(pair, GENERATE, **body)["metrics"]["speculative_decoding"]
        assert nothing["num_spec_steps"] == 0 and nothing["mean_acceptance_length"] is None
        assert nothing["acceptance_histogram"] == nothing["per_step_drafted"] == [] and nothing["sources"] == {}


@pytest.mark.slow
def test_text_replies_report_their_drafts(pair: Pair) -> None:
    message = {"role": "user", "content": "Reverse the word stone."}
    prediction = {"prediction": {"type": "content", "content": "enots"}}
    request = {"temperature": 0, "spec_decode_metrics": "summary"}
    expected = {
        CHAT: {"messages": [message]} | prediction,
        COMPLETIONS: {"prompt": "abcabcabcabc", "n": 3},
        "/v1/responses": {"input": [message]},
        "/v1/messages": {"messages": [message], "max_tokens": 20, "model": "demo"},
    }
    for path, body in expected.items():
        statistics = report(post(pair, path, **(body | request)))
        assert "per_step_drafted" not in statistics and "sources" not in statistics
        refused = httpx.post(pair.drafting.url + path, json=body | {"spec_decode_metrics": "all"}, timeout=60)
        assert refused.status_code == 400 and "spec_decode_metrics" in refused.text
        streamed = body | request | {"stream": True}
        if path in (CHAT, COMPLETIONS):
            streamed["stream_options"] = {"include_usage": True}
        text = httpx.post(pair.drafting.url + path, json=streamed, timeout=60).text
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        reports = [event.get("response", event) for event in events if '"metrics"' in json.dumps(event)]
        assert len(reports) == 1, path
        report(reports[0])


@pytest.mark.slow
def test_a_request_without_speculation(pair: Pair) -> None:
    body = generate_body(seed=33)
    output = pair.post(GENERATE, body)["choices"][0]["token_ids"]
    before = pair.count("num_draft_tokens")
    pair.post(GENERATE, body, draft_token_ids=output, speculate=False)
    assert pair.count("num_draft_tokens") == before


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (GENERATE, {"draft_token_ids": [5, 1 << 20]}, "draft_token_ids[1]"),
        (GENERATE, {"draft_token_ids": [-1]}, "draft_token_ids[0]"),
        (GENERATE, {"draft_token_ids": [5] * 5000}, "draft_token_ids"),
        (GENERATE, {"draft_token_ids": "5"}, "draft_token_ids"),
        (GENERATE, {"draft_group": ""}, "draft_group"),
        (CHAT, {"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        (CHAT, {"prediction": {"type": "content", "content": "x"}, "draft_token_ids": [5]}, "prediction"),
        (CHAT, {"draft_token_ids": [5, 1 << 20]}, "draft_token_ids[1]"),
    ],
)
def test_refusals(pair: Pair, path: str, fields: dict[str, Any], param: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    body = (generate_body() if path == GENERATE else chat) | fields
    response = httpx.post(pair.drafting.url + path, json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.slow
def test_the_offline_api() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=3, logprobs=1)
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    results = []
    configs: list[dict[str, Any]] = [
        {"method": "none"},
        {"method": "suffix", "num_speculative_tokens": 20},
        {"method": "self"},
        {"model": "demo", "num_speculative_tokens": 5, "quantization": "int8"},
    ]
    for config in configs:
        with LLM("demo", speculative_config=config) as llm:
            alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
            again = llm.generate([prompt | {"draft_token_ids": alone.token_ids}], params, use_tqdm=False)[0].outputs[0]
            results += [(c.token_ids, c.logprobs.token_logprobs.tobytes()) for c in (alone, again)]
            with pytest.raises(RequestError, match="draft_token_ids"):
                llm.generate([prompt | {"draft_token_ids": [1.5]}], params)
            metrics = llm.get_metrics()
            assert (sum(metrics["accepted_by_position"]) > 20) == (config.get("method") != "none")
            assert ("draft_model" in metrics["drafts_by_source"]) == (config.get("method") in ("self", None))
    assert len({ids for ids in map(str, results)}) == 1
    with pytest.raises(StartError, match="there is no method 'eagle3'; methods are suffix"):
        LLM("demo", speculative_config={"method": "eagle3", "num_speculative_tokens": 3})
