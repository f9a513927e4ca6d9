"""Images in bodies: the parts of each dialect, and placeholders in prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.text.checkpoints import write_chatml
from tokserve.base.errors import RequestError
from tokserve.dialects.anthropic.conversation import TurnMessages
from tokserve.dialects.anthropic.tool_list import ToolList
from tokserve.dialects.openai.response_history import InputMessages
from tokserve.dialects.openai.response_tools import ToolTable
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.images.parts import (
    ImageSlots,
    UnreadImage,
    anthropic_block,
    chat_part,
    check_count,
    content_parts,
    expand,
)
from tokserve.protocol.images import ImageUrl
from tokserve.text.tokenizer import Tokenizer

PIXEL = "data:image/png;base64,AAAA"
PAD = "<|image|>"
# as templates of models with images are written: parts are told apart by their keys
TEMPLATE = """
{%- for message in messages -%}
    <|im_start|>{{ message.role }}:
    {%- if message.content is string -%}
        {{ message.content }}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image_url' in part -%}
                <|image|>
            {%- elif 'text' in part -%}
                {{ part.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    directory = write_chatml(tmp_path_factory.mktemp("images"))
    return ChatTemplate(Tokenizer.load(directory), TEMPLATE)


def rendered(template: ChatTemplate, *messages: dict[str, Any]) -> tuple[str, list[ImageUrl]]:
    slots = ImageSlots(PAD)
    return template.text(messages, images=slots), slots.images


def error_of(template: ChatTemplate, *messages: dict[str, Any], images: bool = True) -> RequestError:
    with pytest.raises(RequestError) as caught:
        template.text(messages, images=ImageSlots(PAD) if images else None)
    return caught.value


@pytest.mark.parametrize(
    ("part", "image"),
    [
        ({"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, ImageUrl("u", "p.image_url.url")),
        ({"type": "image_url", "image_url": "u", "uuid": "mine"}, ImageUrl("u", "p.image_url", "mine")),
        ({"type": "input_image", "image_url": "u", "detail": "auto"}, ImageUrl("u", "p.image_url")),
        ({"type": "image", "image": "u"}, ImageUrl("u", "p.image")),
        ({"type": "image", "url": "u", "image": None}, ImageUrl("u", "p.url")),
    ],
)
def test_parts_of_a_chat(part: dict[str, Any], image: ImageUrl) -> None:
    assert chat_part("p", part) == image


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url"}, "p.image_url"),
        ({"type": "image_url", "image_url": {}}, "p.image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "p.image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "p.image_url.url"),
        ({"type": "image_url", "image_url": ["u"]}, "p.image_url"),
        ({"type": "image_url", "image_url": "u", "uuid": 7}, "p.uuid"),
        ({"type": "image_url", "image_url": "u", "uuid": ""}, "p.uuid"),
        ({"type": "image_url", "image_url": "u", "uuid": "x" * 257}, "p.uuid"),
        ({"type": "input_image", "file_id": "file-1"}, "p.file_id"),
        ({"type": "image"}, "p.image"),
    ],
)
def test_broken_parts_of_a_chat(part: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_part("p", part)
    assert caught.value.field == field and caught.value.message.startswith(field)


def test_anthropic_blocks() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    assert anthropic_block("b", {"type": "image", "source": source}) == ImageUrl(PIXEL, "b.source.data")
    source = {"type": "url", "url": "https://a.example/x.png"}
    image = ImageUrl("https://a.example/x.png", "b.source.url")
    assert anthropic_block("b", {"type": "image", "source": source}) == image


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({}, "b.source"),
        ({"source": "x"}, "b.source"),
        ({"source": {}}, "b.source.type"),
        ({"source": {"type": "file", "file_id": "f"}}, "b.source.type"),
        ({"source": {"type": "base64", "data": "AAAA"}}, "b.source.media_type"),
        ({"source": {"type": "base64", "media_type": "image/png,", "data": "AAAA"}}, "b.source.media_type"),
        ({"source": {"type": "base64", "media_type": "text/html", "data": "AAAA"}}, "b.source.media_type"),
        ({"source": {"type": "base64", "media_type": "image/png"}}, "b.source.data"),
        ({"source": {"type": "url"}}, "b.source.url"),
    ],
)
def test_broken_anthropic_blocks(block: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        anthropic_block("b", {"type": "image"} | block)
    assert caught.value.field == field


def test_content_parts() -> None:
    value = [{"type": "image_url", "url": "a", "uuid": "n"}, {"type": "image_url", "image_url": {"url": "b"}}]
    images = [ImageUrl("a", "content_parts[0].url", "n"), ImageUrl("b", "content_parts[1].image_url.url")]
    assert content_parts(value) == images and content_parts([]) == []


@pytest.mark.parametrize(
    ("value", "field", "code"),
    [
        ({}, "content_parts", None),
        (["x"], "content_parts[0]", None),
        ([{}], "content_parts[0].type", None),
        ([{"type": "text", "text": "x"}], "content_parts[0].type", None),
        ([{"type": "audio_url", "url": "x"}], "content_parts[0].type", "unsupported"),
        ([{"type": "video_url", "url": "x"}], "content_parts[0].type", "unsupported"),
        ([{"type": ["image_url"]}], "content_parts[0].type", None),
        ([{"type": "image_url"}], "content_parts[0].url", None),
        ([{"type": "image_url", "url": {"url": "x"}}], "content_parts[0].url", None),
        ([{"type": "image_url", "url": "x", "image_url": "y"}], "content_parts[0].image_url", None),
        ([{"type": "image_url", "url": "x", "detail": "low"}], "content_parts[0].detail", "unknown_field"),
    ],
)
def test_broken_content_parts(value: Any, field: str, code: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        content_parts(value)
    assert (caught.value.field, caught.value.code) == (field, code)


def test_a_missing_type_is_reported_as_missing() -> None:
    with pytest.raises(RequestError, match=r"content_parts\[0\]\.type is required"):
        content_parts([{}])
    with pytest.raises(RequestError, match=r"b\.source\.type is required"):
        anthropic_block("b", {"type": "image", "source": {}})


def test_more_images_than_allowed_are_refused() -> None:
    images = [ImageUrl(PIXEL, f"p[{i}]") for i in range(3)]
    check_count(images, 3)
    with pytest.raises(RequestError, match=r"At most 2 image\(s\) may be provided in one prompt") as caught:
        check_count(images, 2)
    assert caught.value.field == "p[2]"


def test_a_placeholder_becomes_as_many_as_its_image_has_tokens() -> None:
    ids, places = expand([1, 9, 2, 9, 9, 3], 9, [3, 1, 2], "token_ids")
    assert ids.tolist() == [1, 9, 9, 9, 2, 9, 9, 9, 3] and ids.dtype == np.int32
    assert places == [(1, 3), (5, 1), (6, 2)]
    ids, places = expand([1, 2], 9, [], "token_ids")
    assert ids.tolist() == [1, 2] and places == []


@pytest.mark.parametrize(("ids", "images"), [([1], 1), ([9, 9], 1), ([9], 2), ([9], 0), ([1, 9, 9, 9], 1)])
def test_placeholders_are_counted_against_images(ids: list[int], images: int) -> None:
    with pytest.raises(RequestError, match="one placeholder") as caught:
        expand(ids, 9, [4] * images, "token_ids")
    assert caught.value.field == "token_ids" and caught.value.code == "placeholder_mismatch"


def test_a_conversation_has_a_placeholder_for_each_image(template: ChatTemplate) -> None:
    url = {"type": "image_url", "image_url": {"url": PIXEL}}
    text, images = rendered(
        template,
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, url, "b"]},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": [url]},
        {"role": "user", "content": [UnreadImage("input[3]", url, chat_part), {"type": "text", "text": "d"}]},
    )
    assert text == (
        "<|im_start|>system:s<|im_end|><|im_start|>user:a<|image|>b<|im_end|><|im_start|>assistant:c<|im_end|>"
        "<|im_start|>tool:<|image|><|im_end|><|im_start|>user:<|image|>d<|im_end|>"
    )
    assert images == [
        ImageUrl(PIXEL, "messages[1].content[1].image_url.url"),
        ImageUrl(PIXEL, "messages[3].content[0].image_url.url"),
        ImageUrl(PIXEL, "input[3].image_url.url"),
    ]


@pytest.mark.parametrize("images", [False, True])
def test_the_error_of_another_part_lists_those_that_the_model_takes(template: ChatTemplate, images: bool) -> None:
    error = error_of(template, {"role": "user", "content": [{"type": "video_url"}]}, images=images)
    assert error.field == "messages[0].content[0].type" and error.code == "unsupported"
    assert "input_text" in error.message and ("input_image" in error.message) == images


def test_a_model_without_images_names_the_part(template: ChatTemplate) -> None:
    error = error_of(template, {"role": "user", "content": [{"type": "image_url", "image_url": 5}]}, images=False)
    assert error.message == "messages[0].content[0].type is 'image_url': this model takes no images"
    assert error.field == "messages[0].content[0].type" and error.code == "unsupported"
    image = UnreadImage("input[0].content[0]", {"type": "input_image"}, chat_part)
    error = error_of(template, {"role": "user", "content": [image]}, images=False)
    assert error.field == "input[0].content[0].type" and error.code == "unsupported"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": f"an {PAD}"}, "messages[0].content"),
        ({"content": ["a", f"{PAD}"]}, "messages[0].content[1].text"),
        ({"content": "a", "name": PAD}, "messages[0].name"),
        (
            {"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\u003c|image|>"}'}}]},
            "messages[0].tool_calls[0].function.arguments.a",
        ),
        ({"content": ["<|im", "age|>"]}, "messages"),
    ],
)
def test_a_text_that_spells_the_placeholder_is_no_image(
    template: ChatTemplate, message: dict[str, Any], field: str
) -> None:
    error = error_of(template, {"role": "user"} | message)
    assert error.status == 400 and error.field == field


def test_a_template_that_omits_images_is_an_error(template: ChatTemplate) -> None:
    user = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}
    for source in ("{% for m in messages %}{{ m.content }}{% endfor %}", "x"):
        with pytest.raises(RequestError, match="for 1 images") as caught:
            template.text([user], images=ImageSlots(PAD), template=source)
        assert caught.value.field == "messages"


def test_images_are_refused_in_system_and_continued_messages(template: ChatTemplate) -> None:
    url = {"type": "image_url", "image_url": {"url": PIXEL}}
    assert error_of(template, {"role": "system", "content": [url]}).field == "messages[0].content[0].type"
    last = {"role": "assistant", "content": ["a", url]}
    with pytest.raises(RequestError) as caught:
        template.text([last], images=ImageSlots(PAD), continue_final_message=True)
    assert caught.value.field == "messages[0].content[1]"


def test_images_of_responses_and_of_messages_keep_their_paths(template: ChatTemplate) -> None:
    items = InputMessages(ToolTable())
    part = {"type": "input_image", "image_url": PIXEL, "detail": "low"}
    items.add("input[0]", {"role": "user", "content": [part, {"type": "input_text", "text": "a"}]})
    items.add("input[1]", {"role": "user", "content": [part]})
    items.add("input[2]", {"type": "function_call_output", "call_id": "c", "output": [part]})
    text, images = rendered(template, *items.messages)
    fields = ["input[0].content[0].image_url", "input[1].content[0].image_url", "input[2].output[0].image_url"]
    assert [image.field for image in images] == fields and text.count(PAD) == 3

    turns = TurnMessages(ToolList(None), system_stays=False)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block, {"type": "text", "text": "x"}]}
    turns.add("messages[0]", {"role": "user", "content": [result, block, {"type": "text", "text": "a"}]})
    text, images = rendered(template, *turns.messages())
    assert [image.field for image in images] == [
        "messages[0].content[0].content[0].source.data",
        "messages[0].content[1].source.data",
    ]
    assert text == "<|im_start|>tool:<|image|>x<|im_end|><|im_start|>user:<|image|>a<|im_end|>"
