"""prime-rl's `renderers`: renders messages itself, sends ids to the token route, and checks the reply strictly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError
from renderers import DefaultRendererConfig, OverlongPromptError, create_renderer
from renderers.client import generate
from report import Report
from transformers import AutoTokenizer

QUESTION = "What is 47 + 38?"


async def single(report: Report, client: AsyncOpenAI, renderer: Any) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"client": client, "renderer": renderer, "messages": messages, "model": "demo"}
    answer = await generate(**options, sampling_params={"temperature": 0.0, "max_tokens": 8})
    report.check("content", answer["content"].strip() == "85")
    report.check("a logprob per token", len(answer["completion_logprobs"]) == len(answer["completion_ids"]))
    report.check("finish_reason", answer["finish_reason"] == "stop")
    chat = httpx.post(
        f"{report.url}/v1/chat/completions", json={"messages": messages, "temperature": 0, "return_token_ids": True}
    ).json()
    report.check("its prompt is the server's own", answer["prompt_ids"] == chat["prompt_token_ids"])
    report.check("its tokens are the chat's", answer["completion_ids"] == chat["choices"][0]["token_ids"])
    headers = {"x-session-id": "traj-1", "X-data-parallel-rank": "0"}
    params = {"temperature": 1.0, "max_tokens": 8, "seed": 4, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    salted = [
        await generate(**options, sampling_params=params, cache_salt=salt, priority=0, extra_headers=headers)
        for salt in ("3", "4", None)
    ]
    report.check(
        "salts change nothing",
        all(completion["completion_ids"] == salted[0]["completion_ids"] for completion in salted),
    )
    report.check(
        "nor a bit", all(completion["completion_logprobs"] == salted[0]["completion_logprobs"] for completion in salted)
    )


async def turns(report: Report, client: AsyncOpenAI, renderer: Any) -> None:
    ids = renderer.render([{"role": "user", "content": QUESTION}], add_generation_prompt=True).token_ids
    for turn in range(4):
        answer = await generate(
            client=client,
            renderer=renderer,
            messages=[],
            model="demo",
            prompt_ids=ids,
            sampling_params={"temperature": 1.0, "max_tokens": 12, "seed": turn},
        )
        report.check(f"turn {turn} goes on from the ids", answer["prompt_ids"] == ids)
        ids = ids + answer["completion_ids"] + [198]


async def masks(report: Report, client: AsyncOpenAI, renderer: Any) -> None:
    params = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "top_p": 0.9, "top_k": 20}
    options: dict[str, Any] = {
        "client": client,
        "renderer": renderer,
        "messages": [{"role": "user", "content": QUESTION}],
        "model": "demo",
    }
    answer = await generate(**options, sampling_params=params | {"return_sampling_mask": True})
    ids, rows = answer["completion_ids"], answer["sampling_mask"]
    report.check("a sampling mask per token", len(rows) == len(ids))
    report.check("that has the token", all(token in row for token, row in zip(ids, rows, strict=True)))
    request = params | {"return_sampling_mask": True, "logprobs": 0, "logprobs_mode": "temperature"}
    body = {"token_ids": answer["prompt_ids"], "sampling_params": request}
    choice = httpx.post(f"{report.url}/inference/v1/generate", json=body).json()["choices"][0]
    report.check("the masks are those of the reply", choice["sampling_mask"] == rows and choice["token_ids"] == ids)
    sums = [kept + drawn for kept, drawn in zip(choice["kept_logprob"], choice["sampling_logprobs"], strict=True)]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    report.check(
        "kept_logprob leads from them to the whole vocabulary",
        all(
            abs(one - other) < 1e-5 and kept <= 0.0
            for one, other, kept in zip(sums, logprobs, choice["kept_logprob"], strict=True)
        ),
    )
    plain = await generate(**options, sampling_params=params)
    report.check("and changes none", plain["completion_ids"] == ids and plain["sampling_mask"] is None)


async def refusals(report: Report, client: AsyncOpenAI, renderer: Any) -> None:
    options: dict[str, Any] = {"client": client, "renderer": renderer, "messages": [], "model": "demo"}
    try:
        await generate(**options, prompt_ids=[5] * 4000)
    except OverlongPromptError as error:
        report.check("max_model_len is found in /v1/models", error.max_prompt_len == 2048)
    for ids, limit in (([5] * 4000, 10**6), ([10**6], None), ([], None)):
        try:
            await generate(**options, prompt_ids=ids, max_prompt_len=limit)
        except BadRequestError as error:
            report.check(f"{len(ids)} ids are refused by name", error.param == "token_ids")
        else:
            report.check("must be refused", False)


async def crowd(report: Report, client: AsyncOpenAI, renderer: Any) -> None:
    async def one(i: int) -> Any:
        return await generate(
            client=client,
            renderer=renderer,
            messages=[{"role": "user", "content": f"{i} + {i}"}],
            model="demo",
            sampling_params={"temperature": 1.0, "max_tokens": 16, "seed": i},
        )

    together = await asyncio.gather(*[one(i) for i in range(64)])
    alone = [await one(i) for i in range(64)]
    keys = ("completion_ids", "completion_logprobs", "content")
    same = json.dumps([[a[key] for key in keys] for a in together]) == json.dumps(
        [[a[key] for key in keys] for a in alone]
    )
    report.check("64 rollouts at once are what they are alone", same)


async def run(report: Report) -> None:
    tokenizer = AutoTokenizer.from_pretrained(report.model_dir)
    renderer = create_renderer(tokenizer, DefaultRendererConfig())
    async with AsyncOpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0) as client:
        await single(report, client, renderer)
        await turns(report, client, renderer)
        await masks(report, client, renderer)
        await refusals(report, client, renderer)
        await crowd(report, client, renderer)


def main() -> None:
    report = Report()
    asyncio.run(run(report))
    report.done("renderers", "openai", "transformers")


if __name__ == "__main__":
    main()
