"""Images in prompts and conversations of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.models.pictures import data_url, png, write_served
from tokserve import LLM, SamplingParams
from tokserve.base.errors import RequestError
from tokserve.client.async_llm import AsyncLLM

pytestmark = pytest.mark.usefixtures("engine_threads")

PAD, START, END = 288, 290, 291
ONE, TWO = png(40, 32), png(60, 24, seed=1)
PARAMS = SamplingParams(max_tokens=5, temperature=0.7, seed=3, logprobs=1, ignore_eos=True)
IDS = [5, START, PAD, END, 9, START, PAD, END, 7]


def pillow(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="bfloat16", max_model_len=512) as llm:
        yield llm


def prompt(*images: Any, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": IDS if ids is None else ids, "multi_modal_data": {"image": list(images)}} | more


@pytest.mark.slow
def test_all_forms_of_an_image_are_the_same(llm: LLM) -> None:
    one, two = pillow(ONE), pillow(TWO)
    forms = [(one, two), (ONE, TWO), (np.asarray(one.convert("RGB")), bytearray(TWO)), (data_url(ONE), data_url(TWO))]
    outputs = llm.generate([prompt(*images) for images in forms], PARAMS, use_tqdm=False)
    first = outputs[0]
    places = first.multi_modal_placeholders["image"]
    assert [first.prompt_token_ids[place.offset] for place in places] == [PAD, PAD]
    assert first.prompt_token_ids.count(PAD) == sum(place.length for place in places)
    for output in outputs[1:]:
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
        assert output.prompt_token_ids == first.prompt_token_ids
        assert (output.outputs[0].logprobs.token_logprobs == first.outputs[0].logprobs.token_logprobs).all()
    [other] = llm.generate(prompt(two, one), PARAMS, use_tqdm=False)
    assert other.prompt_token_ids != first.prompt_token_ids


@pytest.mark.slow
def test_a_conversation_is_its_prompt(llm: LLM) -> None:
    def talk(image: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": "see "}, image]}]

    forms = [
        {"type": "image", "image": pillow(ONE)},
        {"type": "image_pil", "image_pil": pillow(ONE)},
        {"type": "image_url", "image_url": {"url": data_url(ONE)}},
        {"type": "image", "image": ONE},
    ]
    outputs = llm.chat([talk(form) for form in forms], PARAMS, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1

    ids = outputs[0].prompt_token_ids
    short = [token for i, token in enumerate(ids) if token != PAD or ids[i - 1] != PAD]
    [same] = llm.generate(prompt(ONE, ids=short), PARAMS, use_tqdm=False)
    assert same.prompt_token_ids == ids and same.outputs[0].token_ids == outputs[0].outputs[0].token_ids

    async def streamed(engine: AsyncLLM) -> list[int]:
        async for output in engine.generate(prompt(ONE, ids=short), PARAMS):
            tokens = output.outputs[0].token_ids
        return tokens

    assert llm._wait(streamed(llm._llm)) == same.outputs[0].token_ids


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"multi_modal_data": {"video": [1]}}, "multi_modal_data.video"),
        ({"multi_modal_data": [ONE, TWO]}, "multi_modal_data"),
        ({"multi_modal_data": {"image": [ONE, 5]}}, "multi_modal_data.image[1]"),
        ({"multi_modal_data": {"image": [ONE, np.zeros((4, 4, 3))]}}, "multi_modal_data.image[1]"),
        ({"multi_modal_data": {"image": [ONE, b"x" * 99]}}, "multi_modal_data.image[1]"),
        ({"multi_modal_data": {"image": [ONE, "file:///etc/passwd"]}}, "multi_modal_data.image[1]"),
        ({"multi_modal_data": {"image": ONE}}, "prompts"),
        ({"multi_modal_data": {"image": [ONE, TWO]}, "multi_modal_uuids": {"image": ["a"]}}, "multi_modal_uuids.image"),
        ({"multi_modal_data": {"image": [ONE, TWO]}, "prompt_token_ids": ["a"]}, "token_ids"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([{"prompt_token_ids": IDS} | fields], PARAMS, use_tqdm=False)
    assert caught.value.field == field


def test_a_model_without_a_tower_takes_none(model: Path) -> None:
    with LLM(str(model), max_model_len=512, language_model_only=True) as text:
        with pytest.raises(RequestError, match="takes no images"):
            text.generate(prompt(ONE, TWO), PARAMS, use_tqdm=False)
        with pytest.raises(RequestError, match="takes no images"):
            text.chat([{"role": "user", "content": [{"type": "image", "image": data_url(ONE)}]}], use_tqdm=False)
