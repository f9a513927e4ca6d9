"""Pictures from `renderers` and `verifiers`: the server fetches and processes them (`process_multimodal=False`)."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError
from PIL import Image
from renderers import Qwen3VLRendererConfig, create_renderer
from renderers.client import generate
from report import Report
from transformers import AutoTokenizer
from verifiers.v1.clients.train import response_from_generate


def picture(width: int, height: int, shade: int) -> dict[str, Any]:
    """A part of a message."""
    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).point(lambda value: (value + shade) % 256).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def run(report: Report) -> None:
    tokenizer = AutoTokenizer.from_pretrained(report.model_dir)
    renderer = create_renderer(tokenizer, Qwen3VLRendererConfig())
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "first "},
                picture(40, 32, 0),
                {"type": "text", "text": " second "},
                picture(60, 24, 9),
            ],
        }
    ]
    params = {"temperature": 1.0, "max_tokens": 8, "seed": 3}
    async with AsyncOpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {
            "client": client,
            "renderer": renderer,
            "model": "demo",
            "process_multimodal": False,
            "sampling_params": params,
        }
        answer = await generate(**options, messages=messages)
        body = {"messages": messages, "return_token_ids": True, "logprobs": True} | params
        chat = httpx.post(f"{report.url}/v1/chat/completions", json=body).json()
        report.check("its prompt is the server's own", answer["prompt_ids"] == chat["prompt_token_ids"])
        report.check("its tokens are the chat's", answer["completion_ids"] == chat["choices"][0]["token_ids"])
        logprobs = [token["logprob"] for token in chat["choices"][0]["logprobs"]["content"]]
        report.check("and the logprobs", answer["completion_logprobs"] == logprobs)
        image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        places = answer["mm_placeholders"]["image"]
        report.check(
            "a place for each picture",
            len(places) == 2
            and all(
                set(answer["prompt_ids"][place["offset"] : place["offset"] + place["length"]]) == {image}
                for place in places
            ),
        )
        report.check("the renderer's ids have one placeholder each", answer["renderer_prompt_ids"].count(image) == 2)
        tokens = response_from_generate(answer, "demo").tokens
        report.check(
            "verifiers reads prompt and completion",
            list(tokens.prompt_ids) == answer["prompt_ids"] and list(tokens.completion_ids) == answer["completion_ids"],
        )
        group = await asyncio.gather(
            *[
                generate(**options | {"sampling_params": params | {"seed": seed}}, messages=messages)
                for seed in range(16)
            ]
        )
        report.check(
            "16 rollouts of a picture",
            group[3]["completion_ids"] == answer["completion_ids"]
            and group[3]["completion_logprobs"] == answer["completion_logprobs"],
        )
        broken = [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
        ]
        try:
            await generate(**options, messages=broken)
        except BadRequestError as error:
            report.check("a broken picture is refused by name", error.param == "content_parts[0].url")
        else:
            report.check("must be refused", False)


def main() -> None:
    report = Report()
    asyncio.run(run(report))
    report.done("renderers", "verifiers", "pillow")


if __name__ == "__main__":
    main()
