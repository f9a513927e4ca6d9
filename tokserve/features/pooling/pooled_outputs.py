"""Pooling: how a checkpoint pools hidden states, and what is made of the engine's vectors: embeddings, or probabilities
of a classifier's labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokserve import checkpoint
from tokserve.base.errors import RequestError, StartError, invalid
from tokserve.checkpoint.architectures import encoder_family, is_classifier, labels_tokens
from tokserve.config import ModelConfig
from tokserve.features.chat.prompts import Side
from tokserve.features.pooling import classifier
from tokserve.features.pooling.classifier import Activation
from tokserve.protocol.params import PoolingParams

Kind = Literal["last", "first", "mean"]
POOLING_TYPES: Mapping[str, Kind] = {"LAST": "last", "CLS": "first", "MEAN": "mean"}
SENTENCE_TYPES: Mapping[str, Kind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "cls": "first",
    "mean": "mean",
}
TASKS = ("embed", "classify", "token_embed", "token_classify")
OPTIONS = ("pooling_type", "use_activation", "dimensions", "task")


class VectorRules(NamedTuple):
    """How vectors are made of hidden states.

    `normalize`: to length 1, unless the request says otherwise.  `dimensions`: how many of its first values a vector
    may be cut to: None none, empty any number.  `tokens`: a vector for each token.  `side`: where prompts that are too
    long are cut.
    """

    pooling: Kind = "last"
    normalize: bool = True
    dimensions: frozenset[int] | None = None
    default_dimensions: int | None = None
    tokens: bool = False
    side: Side = "left"

    @property
    def task(self) -> str:
        """What these rules are called in requests."""
        return "token_embed" if self.tokens else "embed"

    @property
    def params(self) -> PoolingParams:
        """What the engine computes; the rest is made of its vector here."""
        return PoolingParams("all" if self.tokens else self.pooling, normalize=False)

    def check_dimensions(self, dimensions: int | None, hidden: int) -> None:
        """Raise RequestError for a length that vectors of this model cannot have."""
        if dimensions in (None, hidden):  # many clients always send the model's own
            return
        if self.dimensions is None:
            raise invalid(
                "dimensions", "is for Matryoshka embeddings, which this model does not make", code="unsupported"
            )
        if not 1 <= dimensions <= hidden:
            raise invalid("dimensions", f"must be from 1 to {hidden}, got {dimensions}")
        if self.dimensions and dimensions not in self.dimensions:
            allowed = ", ".join(map(str, sorted(self.dimensions)))
            raise invalid("dimensions", f"must be one of {allowed}, got {dimensions}")

    def finish(
        self, vector: bytes, dimensions: int | None = None, normalize: bool | None = None, hidden: int = 0
    ) -> NDArray[np.float32]:
        """An embedding of the engine's vector (float32): cut, then of length 1.  Of all tokens, whose vectors have
        `hidden` values each: [tokens, values]."""
        values = np.frombuffer(vector, "<f4").astype(np.float64)
        if self.tokens:
            values = values.reshape(-1, hidden)
        values = values[..., : dimensions or self.default_dimensions]
        if self.normalize if normalize is None else normalize:
            lengths = np.sqrt((values * values).sum(-1, keepdims=True))
            values = np.divide(values, lengths, out=values.copy(), where=lengths > 0)
        return values.astype(np.float32)


class LabelRules(NamedTuple):
    """What a classifier's logits mean.  `activation`: what makes probabilities of them, unless the request does not
    want it.  `tokens`: those of each token; `only_tokens`: the model has no others.  `side`: as in `VectorRules`."""

    labels: tuple[str, ...]
    activation: Activation
    activates: bool = True
    pooling: Kind = "last"
    tokens: bool = False
    only_tokens: bool = False
    side: Side = "left"

    @property
    def task(self) -> str:
        """What these rules are called in requests."""
        return "token_classify" if self.tokens else "classify"

    @property
    def params(self) -> PoolingParams:
        """What the engine computes: logits."""
        return PoolingParams("all" if self.tokens else self.pooling, normalize=False, classify=True)

    def finish(self, vector: bytes, use_activation: bool | None = None) -> NDArray[np.float32]:  # [labels]
        """Probabilities of the engine's logits, or these as they are; of all tokens: [tokens, labels]."""
        logits = np.frombuffer(vector, "<f4")
        if self.tokens:
            logits = logits.reshape(-1, len(self.labels))
        if not (self.activates if use_activation is None else use_activation) or self.activation == "none":
            return logits
        values = logits.astype(np.float64)
        if self.activation == "sigmoid":
            small = np.exp(-np.abs(values))
            values = np.where(values >= 0, 1.0, small) / (1.0 + small)
        else:
            weights = np.exp(values - values.max(-1, keepdims=True))
            values = weights / weights.sum(-1, keepdims=True)
        return values.astype(np.float32)

    def label(self, values: NDArray[np.float32]) -> str:
        return self.labels[int(values.argmax())]


PoolingRules = VectorRules | LabelRules


def rules_for(rules: PoolingRules, task: str | None, field: str = "task") -> PoolingRules:
    """What a request for a task returns; None: what the model is made for.  Raises RequestError, naming the field, for
    a task that the model does not do."""
    if task is None:
        return rules
    known: tuple[str, ...] = ("classify", "token_classify")
    if isinstance(rules, VectorRules):
        known = ("embed", "token_embed")
    if isinstance(rules, LabelRules) and rules.only_tokens:
        known = ("token_classify",)
    if task not in known:
        does = "embeddings" if isinstance(rules, VectorRules) else f"probabilities of labels ({', '.join(known)})"
        raise RequestError(
            f"this model computes {does}; it does not support the task {task!r}", field=field, code="unsupported"
        )
    return rules._replace(tokens=task.startswith("token_"))


def pooler_of(model: ModelConfig) -> PoolingRules | None:
    """The pooler of a resolved configuration; None: the model generates.  Raises StartError.

    Options come before the checkpoint's modules (sentence-transformers' modules.json), and these before the default:
    the last token's hidden state, of length 1.
    """
    if model.runner != "pooling":
        return None
    directory = Path(model.model)
    hf = checkpoint.hf_config(directory) | (model.hf_overrides or {})
    if is_classifier(hf):
        return _labels_with_options(hf, model.pooler_config or {})
    pooler = _of_modules(directory, hf)
    allowed = hf.get("matryoshka_dimensions")
    if isinstance(allowed, list) and all(isinstance(one, int) for one in allowed):
        pooler = pooler._replace(dimensions=frozenset(allowed))
    elif hf.get("is_matryoshka") is True:
        pooler = pooler._replace(dimensions=frozenset())
    return _with_options(pooler, model.pooler_config or {})


def _of_modules(directory: Path, hf: Mapping[str, Any]) -> VectorRules:
    both_ways = encoder_family(hf) is not None
    usual = VectorRules("first" if both_ways else "last", side="right" if both_ways else "left")
    if not (directory / "modules.json").is_file():
        return usual
    modules = checkpoint.read_any_json(directory, "modules.json")
    if not isinstance(modules, list):
        raise StartError("modules.json of the model is not a JSON list")
    kinds = {str(one.get("type", "")).rpartition(".")[2]: one for one in modules if isinstance(one, dict)}
    unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise StartError(f"modules.json has a module of type {min(unknown)}, which is not supported")
    pooling = usual.pooling
    if "Pooling" in kinds:
        path = str(kinds["Pooling"].get("path", ""))
        modes = _modes(checkpoint.read_json(directory / path, "config.json") or {})
        if len(modes) != 1 or modes[0] not in SENTENCE_TYPES:
            raise StartError(f"{path}/config.json: pooling {', '.join(modes)} is not supported")
        pooling = SENTENCE_TYPES[modes[0]]
    return usual._replace(pooling=pooling, normalize="Normalize" in kinds)


def _modes(config: Mapping[str, Any]) -> list[str]:
    """The kinds of pooling that a module's config names, in its newer spelling or by flags; without any, the mean."""
    named = config.get("pooling_mode")
    if named is not None:
        return [str(one) for one in named] if isinstance(named, list) else [str(named)]
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return flags or ["mean"]


def _labels_with_options(hf: Mapping[str, Any], options: Mapping[str, Any]) -> LabelRules:
    per_token, both_ways = labels_tokens(hf), encoder_family(hf) is not None
    rules = LabelRules(
        tuple(classifier.labels(hf)),
        classifier.activation(hf),
        tokens=per_token,
        only_tokens=per_token,
        side="right" if both_ways else "left",
    )
    if both_ways:
        rules = rules._replace(pooling="mean" if _pools_mean(hf) else "first")
    pooling = _pooling_type(options, rules.task)
    if both_ways and pooling not in (None, rules.pooling):
        raise StartError("option pooler_config: the head of this classifier was trained for one pooling_type alone")
    if options.get("dimensions") is not None:
        raise StartError("option pooler_config: dimensions is for embeddings, and the model is a classifier")
    if options.get("use_activation") is not None:
        rules = rules._replace(activates=bool(options["use_activation"]))
    return rules if pooling is None else rules._replace(pooling=pooling)


def _pooling_type(options: Mapping[str, Any], task: str) -> Kind | None:
    """The option pooling_type, after checks that all models need.  Raises StartError."""
    for name in options:
        if name not in OPTIONS:
            raise StartError(f"option pooler_config: {name} is not supported; there are {', '.join(OPTIONS)}")
    if options.get("task") not in (None, task):
        raise StartError(f"option pooler_config: task must be {task}, got {options['task']!r}")
    kind = options.get("pooling_type")
    if kind is not None and kind not in POOLING_TYPES:
        raise StartError(f"option pooler_config: pooling_type must be one of {', '.join(POOLING_TYPES)}, got {kind!r}")
    return None if kind is None else POOLING_TYPES[kind]


def _with_options(pooler: VectorRules, options: Mapping[str, Any]) -> VectorRules:
    pooling = _pooling_type(options, "embed")
    if pooling is not None:
        pooler = pooler._replace(pooling=pooling)
    if options.get("use_activation") is not None:
        pooler = pooler._replace(normalize=bool(options["use_activation"]))
    if options.get("dimensions") is not None:
        try:
            pooler.check_dimensions(options["dimensions"], 1 << 30)
        except RequestError as error:
            raise StartError(f"option pooler_config: {error.message}") from None
        pooler = pooler._replace(default_dimensions=options["dimensions"])
    return pooler


def _pools_mean(hf: Mapping[str, Any]) -> bool:
    """Whether the head of a classifier reads the mean of all tokens, not the first."""
    return encoder_family(hf) == "ModernBert" and hf.get("classifier_pooling") == "mean"
