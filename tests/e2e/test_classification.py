"""Classifiers through real servers: transformers' logits, the same bits in any batch, and the bodies that clients
send to /classify, /pooling, /score and /rerank."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.e2e.server import Served
from tests.models.classifiers import classifier
from tests.replies import good
from tests.threads import ServerThread
from tests.tiny_families import FAMILIES
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import LLM
from tokserve.base.errors import RequestError, StartError
from tokserve.checkpoint import DEMO_DIR

pytestmark = pytest.mark.usefixtures("engine_threads")

PROMPTS = [list(range(start, start + length)) for start, length in ((5, 70), (90, 33), (5, 64), (150, 1))]
OPTIONS: dict[str, Any] = {"tokens_only": True, "max_model_len": 128, "cpu_threads": 1}
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("reward"), "qwen3", {"0": "reward"})


@pytest.fixture(scope="module")
def server(reward: Path) -> Iterator[Served]:
    with ServerThread(str(reward), "--max-model-len", "128", "--served-model-name", "tiny") as one:
        yield one


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_checkpoint(tmp_path_factory.mktemp("embedder"), tiny_config("qwen3", dtype="float32"), seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, directory)
    with ServerThread(str(directory), "--runner", "pooling", "--max-model-len", "128") as one:
        yield one


def transformers_logits(directory: Path, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]


def logits(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    return [one.outputs.probs for one in llm.classify(prompts, use_activation=False, use_tqdm=False)]


def post(server: Served, path: str, **body: Any) -> dict[str, Any]:
    return good(httpx.post(f"{server.url}{path}", json=body))


def ids_of(text: str) -> list[int]:
    from tokserve.text.tokenizer import Tokenizer

    return Tokenizer.load(DEMO_DIR).encode(text)


NAMES = (
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Phi3",
    "Mixtral",
    "Qwen3Moe",
    "SmolLM3",
    "Olmo2",
    "Glm",
    "Starcoder2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name for name, (kind, _) in FAMILIES.items() if kind.removesuffix("ForCausalLM") in NAMES]
)
def test_logits_equal_transformers_and_do_not_depend_on_the_batch(tmp_path: Path, family: str) -> None:
    directory = classifier(tmp_path, family)
    with LLM(str(directory), enable_prefix_caching=False, **OPTIONS) as llm:
        alone = [logits(llm, [prompt])[0] for prompt in PROMPTS]
        assert logits(llm, PROMPTS) == alone
        probs = [one.outputs.probs for one in llm.classify(PROMPTS)]
    for prompt_logits, expected, prob in zip(alone, transformers_logits(directory, PROMPTS), probs, strict=True):
        assert np.allclose(prompt_logits, expected, atol=1e-4)
        assert np.allclose(prob, torch.tensor(expected).softmax(0), atol=1e-5)
    with LLM(str(directory), max_num_batched_tokens=9, **OPTIONS) as llm:
        assert logits(llm, PROMPTS) == alone, "in chunks"
        assert logits(llm, PROMPTS) == alone, "from the prefix cache"


@pytest.mark.slow
def test_sglangs_bodies_of_areal_and_verl(reward: Path) -> None:
    text, ids = "a good answer", [5, 9, 40]
    expected = [float(one[0]) for one in transformers_logits(reward, [ids_of(text), ids])]
    with ServerThread(str(reward), "--max-model-len", "128", "--sglang-api") as server:
        assert httpx.get(f"{server.url}/health_generate").status_code == 200
        for path in ("/classify", "/encode"):
            one = post(server, path, text=text)
            assert one["embedding"] == [pytest.approx(expected[0], abs=1e-4)]
            assert one["meta_info"]["prompt_tokens"] == len(ids_of(text))
            both = post(server, path, input_ids=[ids_of(text), ids], rid="r", image_data=None)
            assert [item["embedding"][-1] for item in both] == [
                one["embedding"][0],
                pytest.approx(expected[1], abs=1e-4),
            ]
            assert {item["meta_info"]["id"] for item in both} == {"r"}
        embedded = post(server, "/v1/embeddings", input=text)
        assert embedded["data"][-1]["embedding"] == one["embedding"]
        classified = post(server, "/classify", input=text, use_activation=False)
        assert classified["data"][0]["probs"] == one["embedding"]
        for body, field in (
            ({"text": "a", "input": "a"}, "input"),
            ({"input_ids": [[1], []]}, "input_ids[1]"),
            ({}, "input"),
            ({"text": ["a", "b"], "rid": ["1", "2"]}, "rid"),
            ({"input": "a", "rid": "1"}, "input_ids"),
            ({"input_ids": [[4], [70000]]}, "input_ids[1]"),
            ({"text": "a", "image_data": ["x"]}, "image_data"),
            ({"text": "a", "dimensions": 3}, "dimensions"),
            ({"input_ids": [1] * 200}, "input_ids"),
        ):
            answer = httpx.post(f"{server.url}/classify", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_verls_body_and_probabilities(server: Served, reward: Path) -> None:
    text = "a good answer"
    (expected,) = transformers_logits(reward, [ids_of(text)])
    raw = post(server, "/classify", model="tiny", input=text, use_activation=False)
    assert raw["data"][-1]["probs"][-1] == pytest.approx(float(expected[0]), abs=1e-4)
    assert raw["id"].startswith("classify-") and raw["object"] == "list" and raw["model"] == "tiny"
    assert raw["usage"] == {"prompt_tokens": len(ids_of(text)), "total_tokens": len(ids_of(text))}
    several = post(server, "/classify", input=[text, "b"])
    assert [one["index"] for one in several["data"]] == [0, 1]
    first = several["data"][0]
    batch = post(server, "/classify", input=["b", text, "c" * 60], use_activation=False)
    assert batch["data"][1]["probs"] == raw["data"][0]["probs"], "in a batch"
    assert first["label"] == "reward" and first["num_classes"] == 1
    assert first["probs"][0] == pytest.approx(1 / (1 + np.exp(-float(expected[0]))), abs=1e-5)
    assert post(server, "/classify", input=ids_of(text), use_activation=False)["data"] == raw["data"]


def test_pooling_returns_the_same_in_all_encodings(server: Served) -> None:
    expected = post(server, "/classify", input=["a", "bc"], use_activation=False)
    floats = post(server, "/pooling", input=["a", "bc"], use_activation=False, task="classify")
    assert [one["data"] for one in floats["data"]] == [one["probs"] for one in expected["data"]]
    assert floats["id"].startswith("pool-") and floats["data"][0]["object"] == "pooling"
    packed = post(server, "/pooling", input=["a", "bc"], use_activation=False, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one["data"]), "<f4").tolist() for one in packed["data"]]
    assert decoded == [one["data"] for one in floats["data"]]
    body = {"input": ["a", "bc"], "use_activation": False, "encoding_format": "bytes"}
    answer = httpx.post(f"{server.url}/pooling", json=body)
    assert np.frombuffer(answer.content, "<f4").tolist() == [one["data"][0] for one in floats["data"]]
    assert json.loads(answer.headers["metadata"])["data"][1]["shape"] == [1]


@pytest.mark.slow
def test_scores_of_a_cross_encoder_and_all_names_of_its_fields(server: Served, reward: Path) -> None:
    expected = [
        float(row[0]) for row in transformers_logits(reward, [ids_of("q") + ids_of(text) for text in ("ab", "c")])
    ]
    reply = post(server, "/v1/score", queries="q", documents=["ab", "c"], use_activation=False)
    assert [one["score"] for one in reply["data"]] == pytest.approx(expected, abs=1e-4)
    assert reply["usage"]["prompt_tokens"] == sum(len(ids_of("q" + text)) for text in ("ab", "c"))
    for first, second in (("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")):
        again = post(server, "/score", **{first: ["q", "q"], second: ["ab", "c"], "use_activation": False})
        assert again["data"] == reply["data"]
    ids = post(server, "/score", text_1=ids_of("q"), text_2=[ids_of("ab"), ids_of("c")], use_activation=False)
    assert ids["data"] == reply["data"]
    cut = post(server, "/score", queries="q", documents="abc", max_tokens_per_doc=2, use_activation=False)
    assert cut["data"][0]["score"] == reply["data"][0]["score"]


COHERE = {"model": "tiny", "query": "q", "documents": ["c", "ab", "zzz"], "top_n": 2, "max_tokens_per_doc": 4096}
JINA = {
    "model": "tiny",
    "query": "q",
    "documents": [{"text": "c"}, {"text": "ab"}, {"text": "zzz"}],
    "top_n": 2,
    "return_documents": False,
}


def test_cohere_and_jina_rerank(server: Served) -> None:
    scores = [one["score"] for one in post(server, "/score", queries="q", documents=COHERE["documents"])["data"]]
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        reply = post(server, path, **COHERE)
        assert [one["index"] for one in reply["results"]] == order
        assert [one["relevance_score"] for one in reply["results"]] == [scores[index] for index in order]
        assert [one["document"]["text"] for one in reply["results"]] == [COHERE["documents"][index] for index in order]
    reply = post(server, "/v1/rerank", **JINA)
    assert [one["index"] for one in reply["results"]] == order and "document" not in reply["results"][0]
    assert reply["usage"]["total_tokens"] > 0 and reply["id"].startswith("rerank-")


@pytest.mark.slow
def test_scores_of_a_bi_encoder_are_cosines(embedder: Served) -> None:
    vectors = [np.array(one["embedding"]) for one in post(embedder, "/v1/embeddings", input=["q", "ab", "c"])["data"]]
    reply = post(embedder, "/score", queries="q", documents=["ab", "c"])
    assert [one["score"] for one in reply["data"]] == pytest.approx([vectors[0] @ v for v in vectors[1:]], abs=1e-6)
    assert [one["score"] for one in post(embedder, "/score", queries="q", documents=["q"])["data"]] == [
        pytest.approx(1.0, abs=1e-6)
    ]
    best = post(embedder, "/rerank", query="c", documents=["ab", "c", "q"], top_n=1)["results"]
    assert best[0]["index"] == 1
    refused = httpx.post(f"{embedder.url}/classify", json={"input": "x"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported"


@pytest.mark.slow
def test_a_text_that_is_cut_may_be_longer_than_any_context(server: Served) -> None:
    long = "ab " * 5000
    for field in ("input", "queries"):
        path, rest = ("/classify", {}) if field == "input" else ("/score", {"documents": "c"})
        refused = httpx.post(f"{server.url}{path}", json={field: long, **rest})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        for limit, count in ((-1, 128), (9, 9)):
            cut = post(server, path, **{field: long, **rest, "truncate_prompt_tokens": limit})
            assert cut["usage"]["prompt_tokens"] == count


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/classify", {}, "input"),
    ("/classify", {"input": []}, "input"),
    ("/classify", {"input": 5}, "input"),
    ("/classify", {"input": ["a", 5]}, "input[1]"),
    ("/classify", {"input": [9999]}, "input"),
    ("/classify", {"input": "a" * 400}, "input"),
    ("/classify", {"input": "a", "messages": []}, "input"),
    ("/classify", {"input": "a", "use_activation": "no"}, "use_activation"),
    ("/classify", {"input": "a", "normalize": True}, "normalize"),
    ("/classify", {"input": ["a" * 200]}, "input[0]"),
    ("/classify", {"input": ["a", "a" * 200]}, "input[1]"),
    ("/classify", {"messages": [5]}, "messages"),
    ("/classify", {"messages": [[], 5]}, "messages[0]"),
    ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/classify", {"input": "a" * (1 << 20) + "b", "truncate_prompt_tokens": 8}, "input"),
    ("/classify", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ("/classify", {"input": "a", "truncation_side": "top"}, "truncation_side"),
    ("/pooling", {"input": "a", "task": "encode"}, "task"),
    ("/pooling", {"input": "a", "task": "embed"}, "task"),
    ("/pooling", {"input": "a", "dimensions": 8}, "dimensions"),
    ("/pooling", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/pooling", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ("/v1/embeddings", {"input": "a"}, "model"),
    ("/score", {}, "queries"),
    ("/score", {"queries": "a"}, "documents"),
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {"queries": "a", "text_2": "b"}, "documents"),
    ("/score", {"queries": [], "documents": "b"}, "queries"),
    ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "documents"),
    ("/score", {"queries": "a", "documents": ["b", "c" * 300]}, "documents[1]"),
    ("/score", {"queries": [9999], "documents": [[5], [6]]}, "documents[0]"),
    ("/score", {"queries": "a", "documents": [{"image": "b"}]}, "documents[0]"),
    ("/score", {"queries": "a", "documents": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ("/score", {"queries": "a", "documents": "b", "instruction": "c"}, "instruction"),
    ("/rerank", {"documents": ["a"]}, "query"),
    ("/rerank", {"query": "a"}, "documents"),
    ("/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "a", "documents": "b"}, "documents"),
    ("/rerank", {"query": "a", "documents": {}}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": "all"}, "top_n"),
    ("/rerank", {"query": {"title": "a"}, "documents": ["b"]}, "query"),
    ("/rerank", {"query": "a", "documents": ["b", {"title": "b"}]}, "documents[1]"),
]


def test_bad_bodies_name_the_field(server: Served) -> None:
    wrong = []
    with httpx.Client(base_url=server.url) as client:
        for path, body, field in BAD:
            answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            named = answer.json()["error"]["param"]
            if answer.status_code != 400 or named is None or not named.startswith(field):
                wrong.append((path, body, field, answer.text[:300]))
    assert not wrong


@pytest.mark.parametrize("path", ["/classify", "/pooling", "/score", "/v1/rerank"])
def test_a_generating_model_refuses(demo: Served, path: str) -> None:
    body = {"input": "x", "queries": "a", "documents": ["b"], "query": "a"}
    refused = httpx.post(f"{demo.url}{path}", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported", refused.text


@pytest.mark.slow
def test_rows_of_the_language_models_head_as_labels(tmp_path: Path) -> None:
    """Qwen3-Reranker's form: a causal checkpoint, and the logits of two tokens."""
    write_checkpoint(tmp_path, tiny_config("qwen3", dtype="float32"), seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, tmp_path)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    options = OPTIONS | {"tokens_only": False}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    no, yes = ids_of("n")[0], ids_of("y")[0]
    with torch.inference_mode():
        last = [model(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS]
    with LLM(str(tmp_path), hf_overrides=overrides, **options) as llm:
        actual = logits(llm, PROMPTS)
        score = llm.score("query", "document")[0].outputs.score
        assert score == llm.classify("querydocument")[0].outputs.probs[0]
    assert np.allclose(actual, [[float(row[yes] - row[no])] for row in last], atol=1e-4)
    with LLM(str(tmp_path), hf_overrides=overrides | {"is_original_qwen3_reranker": False}, **options) as llm:
        assert np.allclose(logits(llm, PROMPTS), [[float(row[no]), float(row[yes])] for row in last], atol=1e-4)
    with pytest.raises(StartError, match="'maybe'"):
        LLM(str(tmp_path), hf_overrides=overrides | {"classifier_from_token": ["n", "maybe"]}, **options)


@pytest.mark.slow
def test_the_python_api(reward: Path) -> None:
    with LLM(str(reward), **OPTIONS | {"tokens_only": False}) as llm:
        probs = llm.classify(["a", "bc"], use_tqdm=False)[1].outputs.probs
        data = llm.encode("bc", pooling_task="classify")[0].outputs.data
        assert data.tolist() == probs and data.dtype == np.float32
        scores = [one.outputs.score for one in llm.score("q", ["ab", "c"])]
        assert scores == [llm.score(["q"], [text])[0].outputs.score for text in ("ab", "c")]
        assert scores[0] == llm.classify("qab")[0].outputs.probs[0]
        for call, field in (
            (lambda: llm.encode("a"), "pooling_task"),
            (lambda: llm.embed("a"), "probabilities of labels"),
            (lambda: llm.generate("a"), None),
            (lambda: llm.score(["a", "b"], ["c"]), "1:1, 1:N or N:N"),
        ):
            if field is not None:
                with pytest.raises(RequestError, match=field):
                    call()
    with pytest.raises(StartError, match="runner"):
        LLM(str(reward), **OPTIONS | {"runner": "generate"})


@pytest.mark.slow
def test_a_reward_model_that_is_updated(reward: Path, tmp_path: Path) -> None:
    """Its head is a tensor like the others, and comes with an update."""
    tensors = load_file(reward / FILE)
    for name, head in (("whole", {"score.weight": -2.0 * tensors["score.weight"]}), ("headless", {})):
        (tmp_path / name).mkdir()
        save_file({key: one for key, one in tensors.items() if key != "score.weight"} | head, tmp_path / name / FILE)
    with LLM(str(reward), **OPTIONS) as llm:
        before = logits(llm, PROMPTS)
        llm.load_weights(str(tmp_path / "whole"))
        after = logits(llm, PROMPTS)
        assert after == [[-2.0 * value for value in row] for row in before]
        with pytest.raises(RequestError, match=r"score\.weight"):
            llm.load_weights(str(tmp_path / "headless"))
        assert logits(llm, PROMPTS) == after


@pytest.mark.slow
def test_labels_of_config_json(tmp_path: Path) -> None:
    directory = classifier(tmp_path, "llama", problem_type="multi_label_classification")
    with LLM(str(directory), **OPTIONS) as llm:
        raw = np.array(logits(llm, PROMPTS[:1])[0])
        probs = llm.classify(PROMPTS[:1])[0].outputs.probs
        assert np.allclose(probs, 1 / (1 + np.exp(-raw)), atol=1e-6)
        with pytest.raises(RequestError, match="3 labels"):
            llm.score([5], [6])
    for wrong in ({"id2label": {"1": "a"}}, {"problem_type": "none"}, {"id2label": None, "num_labels": 0}):
        with pytest.raises(StartError, match=next(iter(wrong)) if "num_labels" not in wrong else "num_labels"):
            LLM(str(directory), hf_overrides=wrong, **OPTIONS)
