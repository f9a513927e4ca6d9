"""Models that read both ways through a real server and the offline API: a cross-encoder with the types of its tokens, a
checkpoint of sentence-transformers, vectors and labels of tokens, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from tests.e2e.server import Served
from tests.replies import good
from tests.runner.test_encoders import checkpoint
from tests.threads import ServerThread
from tokserve import LLM
from tokserve.base.errors import RequestError, StartError
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.features.pooling.pooled_outputs import VectorRules, pooler_of

pytestmark = pytest.mark.usefixtures("engine_threads")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "a", "cat", "an", "animal", "stone", "river", "blue", "##s"]
CONTEXT = 40


def with_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """A word piece tokenizer as BERT's, written to the directory."""
    tokenizer = tokenizers.Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, tokenizers.Tokenizer]:
    directory = tmp_path_factory.mktemp("cross")
    model = checkpoint(directory, "Bert", "ForSequenceClassification", num_labels=1)
    return directory, model, with_tokenizer(directory)


@pytest.fixture(scope="module")
def server(cross: tuple[Path, Any, tokenizers.Tokenizer]) -> Iterator[Served]:
    with ServerThread(cross[0], "--max-model-len", str(CONTEXT), "--cpu-threads", "1") as one:
        yield one


def score(model: Any, tokenizer: tokenizers.Tokenizer, first: str, second: str) -> float:
    encoded = tokenizer.encode(first, second)
    with torch.inference_mode():
        inputs = {"input_ids": torch.tensor([encoded.ids]), "token_type_ids": torch.tensor([encoded.type_ids])}
        return float(model(**inputs).logits[0, 0])


def post(server: Served, path: str, **body: Any) -> dict[str, Any]:
    return good(httpx.post(f"{server.url}{path}", json=body, timeout=60))


def refusal(server: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_scores_of_pairs_are_those_of_transformers_alone_and_together(
    server: Served, cross: tuple[Path, Any, tokenizers.Tokenizer]
) -> None:
    _, model, tokenizer = cross
    query, documents = "what is a cat", ["a cat is an animal", "a stone", "blue rivers is blue"]
    together = post(server, "/score", queries=query, documents=documents, use_activation=False)["data"]
    for document, item in zip(documents, together, strict=True):
        assert item["score"] == pytest.approx(score(model, tokenizer, query, document), abs=1e-4)
        alone = post(server, "/score", queries=query, documents=document, use_activation=False)["data"]
        assert alone[0]["score"] == item["score"]
    ranked = post(server, "/v2/rerank", query=query, documents=documents, top_n=2)["results"]
    order = sorted(range(3), key=lambda index: -together[index]["score"])
    assert [one["index"] for one in ranked] == order[:2]
    ids = tokenizer.encode(query, documents[0])
    first = ids.type_ids.index(1)
    by_ids = post(server, "/score", queries=ids.ids[:first], documents=ids.ids[first:], use_activation=False)
    assert by_ids["data"][0]["score"] == together[0]["score"]


def test_what_is_too_long_is_refused_or_cut_within_the_special_tokens(
    server: Served, cross: tuple[Path, Any, tokenizers.Tokenizer]
) -> None:
    _, model, tokenizer = cross
    long = "blue " * CONTEXT
    error = refusal(server, "/classify", input=["a cat", long])
    assert error["code"] == "context_length_exceeded" and error["param"] == "input[1]"
    error = refusal(server, "/score", queries="a cat", documents=["a", long])
    assert error["code"] == "context_length_exceeded" and error["param"] == "documents[1]"
    for path in ("/classify", "/pooling"):
        cut = post(server, path, input=long, truncate_prompt_tokens=8, use_activation=False)
        assert cut["usage"]["prompt_tokens"] == 8
        same = post(server, path, input="blue " * 6, use_activation=False)
        assert cut["data"] == same["data"]
    pair = post(server, "/score", queries="a cat", documents=long, truncate_prompt_tokens=10, use_activation=False)
    expected = score(model, tokenizer, "a cat", "blue " * 5)
    assert pair["data"][0]["score"] == pytest.approx(expected, abs=1e-4)


def test_labels_of_tokens_and_what_the_model_does_not_do(server: Served) -> None:
    logits = post(server, "/pooling", input="a cat", task="classify", use_activation=False)["data"][0]["data"]
    tokens = post(server, "/pooling", input=["a cat", "a"], task="token_classify", use_activation=False)["data"]
    assert np.shape(tokens[0]["data"]) == (4, 1) and np.shape(tokens[1]["data"]) == (3, 1)
    assert tokens[0]["data"][0] == pytest.approx(logits, abs=1e-5)
    packed = httpx.post(
        f"{server.url}/pooling", json={"input": ["a cat", "a"], "task": "token_classify", "encoding_format": "bytes"}
    )
    places = json.loads(packed.headers["metadata"])["data"]
    assert [one["shape"] for one in places] == [[4, 1], [3, 1]] and places[1]["start"] == 16
    assert refusal(server, "/pooling", input="a", task="token_embed")["param"] == "task"
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/inference/v1/generate", {"token_ids": [4], "sampling_params": {}}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        assert refusal(server, path, **body)["code"] == "unsupported"
    assert refusal(server, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])["message"]


VALID: dict[str, dict[str, Any]] = {
    "/classify": {"input": "a cat"},
    "/pooling": {"input": ["a", "cat"], "task": "token_classify"},
    "/score": {"queries": "a cat", "documents": ["a", "stone"]},
    "/v2/rerank": {"query": "a cat", "documents": ["a", "stone"], "top_n": 1},
    "/v1/embeddings": {"input": "a"},
    "/v2/embed": {"texts": ["a"], "model": "x", "embedding_types": ["float"]},
}
ODD: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "\u0000",
    "blue " * 99,
    [],
    {},
    [None],
    [[]],
    [[5], "a"],
    [2**40],
    [-1],
    {"text": 5},
    [{"text": "a", "x": 1}],
    [["a"]],
    ["a"] * 5000,
]
FIELDS = [
    "truncate_prompt_tokens",
    "dimensions",
    "encoding_format",
    "priority",
    "cache_salt",
    "messages",
    "use_activation",
]


@pytest.mark.slow
def test_generated_bodies_are_answered_or_refused_with_the_field(server: Served) -> None:
    rng, wrong, refused = random.Random(5), [], 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(300):
            path = rng.choice(list(VALID))
            body = dict(VALID[path])
            for name in rng.sample([*body, *FIELDS], rng.randrange(1, 3)):
                body[name] = rng.choice(ODD)
            answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            if answer.status_code != 200:
                error = answer.json()["error"]
                refused += 1
                if not 400 <= answer.status_code < 500 or not error["message"] or error["param"] is None:
                    wrong.append((path, str(body)[:200], answer.text[:200]))
        for path in VALID:
            for raw in (b"", b"{", b"[]", b"5", b'{"input": "\xff"}'):
                answer = client.post(path, content=raw, headers={"content-type": "application/json"})
                assert answer.status_code == 400, (path, raw, answer.text)
    assert not wrong and refused > 200
    assert post(server, "/classify", input="a cat")["data"][0]["num_classes"] == 1


def test_a_checkpoint_of_sentence_transformers(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "XLMRoberta", "Model")
    with_tokenizer(tmp_path)
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": f"x.models.{kind}"} for i, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    (tmp_path / "1_Pooling").mkdir()
    texts = ["a cat", "what is an animal", "blue"]
    for config in ({"pooling_mode": "cls"}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
        rules = pooler_of(resolve(Config.make(model=str(tmp_path))).model)
        assert isinstance(rules, VectorRules) and rules.normalize
        assert rules.pooling == ("first" if "pooling_mode" in config else "mean")
    with LLM(str(tmp_path), cpu_threads=1) as llm:
        assert llm.config.model.max_model_len == 24 and not llm.config.cache.enable_prefix_caching
        outputs = llm.embed(texts, use_tqdm=False)
        alone = llm.embed(texts[1], use_tqdm=False)[0].outputs.embedding
        assert alone == outputs[1].outputs.embedding
        tokens = llm.encode(texts, pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(RequestError, match="this model makes embeddings"):
            llm.encode(texts, pooling_task="token_classify")
    for one, by_token in zip(outputs, tokens, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([one.prompt_token_ids])).last_hidden_state[0]
        mean = states.mean(0)
        assert np.allclose(one.outputs.embedding, mean / mean.norm(), atol=1e-5)
        assert np.allclose(by_token.outputs.data, states / states.norm(dim=-1, keepdim=True), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"runner": "generate"}, "runner"),
        ({"max_num_batched_tokens": 20}, "max_num_batched_tokens"),
        ({"enable_lora": True}, "enable_lora"),
        ({"max_model_len": 301}, "max_model_len"),
    ],
)
def test_options_that_are_of_no_use_are_refused(
    cross: tuple[Path, Any, tokenizers.Tokenizer], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(StartError, match=named):
        resolve(Config.make(model=str(cross[0]), **options))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "cat"}]}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "cat"}]}),
        ("/v1/responses", {"input": "cat"}),
        ("/v1/completions", {"prompt": "cat"}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "cat"}]}),
    ],
)
def test_routes_that_generate_are_refused_as_such_where_there_is_no_template(
    server: Served, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, body | {"model": server.get("/v1/models").json()["data"][0]["id"]})
    assert answer.status_code == 400 and "--runner pooling" in answer.json()["error"]["message"]
