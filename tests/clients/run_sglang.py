"""The types that SGLang publishes of its HTTP interface (`sglang.api.v1.api_types`): they write the requests, and read
the replies of a server with --sglang-api."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from itertools import pairwise
from typing import Any

import httpx
from report import Report

IDS = [5, 20, 31, 44, 7]


def contract() -> Any:
    """The module with the types, without its package, which needs a GPU's libraries."""
    path = str(distribution("sglang").locate_file("sglang/api/v1/api_types.py"))
    spec = importlib.util.spec_from_file_location("api_types", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["api_types"] = module  # msgspec looks annotations up there
    spec.loader.exec_module(module)
    return module


class Sglang:
    """Calls with the contract's types."""

    def __init__(self, url: str, types: Any) -> None:
        self.types = types
        self.http = httpx.Client(base_url=url, timeout=60)

    def body(self, **fields: Any) -> dict[str, Any]:
        """The request that the types write; their decoder takes it too."""
        params = fields.pop("sampling_params", {})
        many = [self.types.SamplingParams(**one) for one in params] if isinstance(params, list) else None
        fields["sampling_params"] = many or self.types.SamplingParams(**params)
        written = self.types.GenerateRequest(**fields).to_json_value()
        self.types.GenerateRequest.from_json_value(json.loads(json.dumps(written)))
        actual: dict[str, Any] = written
        return actual

    def generate(self, **fields: Any) -> Any:
        """A reply, or the list of them."""
        answer = self.http.post("/generate", json=self.body(**fields))
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        read = self.types.GenerateResponse.from_json_value
        return [read(one) for one in reply] if isinstance(reply, list) else read(reply)

    def stream(self, **fields: Any) -> Iterator[Any]:
        """The events of a stream."""
        with self.http.stream("POST", "/generate", json=self.body(stream=True, **fields)) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield self.types.GenerateResponse.from_json_value(json.loads(line.removeprefix("data: ")))
        assert answer.status_code == 200

    def get(self, path: str, kind: str) -> Any:
        """A reply to GET, read as a type of the contract."""
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return getattr(self.types, kind).from_json_value(answer.json())


def replies(report: Report, sglang: Sglang) -> None:
    types = sglang.types
    greedy = {"temperature": 0.0, "max_new_tokens": 8}
    scored: dict[str, Any] = {
        "input_ids": IDS,
        "sampling_params": greedy,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
    }
    reply = sglang.generate(**scored)
    meta = reply.meta_info
    report.check("ids, and their prompt", reply.output_ids and reply.prompt_token_ids == IDS)
    report.check("counts", (meta.prompt_tokens, meta.completion_tokens) == (len(IDS), len(reply.output_ids)))
    report.check("output logprobs", [one.token_id for one in meta.output_token_logprobs] == reply.output_ids)
    report.check("their texts", all(one.text is not None for one in meta.output_token_logprobs))
    report.check("their length", meta.output_token_logprobs_length == len(reply.output_ids))
    report.check("input logprobs", [one.token_id for one in meta.input_token_logprobs] == IDS)
    report.check("the first has none", meta.input_token_logprobs[0].logprob is None)
    report.check("alternatives", all(len(one) == 2 for one in meta.output_top_logprobs))
    named = sglang.generate(input_ids=IDS, sampling_params=greedy, return_logprob=True, token_ids_logprob=[5, 6])
    rows = [[one.token_id for one in row] for row in named.meta_info.output_token_ids_logprobs]
    report.check("named ids", rows == [[5, 6]] * len(named.output_ids))
    report.check("a latency and a version", meta.e2e_latency > 0 and meta.weight_version is not None)
    spans = [(one.start, one.end) for one in meta.weight_versions]
    report.check("spans of versions", spans == [(0, len(reply.output_ids))])
    ends = (types.FinishStop, types.FinishLength)
    report.check("a reason", isinstance(meta.finish_reason, ends) or meta.finish_reason is not None)
    events = list(sglang.stream(**scored))
    report.check("a stream ends with the whole reply", events[-1].output_ids == reply.output_ids)
    report.check("and its logprobs", events[-1].meta_info.output_token_logprobs == meta.output_token_logprobs)
    texts = [event.text for event in events]
    report.check("its events are cumulative", all(b.startswith(a) for a, b in pairwise(texts)))
    short = sglang.generate(text="Hello", sampling_params={"max_new_tokens": 3, "ignore_eos": True, "n": 2})
    report.check("n", len(short) == 2 and all(one.meta_info.completion_tokens == 3 for one in short))
    params = [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 4, "ignore_eos": True}]
    batch = sglang.generate(text=["One", "Two"], sampling_params=params)
    report.check("a batch", [one.meta_info.completion_tokens for one in batch] == [2, 4])
    none = sglang.generate(
        input_ids=IDS, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=1
    )
    report.check("scoring alone", len(none.meta_info.input_token_logprobs) == len(IDS) - 1 and not none.output_ids)
    seeded = [sglang.generate(input_ids=IDS, sampling_params={"sampling_seed": 7, "max_new_tokens": 12}) for _ in "ab"]
    report.check("a seed", seeded[0].output_ids == seeded[1].output_ids)
    choice = sglang.generate(text="x", sampling_params={"regex": "(yes|no)", "max_new_tokens": 8})
    report.check("a grammar", choice.text in ("yes", "no"))


def information(report: Report, sglang: Sglang) -> None:
    model = sglang.get("/model_info", "GetModelInfoResponse")
    report.check("/model_info", model.model_path and model.is_generation and model.weight_version is not None)
    for path in ("/server_info", "/get_server_info"):
        server = sglang.get(path, "GetServerInfoResponse")
        report.check(path, server.max_total_num_tokens > 0 and server.version and server.internal_states)
    card = sglang.types.ModelCard.from_json_value(sglang.http.get("/v1/models").json()["data"][0])
    report.check("/v1/models", card.id == "demo" and card.max_model_len > 0)
    report.check("its owner", sglang.http.get("/v1/models").json()["data"][0]["owned_by"] == "sglang")
    report.check("/health_generate", sglang.http.get("/health_generate").status_code == 200)
    abort = sglang.types.AbortRequest(rid="nobody").to_json_value()
    report.check("/abort_request", sglang.http.post("/abort_request", json=abort).status_code == 200)
    tokens = sglang.types.DetokenizeRequest(tokens=IDS).to_json_value()
    answer = sglang.http.post("/detokenize", json=tokens)
    text = sglang.types.DetokenizeResponse.from_json_value(answer.json()).text
    report.check("/detokenize", answer.status_code == 200 and text)


def refusals(report: Report, sglang: Sglang) -> None:
    for body, word in (
        ({"sampling_params": {}}, "input_ids"),
        ({"text": "x", "sampling_params": {"no_such": 1}}, "no_such"),
        ({"text": "x", "sampling_params": {"top_p": 7}}, "top_p"),
        ({"input_ids": [10**7]}, "input_ids"),
    ):
        answer = sglang.http.post("/generate", json=body)
        error = sglang.types.ErrorBody.from_json_value(answer.json()["error"])
        report.check(f"a 400 that names {word}", answer.status_code == 400 and word in error.message)


def main() -> None:
    report = Report()
    sglang = Sglang(report.url, contract())
    replies(report, sglang)
    information(report, sglang)
    refusals(report, sglang)
    report.done("sglang")


if __name__ == "__main__":
    main()
