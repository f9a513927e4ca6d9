"""/v2/embed: Cohere's forms of the vectors that /v1/embeddings returns."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Served
from tests.replies import good
from tests.threads import ServerThread

TEXTS = ["What is 47 + 38?", "a", "naïve 漢字"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with ServerThread("demo", "--runner", "pooling", "--dtype", "float32", "--max-model-len", "64") as one:
        yield one


def embed(server: Served, **body: Any) -> dict[str, Any]:
    return good(server.post("/v2/embed", {"texts": TEXTS} | body))


def test_all_types_are_of_the_same_vectors(server: Served) -> None:
    expected = [item["embedding"] for item in server.post("/v1/embeddings", {"input": TEXTS}).json()["data"]]
    reply = embed(server, embedding_types=["float", "base64", "binary", "ubinary"], input_type="search_query")
    embeddings = reply["embeddings"]
    assert (
        embeddings["float"] == expected and reply["texts"] == TEXTS and reply["response_type"] == "embeddings_by_type"
    )
    assert [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in embeddings["base64"]] == expected
    for vector, signs, packed in zip(expected, embeddings["binary"], embeddings["ubinary"], strict=True):
        assert np.unpackbits(np.array(packed, np.uint8)).tolist() == [int(value > 0) for value in vector]
        assert [value + 128 for value in signs] == packed
    assert reply["meta"]["api_version"] == {"version": "2"}
    usage = server.post("/v1/embeddings", {"input": TEXTS}).json()["usage"]
    assert reply["meta"]["billed_units"] == {"input_tokens": usage["prompt_tokens"]}
    parts = [{"content": [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]} for text in TEXTS]
    again = server.post("/v2/embed", {"inputs": parts}).json()
    assert again["embeddings"] == {"float": expected} and again["texts"] == TEXTS


@pytest.mark.parametrize("count", [15, 5000], ids=["more tokens than fit", "more bytes than any tokens"])
def test_long_texts_are_cut(server: Served, count: int) -> None:
    long = "abcdefgh " * count
    token_ids = server.post("/tokenize", {"prompt": long}).json()["tokens"]
    assert len(token_ids) > 64
    for truncate, ids in (("END", token_ids[:64]), (None, token_ids[:64]), ("START", token_ids[-64:])):
        expected = server.post("/v1/embeddings", {"input": ids}).json()["data"][0]["embedding"]
        assert embed(server, texts=[long], truncate=truncate)["embeddings"]["float"] == [expected]
    answer = server.post("/v2/embed", {"texts": ["a", long], "truncate": "NONE"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "texts[1]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": None}, "texts"),
        ({"inputs": []}, "texts"),
        ({"texts": "a"}, "texts"),
        ({"texts": [5]}, "texts[0]"),
        ({"texts": [""]}, "texts[0]"),
        ({"images": ["data:"]}, "images"),
        ({"texts": None, "inputs": [{"content": []}]}, "inputs[0].content"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]"),
        ({"embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"output_dimension": 16}, "output_dimension"),
        ({"input_type": "poem"}, "input_type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"] * 5000}, "texts"),
    ],
)
def test_what_is_wrong_is_named(server: Served, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v2/embed", {"texts": ["a"]} | body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_model_that_generates_refuses(demo: Served) -> None:
    answer = demo.post("/v2/embed", {"texts": ["a"]})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported"
