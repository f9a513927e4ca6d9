"""verifiers' parser of rollouts, as prime-rl uses it, on a server started with --return-sampling-mask."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI
from renderers import DefaultRendererConfig, create_renderer
from renderers.client import generate
from report import Report
from transformers import AutoTokenizer
from verifiers.v1.clients.train import response_from_generate

PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_k": 64, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 0.0, "top_k": 5},
]


async def run(report: Report) -> None:
    renderer = create_renderer(AutoTokenizer.from_pretrained(report.model_dir), DefaultRendererConfig())
    async with AsyncOpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0) as client:
        for number, params in enumerate(PARAMS):
            result = await generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": "What is 47 + 38?"}],
                model="demo",
                sampling_params=params | {"max_tokens": 12, "seed": number},
            )
            tokens = response_from_generate(result, "demo").tokens
            mask, ids = tokens.sampling_mask, tokens.completion_ids
            report.check(f"{params}: a count per token", len(mask.counts) == len(ids) > 0)
            report.check("counts and ids agree", int(mask.counts.sum()) == len(mask.ids))
            report.check("no more than top_k", mask.counts.max() <= params["top_k"] and mask.counts.min() > 0)
            ends = mask.counts.cumsum()
            rows = [mask.ids[end - count : end].tolist() for count, end in zip(mask.counts, ends, strict=True)]
            report.check("rows have the tokens", all(token in row for token, row in zip(ids, rows, strict=True)))


def main() -> None:
    report = Report()
    asyncio.run(run(report))
    report.done("verifiers", "renderers")


if __name__ == "__main__":
    main()
