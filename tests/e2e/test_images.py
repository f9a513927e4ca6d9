"""Images by every path: the same tokens and logprobs in any batch, and clear errors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from tests.e2e.server import Served
from tests.models.pictures import data_url, oracle, png, write_served
from tests.replies import good
from tests.threads import ServerThread

GENERATE, CHAT, RENDER = "/inference/v1/generate", "/v1/chat/completions", "/v1/chat/completions/render"
PAD, START, END = 288, 290, 291
SAMPLING = {"max_tokens": 6, "temperature": 0.7, "seed": 3, "logprobs": 1, "ignore_eos": True}
ONE, TWO = png(40, 32), png(60, 24, seed=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_served(tmp_path_factory.mktemp("vl"))
    (directory.parent / "pictures").mkdir(exist_ok=True)
    (directory.parent / "pictures" / "one.png").write_bytes(ONE)
    flags = (
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "512",
        "--max-num-batched-tokens",
        "64",
        "--allowed-local-media-path",
        str(directory.parent / "pictures"),
        "--served-model-name",
        "vl",
        "--sessions",
    )
    with ServerThread(directory, *flags) as server:
        server.directory = directory.parent / "pictures"  # type: ignore[attr-defined]
        yield server


def ask(server: Served, body: dict[str, Any], path: str = GENERATE) -> dict[str, Any]:
    return good(server.post(path, body))


def by_parts(*images: bytes, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    ids = [5, START, PAD, END, 9, *([START, PAD, END, 7] * (len(images) - 1))] if ids is None else ids
    parts = [{"type": "image_url", "url": data_url(image)} for image in images]
    return {"token_ids": ids, "content_parts": parts, "sampling_params": SAMPLING} | more


def refused(server: Served, body: dict[str, Any], status: int = 400, path: str = GENERATE) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "see "},
            {"type": "image_url", "image_url": {"url": data_url(ONE)}},
            {"type": "text", "text": " and "},
            {"type": "image_url", "image_url": {"url": data_url(TWO)}},
        ],
    }
]


def outcome(reply: dict[str, Any]) -> tuple[list[int], list[float]]:
    choice = reply["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


@pytest.mark.slow
def test_sessions_keep_conversations_with_images(server: Served) -> None:
    """Over the three routes, as their clients wrote them; each turn is a root."""
    url, text = data_url(ONE), {"type": "text", "text": "see"}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    responses = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "see"}]
    for route, content, body in (
        (CHAT, [text, {"type": "image_url", "image_url": {"url": url}}], {"return_token_ids": True, "logprobs": True}),
        ("/v1/messages", [text, {"type": "image", "source": source}], {}),
        ("/v1/responses", responses, {}),
    ):
        session = f"/sessions/{route[4:].partition('/')[0]}"
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        for _ in range(2):
            names = ("input", "max_output_tokens") if route.endswith("responses") else ("messages", "max_tokens")
            sent = {"model": "vl", "temperature": 1.0, **dict(zip(names, (messages, 4), strict=True))}
            reply = ask(server, body | sent, session + route)
            answer = {"role": "assistant", "content": "anything"}
            messages = [*messages, answer, {"role": "user", "content": "and?"}]
        turns = good(server.get(f"{session}/tree?messages=1"))["turns"]
        assert [turn["parent"] for turn in turns] == [None, None]
        assert [len(turn["messages"]) for turn in turns] == [1, 3]
        image = next(
            part for part in turns[0]["messages"][0]["content"] if part["type"].endswith(("image", "image_url"))
        )
        assert image == next(part for part in content if part["type"].endswith(("image", "image_url")))
        if route == CHAT:
            assert turns[1]["new_prompt_ids"] == reply["prompt_token_ids"]
            assert (turns[1]["token_ids"], turns[1]["token_logprobs"]) == outcome(reply)


def test_five_paths_have_the_same_bits(server: Served) -> None:
    chat = ask(
        server,
        {
            "messages": MESSAGES,
            "logprobs": True,
            "return_token_ids": True,
            "max_tokens": 6,
            "temperature": 0.7,
            "seed": 3,
            "ignore_eos": True,
        },
        CHAT,
    )
    expected, expanded = outcome(chat), chat["prompt_token_ids"]
    rendered = ask(server, {"messages": MESSAGES}, RENDER)
    assert rendered["token_ids"] == expanded
    body = {"token_ids": expanded, "features": rendered["features"], "sampling_params": SAMPLING}
    assert outcome(ask(server, body)) == expected
    tiny = body | {"features": rendered["features"] | {"kwargs_data": None}}
    assert outcome(ask(server, tiny)) == expected
    short: list[int] = []
    for token in expanded:
        if token != PAD or short[-1] != PAD:
            short.append(token)
    parts = by_parts(ONE, TWO, ids=short)
    reply = ask(server, parts)
    assert outcome(reply) == expected and reply["prompt_token_ids"] == expanded
    places = rendered["features"]["mm_placeholders"]
    assert reply["mm_placeholders"] == places and len(places["image"]) == 2
    assert all(expanded[place["offset"]] == PAD for place in places["image"])
    anthropic = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see "},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()},
                },
                {"type": "text", "text": " and "},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(TWO).decode()},
                },
            ],
        }
    ]
    request = {"model": "vl", "max_tokens": 6, "messages": anthropic}
    assert ask(server, request, "/v1/messages/render")["token_ids"] == expanded
    assert ask(server, request, "/v1/messages/count_tokens")["input_tokens"] == len(expanded)
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see "},
                {"type": "input_image", "image_url": data_url(ONE)},
                {"type": "input_text", "text": " and "},
                {"type": "input_image", "image_url": data_url(TWO)},
            ],
        }
    ]
    responses = ask(
        server,
        {
            "input": items,
            "max_output_tokens": 6,
            "temperature": 0.7,
            "seed": 3,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        "/v1/responses",
    )
    assert (responses["prompt_token_ids"], responses["token_ids"]) == (expanded, expected[0])
    tokens = ask(server, {"messages": MESSAGES}, "/tokenize")
    assert tokens["tokens"] == expanded


@pytest.mark.slow
def test_gemma_is_shown_what_its_processor_makes(tmp_path: Path) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    directory = write_served(tmp_path / "gemma", "gemma3")
    with ServerThread(directory, "--dtype", "float32", "--max-model-len", "256") as server:
        rendered = ask(server, {"messages": MESSAGES}, RENDER)
        text = ask(server, {"tokens": rendered["token_ids"]}, "/detokenize")["prompt"]
        image = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
        assert f"see {image} and {image}" in text
        params = {"max_tokens": 4, "temperature": 0, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True}
        body = rendered | {"sampling_params": params, "logprobs_format": "arrays"}
        reply = ask(server, body)
        short = [
            token
            for i, token in enumerate(rendered["token_ids"])
            if token != 288 or rendered["token_ids"][i - 1] != 288
        ]
        again = ask(server, by_parts(ONE, TWO, ids=short, sampling_params=params, logprobs_format="arrays"))
        assert again["choices"] == reply["choices"]
        streamed = {"messages": [{"role": "user", "content": "<start_of_image>"}]}
        assert refused(server, streamed, path=CHAT)["param"] == "messages[0].content"
    images = [Image.open(io.BytesIO(one)).convert("RGB") for one in (ONE, TWO)]
    processor = Gemma3ImageProcessorPil.from_pretrained(directory)
    pixels = torch.from_numpy(np.stack(processor(images=images, return_tensors="np")["pixel_values"]))
    ids = torch.tensor([rendered["token_ids"] + reply["choices"][0]["token_ids"]])
    with torch.inference_mode():
        logits = oracle(directory)(input_ids=ids, token_type_ids=(ids == 288).int(), pixel_values=pixels).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    served = reply["prompt_logprobs"]["token_logprobs"] + reply["choices"][0]["logprobs"]["token_logprobs"]
    assert np.allclose([value for value in served if value is not None], expected.numpy(), atol=2e-4)


def test_replies_are_the_same_alone_and_in_a_batch(server: Served) -> None:
    """Chunks of 64 tokens cut images; prefixes are shared; other images and texts run beside."""
    bodies = [by_parts(png(120, 100, seed=n), ONE, sampling_params=SAMPLING | {"seed": n}) for n in range(6)]
    bodies += [{"token_ids": list(range(5, 100)), "sampling_params": SAMPLING}]
    alone = []
    for body in bodies:
        alone.append(outcome(ask(server, body)))
        ask(server, {}, "/reset_prefix_cache")
    with ThreadPoolExecutor(14) as threads:
        together = list(threads.map(lambda body: outcome(ask(server, body)), bodies * 2))
    assert together == alone * 2
    again = ask(server, bodies[0])
    assert outcome(again) == alone[0] and again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


@pytest.mark.slow
def test_prompts_that_differ_in_an_image_alone_share_nothing_of_it(server: Served) -> None:
    ask(server, {}, "/reset_prefix_cache")
    first, second = (by_parts(png(120, 100, seed=n)) for n in (20, 21))
    one, other = ask(server, first), ask(server, second)
    assert one["prompt_token_ids"] == other["prompt_token_ids"] and outcome(one) != outcome(other)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.slow
def test_groups_and_streams(server: Served) -> None:
    body = by_parts(ONE, stream=True, return_token_ids=False)
    events = [json.loads(line[6:]) for line in server.post(GENERATE, body).text.split("\n\n") if line[:7] == "data: {"]
    reply = ask(server, by_parts(ONE, sampling_params=SAMPLING | {"n": 3}))
    assert events[0]["mm_placeholders"] == reply["mm_placeholders"]
    assert events[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    assert not any("mm_placeholders" in event for event in events[1:])
    assert [token for event in events for choice in event["choices"] for token in choice["token_ids"]] == (
        reply["choices"][0]["token_ids"]
    )


@pytest.mark.slow
def test_files_and_addresses(server: Served) -> None:
    inside = server.directory / "one.png"  # type: ignore[attr-defined]
    parts = [{"type": "image_url", "image_url": {"url": inside.as_uri()}}]
    assert outcome(ask(server, by_parts(ONE) | {"content_parts": parts})) == outcome(ask(server, by_parts(ONE)))
    for url in (
        "file:///etc/passwd",
        f"{inside.parent.as_uri()}/../vl0/config.json",
        "http://127.0.0.1:1/x.png",
        "http://169.254.169.254/latest",
        "https://example.com/x.png",
        "ftp://x/y",
        "data:image/png,abc",
        "x",
    ):
        error = refused(server, by_parts(ONE) | {"content_parts": [{"type": "image_url", "url": url}]})
        assert error["param"] == "content_parts[0].url", url


def test_bodies_that_do_not_fit_are_refused(server: Served) -> None:
    image = {"type": "image_url", "url": data_url(ONE)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"content_parts": [image, image]}, "token_ids"),
        ({"content_parts": []}, "token_ids"),
        ({"content_parts": [{"type": "video_url", "url": "x"}]}, "content_parts[0].type"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts[0].url"),
        ({"content_parts": "x"}, "content_parts"),
        ({"content_parts": [5]}, "content_parts[0]"),
        ({"content_parts": [image], "features": {}}, "content_parts"),
        ({"token_ids": [5, START, PAD, PAD, PAD, PAD, END]}, "token_ids"),
        ({"content_parts": [{"type": "image_url", "url": data_url(b"no image at all")}]}, "content_parts[0].url"),
    ]
    for change, field in cases:
        assert refused(server, by_parts(ONE) | change)["param"] == field, change
    error = refused(server, {"messages": [{"role": "user", "content": "<|image_pad|>"}]}, path=CHAT)
    assert error["param"] == "messages[0].content"
    error = refused(server, by_parts(*[png(120, 120, seed=n) for n in range(12)]))
    assert server.post(GENERATE, by_parts(ONE)).status_code == 200 and error["code"] == "context_length_exceeded"


def features(server: Served) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": MESSAGES[0]["content"][:2]}]}  # type: ignore[index]
    rendered = ask(server, body, RENDER)
    return {"token_ids": rendered["token_ids"], "features": rendered["features"], "sampling_params": SAMPLING}


def item(
    patches: int = 24, width: int = 384, dtype: str = "float32", grid: Any = None, code: int = 3, data: Any = None
) -> str:
    size = patches * width * {"float32": 4, "uint8": 1, "float64": 8, "bfloat16": 2}[dtype]
    tensor = [dtype, [patches, width], msgspec.msgpack.Ext(code, bytes(size))] if data is None else data
    pixels = {"data": tensor, "field": ["flat", {}]}
    sizes = [[1, 4, 6]] if grid is None else grid
    packed = msgspec.msgpack.encode(
        {"pixel_values": pixels, "image_grid_thw": {"data": sizes, "field": ["batched", {}]}}
    )
    return base64.b64encode(packed).decode()


EMPTY = msgspec.msgpack.Ext(3, b"")


@pytest.mark.slow
def test_features_that_do_not_fit_are_refused(server: Served) -> None:
    good = features(server)
    place = good["features"]["mm_placeholders"]["image"][0]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mm_hashes": {"image": ["a", "b"]}}, "features.mm_placeholders.image"),
        ({"mm_hashes": {"video": ["a"]}}, "features.mm_hashes.video"),
        ({"mm_hashes": None}, "features.mm_hashes"),
        (
            {"mm_placeholders": {"image": [place | {"offset": 1 + place["offset"]}]}},
            "features.mm_placeholders.image[0]",
        ),
        ({"mm_placeholders": {"image": [place | {"length": 10**6}]}}, "features.mm_placeholders.image[0]"),
        ({"mm_placeholders": {"image": [place | {"length": place["length"] - 1}]}}, "features.kwargs_data.image[0]"),
        ({"kwargs_data": {"image": ["!!"]}}, "features.kwargs_data.image[0]"),
        ({"kwargs_data": {"image": ["AAAA"]}}, "features.kwargs_data.image[0]"),
        ({"kwargs_data": {"image": [item(code=1)]}}, "features.kwargs_data.image[0]"),
        ({"kwargs_data": {"image": [item(width=383)]}}, "features.kwargs_data.image[0].pixel_values"),
        ({"kwargs_data": {"image": [item(dtype="float64")]}}, "features.kwargs_data.image[0].pixel_values"),
        *(
            ({"kwargs_data": {"image": [item(data=data)]}}, "features.kwargs_data.image[0].pixel_values")
            for data in (5, ["float32", [24, -1], EMPTY], ["float32", 24, EMPTY], ["float32", [24, 384], EMPTY])
        ),
        (
            {"kwargs_data": {"image": [item(grid=["float32", [3], EMPTY])]}},
            "features.kwargs_data.image[0].image_grid_thw",
        ),
        ({"kwargs_data": {"image": [item(grid=[1, 4])]}}, "features.kwargs_data.image[0].image_grid_thw"),
        ({"kwargs_data": {"image": [item(grid=[1, 3, 8])]}}, "features.kwargs_data.image[0]"),
        ({"kwargs_data": {"image": [item(grid=[2, 2, 6])]}}, "features.kwargs_data.image[0]"),
        ({"kwargs_data": {"image": [item(patches=20)]}}, "features.kwargs_data.image[0]"),
        ({"other": 1}, "features.other"),
    ]
    for change, field in cases:
        body = good | {"features": good["features"] | change}
        assert refused(server, body)["param"] == field, change
    lost = good | {"features": good["features"] | {"mm_hashes": {"image": ["never seen"]}, "kwargs_data": None}}
    assert refused(server, lost, 503)["code"] == "multimodal_cache_miss"
    assert outcome(ask(server, good))


@pytest.mark.slow
def test_pixels_of_other_dtypes(server: Served) -> None:
    good = features(server)
    packed = msgspec.msgpack.decode(base64.b64decode(good["features"]["kwargs_data"]["image"][0]))
    dtype, shape, pixels = packed["pixel_values"]["data"]
    assert dtype == "float32" and shape[1] == 384 and packed["image_grid_thw"]["data"][0] == "int64"
    exact = np.frombuffer(pixels.data, "<f4").reshape(shape)
    mean, std = (np.repeat([values], 128, 0).T.reshape(-1) for values in ((0.48, 0.46, 0.41), (0.27, 0.26, 0.28)))
    raw = np.rint((exact * std + mean) * 255).astype(np.uint8)
    expected = outcome(ask(server, good))

    def with_pixels(kind: str, content: bytes) -> dict[str, Any]:
        changed = packed | {"pixel_values": {"data": [kind, shape, msgspec.msgpack.Ext(3, content)], "field": []}}
        text = base64.b64encode(msgspec.msgpack.encode(changed)).decode()
        return good | {"features": good["features"] | {"kwargs_data": {"image": [text]}}}

    assert outcome(ask(server, with_pixels("uint8", raw.tobytes()))) == expected
    narrow = (exact.view("<u4") >> 16).astype("<u2")
    assert len(outcome(ask(server, with_pixels("bfloat16", narrow.tobytes())))[0]) == 6


@pytest.mark.slow
def test_a_dead_worker_fails_only_its_image(server: Served) -> None:
    ask(server, by_parts(ONE))
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if "tokserve.features.images.media.worker" in " ".join(child.cmdline())
    ]
    assert len(workers) == 1
    workers[0].kill()
    answer = server.post(GENERATE, by_parts(png(44, 44, seed=9)))
    assert answer.status_code in (200, 400)
    assert server.post(GENERATE, by_parts(png(48, 44, seed=9))).status_code == 200


@pytest.mark.slow
def test_models_without_a_tower_refuse_images(tmp_path: Path) -> None:
    with ServerThread(write_served(tmp_path), "--language-model-only", "--max-model-len", "256") as server:
        assert refused(server, by_parts(ONE))["code"] == "unsupported"
        assert refused(server, {"messages": MESSAGES}, path=CHAT)["param"] == "messages[0].content[1].type"
        assert ask(server, {"token_ids": [5, 9], "sampling_params": {"max_tokens": 2}})["choices"]
