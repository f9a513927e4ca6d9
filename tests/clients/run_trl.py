"""TRL's clients of a vLLM server, as far as they need no CUDA: the NCCL group and what goes through it are left out.

TRL asks whether vLLM is installed where the client runs; it is not here, so that one question is answered for it.
"""

from __future__ import annotations

import math
from typing import Any

import trl.generation.vllm_client as module
from accelerate import PartialState
from report import Report
from transformers import AutoTokenizer
from trl.experimental.async_distillation.vllm_client import VLLMClient as DistillationClient
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient

QUESTIONS = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((47, 38), (12, 13), (60, 21))]


def finite(values: Any) -> bool:
    return all(math.isfinite(value) and value <= 0 for sequence in values for row in sequence for value in row)


def generates(report: Report, client: Any, tokenizer: Any) -> None:
    prompts = [tokenizer.apply_chat_template(q, add_generation_prompt=True, return_dict=False) for q in QUESTIONS]
    texts = [tokenizer.apply_chat_template(q, add_generation_prompt=True, tokenize=False) for q in QUESTIONS]
    for inputs in (prompts, texts):
        actual = client.generate(inputs, n=2, max_tokens=8, logprobs=0, generation_kwargs={"seed": 3})
        report.check("generate: prompts come back", actual["prompt_ids"] == prompts)
        report.check("generate: prompt-major choices", len(actual["completion_ids"]) == 6)
        firsts = [[row[0] for row in ids] for ids in actual["logprob_token_ids"]]
        report.check("generate: logprobs of the drawn tokens", firsts == actual["completion_ids"])
        report.check("generate: finite", finite(actual["logprobs"]))
    wide = client.generate(
        prompts, max_tokens=8, logprobs=5, temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1
    )
    report.check("generate: alternatives", all(5 <= len(row) <= 6 for rows in wide["logprobs"] for row in rows))
    report.check("generate: without logprobs", client.generate(prompts, logprobs=None)["logprobs"] is None)
    plain = client.generate(prompts, max_tokens=8, generation_kwargs={"seed": 11})
    tokens = client.generate(prompts, features=[None] * 3, max_tokens=8, generation_kwargs={"seed": 11})
    report.check(
        "generate with features None: the token route's ids", tokens["completion_ids"] == plain["completion_ids"]
    )
    report.check("and logprobs", tokens["logprobs"] == plain["logprobs"])
    several = client.generate(prompts, features=[None] * 3, n=2, max_tokens=4, logprobs=2)
    report.check("its choices are all there", len(several["completion_ids"]) == 6)


def chats(report: Report, client: Any, tokenizer: Any) -> None:
    actual = client.chat(QUESTIONS, n=1, temperature=0.0, max_tokens=8, logprobs=0)
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in actual["completion_ids"]]
    report.check("chat: answers", answers == ["85", "25", "81"])
    report.check("chat: finite", finite(actual["logprobs"]))
    prompts = [tokenizer.apply_chat_template(q, add_generation_prompt=True, return_dict=False) for q in QUESTIONS]
    report.check("chat: prompts", actual["prompt_ids"] == prompts)
    wide = client.chat(QUESTIONS, n=2, temperature=1.0, max_tokens=8, logprobs=3, chat_template_kwargs={"a": 1})
    report.check("chat: alternatives", all(3 <= len(row) <= 4 for rows in wide["logprobs"] for row in rows))
    report.check("chat: without logprobs", client.chat(QUESTIONS, logprobs=None)["logprobs"] is None)


def scores(report: Report, client: Any) -> None:
    sequences = [[5, 20, 31, 44, 7, 9], [60, 61, 62], [7] * 40]
    lengths = [3, 1, 20]
    actual = client.get_sequence_logprobs(sequences, lengths, top_logprobs=5)
    for chunk in (1, 2):
        again = client.get_sequence_logprobs(sequences, lengths, top_logprobs=5, chunk_size=chunk)
        report.check(f"get_sequence_logprobs in chunks of {chunk}", again == actual)
    report.check("positions", [len(rows) for rows in actual["logprobs"]] == [3, 2, 20])
    report.check("alternatives", all(len(row) == 5 for rows in actual["logprobs"] for row in rows))
    report.check(
        "the tokens' own", actual["actual_token_ids"][0] == [[44], [7], [9]] and finite(actual["actual_logprobs"])
    )
    top_20 = client.get_sequence_logprobs(sequences, lengths, top_logprobs=20)
    report.check(
        "more alternatives begin alike",
        all(
            wide[:5] == row
            for rows, wides in zip(actual["logprobs"], top_20["logprobs"], strict=True)
            for row, wide in zip(rows, wides, strict=True)
        ),
    )


def controls(report: Report, client: Any) -> None:
    """What needs no NCCL of the calls around a weight update, as far as the server has the routes."""
    for kind in (AsyncClient, DistillationClient):
        other = kind(report.url, server_timeout=10)
        other.wait_for_server_ready()
        report.check(f"{kind.__module__}: max_model_len", other.get_max_model_len() == 2048)
        if report.serves("/pause") and report.serves("/resume"):
            other.pause()
            other.resume()
            report.check("pause and resume")
        if report.serves("/get_world_size"):
            report.check("get_world_size", other.get_world_size() == 1)
    if report.serves("/reset_prefix_cache"):
        client.reset_prefix_cache()
        report.check("reset_prefix_cache")
    if report.serves("/get_world_size"):
        report.check("get_world_size", client.get_world_size() == 1)
    refused = client.session.post(f"{report.url}/v1/completions", json={"prompt": [[1]], "max_tokens": 0})
    report.check("refusals are not tried again", refused.status_code == 400)


def main() -> None:
    report = Report()
    PartialState(cpu=True)  # its logging wants one
    module.is_vllm_available = lambda *_, **__: True
    client = module.VLLMClient(base_url=report.url)
    report.check("the served model", client.model == "demo")
    tokenizer = AutoTokenizer.from_pretrained(report.model_dir)
    generates(report, client, tokenizer)
    chats(report, client, tokenizer)
    scores(report, client)
    controls(report, client)
    client.close_communicator()
    report.done("trl", "transformers", "torch", "requests")


if __name__ == "__main__":
    main()
