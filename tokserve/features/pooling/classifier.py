"""What config.json says of a classifier: its labels, what is made of their logits, and where its head comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.checkpoint.architectures import labels_tokens

FROM_TOKENS = "classifier_from_token"
TWO_WAY = "from_2_way_softmax"
MAX_LABELS = 1 << 16
Activation = Literal["softmax", "sigmoid", "none"]
PROBLEMS: Mapping[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
FUNCTIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}


class HeadSpec(NamedTuple):
    """A classifier's head.  `labels`: the width of a result.

    `tokens`: the ids whose logits, in the language model's head, are those of the labels; empty: it has a weight of its
    own, `score.weight`.  `difference`: of two tokens, the one label's logit is the second's minus the first's.
    `per_token`: it labels the tokens of a prompt, each by itself.
    """

    labels: int
    tokens: tuple[int, ...] = ()
    difference: bool = False
    per_token: bool = False


def head_spec(hf: Mapping[str, Any]) -> HeadSpec:
    """The head.  `classifier_from_token` holds ids, as `with_token_ids` writes them.  Raises StartError."""
    tokens = _tokens(hf)
    if not tokens:
        return HeadSpec(len(labels(hf)), per_token=labels_tokens(hf))
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise StartError(f"config.json: {FROM_TOKENS} must be a list of tokens, found {tokens!r}")
    difference = _is_difference(hf, len(tokens))
    return HeadSpec(1 if difference else len(tokens), tuple(tokens), difference)


def labels(hf: Mapping[str, Any]) -> list[str]:
    """The names of the labels, in the order of their logits.  Raises StartError."""
    tokens, names, count = _tokens(hf), hf.get("id2label"), hf.get("num_labels")
    if tokens:
        count = 1 if _is_difference(hf, len(tokens)) else len(tokens)
        names = None if isinstance(names, dict) and len(names) != count else names
    if names is None:
        count = 2 if count is None else count
        if type(count) is not int or not 1 <= count <= MAX_LABELS:
            raise StartError(f"config.json: num_labels must be an integer from 1 to {MAX_LABELS}, found {count!r}")
        return [f"LABEL_{index}" for index in range(count)]
    by_index = {str(key): name for key, name in names.items()} if isinstance(names, dict) else {}
    listed = [by_index.get(str(index)) for index in range(len(by_index))]
    if not listed or len(listed) > MAX_LABELS or not all(isinstance(name, str) for name in listed):
        raise StartError(f"config.json: id2label must map 0, 1 ... to names of at most {MAX_LABELS} labels")
    return [str(name) for name in listed]


def activation(hf: Mapping[str, Any]) -> Activation:
    """What makes probabilities of logits.  Raises StartError.  The function that sentence-transformers wrote, or that
    of `problem_type`; without them, the softmax of several labels and the sigmoid of one."""
    of_sentences = hf.get("sentence_transformers")
    name = of_sentences.get("activation_fn") if isinstance(of_sentences, dict) else None
    name = name or hf.get("sbert_ce_default_activation_function")
    usual: Activation = "softmax" if len(labels(hf)) > 1 else "sigmoid"
    if name is not None:
        function = str(name).rpartition(".")[2]
        if function not in FUNCTIONS:
            raise StartError(f"config.json: the activation function {name} is not supported")
        return FUNCTIONS[function]
    problem = hf.get("problem_type")
    if problem is None:
        return usual
    if problem not in PROBLEMS:
        raise StartError(f"config.json: problem_type must be one of {', '.join(PROBLEMS)}, found {problem!r}")
    return usual if problem == "single_label_classification" else PROBLEMS[problem]


def with_token_ids(directory: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """config.json with ids in place of the tokens of `classifier_from_token`.  Raises StartError.  `directory`: of
    tokenizer.json, whose vocabulary has them."""
    tokens = _tokens(hf)
    if not any(isinstance(token, str) for token in tokens):
        return hf
    tokenizer = checkpoint.read_json(directory, "tokenizer.json") or {}
    model = tokenizer.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    vocabulary: dict[str, Any] = dict(listed) if isinstance(listed, dict) else {}
    vocabulary |= {one["content"]: one["id"] for one in tokenizer.get("added_tokens") or [] if "id" in one}
    absent = [token for token in tokens if isinstance(token, str) and token not in vocabulary]
    if absent:
        raise StartError(f"config.json: {FROM_TOKENS} names {absent[0]!r}, which the vocabulary does not have")
    return hf | {FROM_TOKENS: [vocabulary.get(token, token) for token in tokens]}


def _tokens(hf: Mapping[str, Any]) -> list[Any]:
    tokens = hf.get(FROM_TOKENS)
    if tokens is None:
        return []
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= MAX_LABELS:
        raise StartError(f"config.json: {FROM_TOKENS} must be a list of tokens, found {tokens!r}")
    return tokens


def _is_difference(hf: Mapping[str, Any], count: int) -> bool:
    method = hf.get("method")
    if method not in (None, TWO_WAY, "no_post_processing"):
        raise StartError(f"config.json: method {method!r} is not supported; there are {TWO_WAY} and no_post_processing")
    difference = method == TWO_WAY or (method is None and hf.get("is_original_qwen3_reranker") is True)
    if difference and count != 2:
        raise StartError(f"config.json: {FROM_TOKENS} must have two tokens, found {count}")
    return difference
