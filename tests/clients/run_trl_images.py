"""TRL's client with pictures: processed by render, placed in the ids as its trainer does, and used to generate."""

from __future__ import annotations

from typing import Any

import trl.generation.vllm_client as module
from accelerate import PartialState
from PIL import Image
from report import Report
from transformers import AutoTokenizer
from trl.generation.vllm_generation import VLLMGeneration


def picture(width: int, height: int) -> Any:
    return Image.linear_gradient("L").resize((width, height)).convert("RGB")


class Processor:
    """What the trainer's code asks of a model's processor."""

    def __init__(self, tokenizer: Any, image_token: str) -> None:
        self.tokenizer, self.image_token = tokenizer, image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)


def main() -> None:
    report = Report()
    PartialState(cpu=True)
    module.is_vllm_available = lambda *_, **__: True
    client = module.VLLMClient(base_url=report.url)
    tokenizer = AutoTokenizer.from_pretrained(report.model_dir)
    one, two = picture(40, 32), picture(60, 24)
    talks = [
        [{"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image", "image": one}]}],
        [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "image", "image": two}]}],
    ]
    chats = client.chat(talks, n=2, max_tokens=8, logprobs=0, generation_kwargs={"seed": 3})
    report.check("chat: two choices of each", len(chats["completion_ids"]) == 4)
    features = client.image_features([[one], [one, two], None])
    report.check(
        "image_features: as many as pictures",
        [len(feature["mm_hashes"]["image"]) for feature in features[:2]] == [1, 2],
    )
    report.check("image_features: none without pictures", features[2] is None)
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.processing_class = Processor(tokenizer, "<|image_pad|>")
    prompts = chats["prompt_ids"]
    placed = [generation._place_features(feature, ids) for feature, ids in zip(features[:2], prompts, strict=True)]
    actual = client.generate(prompts, features=placed, n=2, max_tokens=8, logprobs=0, generation_kwargs={"seed": 3})
    report.check("generate: the chat's tokens", actual["completion_ids"] == chats["completion_ids"])
    report.check("generate: the chat's logprobs", actual["logprobs"] == chats["logprobs"])
    mixed = client.generate(
        [prompts[0], [5, 6, 7]], features=[placed[0], None], max_tokens=8, generation_kwargs={"seed": 3}
    )
    report.check("a prompt without pictures beside one with", mixed["completion_ids"][0] == actual["completion_ids"][0])
    client.close_communicator()
    report.done("trl", "pillow", "transformers")


if __name__ == "__main__":
    main()
