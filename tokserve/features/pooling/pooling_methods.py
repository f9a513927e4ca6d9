"""`LLM`'s methods for models that pool: vectors, classes, scores of pairs.  Results have vLLM's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tokserve.base.errors import RequestError, invalid
from tokserve.client.outputs import ChoiceOutput
from tokserve.client.results import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from tokserve.client.stream import Stream
from tokserve.features.chat.prompts import (
    AS_USUAL,
    ParsedPrompt,
    Prompt,
    Tokenization,
    as_list,
    read_prompt,
    tokenization,
)
from tokserve.features.pooling.columns import packed_vector
from tokserve.features.pooling.pairs import PairPrompts, Side, check_scores_pairs, counterparts, similarity
from tokserve.features.pooling.pooled_outputs import TASKS, LabelRules, PoolingRules, VectorRules, rules_for
from tokserve.features.pooling.pooling_params import PoolingParams, each_pooling
from tokserve.protocol.messages import Ready
from tokserve.protocol.params import PoolingParams as PoolingTask
from tokserve.text.tokenizer import Tokenizer

R = TypeVar("R", bound=PooledRequestOutput[Any])
Ended = tuple[ParsedPrompt, Stream, ChoiceOutput]


class PoolingMethods(ABC):
    """Each is refused (RequestError) by a model that makes something else."""

    _pooler: PoolingRules | None

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """The resolved configuration."""

    @property
    @abstractmethod
    def ready(self) -> Ready:
        """What the engine reported when it was ready."""

    @abstractmethod
    def _pool(self, parsed: Sequence[ParsedPrompt], task: PoolingTask, lora_request: Any, use_tqdm: Any) -> list[Ended]:
        """Each prompt with its stream and its only delta."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Any = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, of a model with `runner="pooling"`, in the order of the prompts.

        `dimensions`: cut it to so many values, if the model is made for that.  `normalize`: to length 1; default: as
        the model says.  `pooling_params`: a `PoolingParams` with these for all, or one each.  Raises RequestError.
        """
        rules = self._rules(VectorRules)
        per_prompt, ended = self._pooled_each(
            prompts,
            rules,
            pooling_params,
            tokenization_kwargs,
            lora_request,
            use_tqdm,
            dimensions=dimensions,
            normalize=normalize,
        )
        vectors = [
            EmbeddingOutput(rules.finish(packed_vector(one[2]), params.dimensions, params.activates).tolist())
            for params, one in zip(per_prompt, ended, strict=True)
        ]
        return _outputs(EmbeddingRequestOutput, ended, vectors)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Any = None,
        use_activation: bool | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of a classifier's labels for each prompt; `use_activation` False: the logits.  Raises
        RequestError."""
        rules: Any = rules_for(self._rules(LabelRules), "classify", "model")
        per_prompt, ended = self._pooled_each(
            prompts, rules, pooling_params, tokenization_kwargs, lora_request, use_tqdm, use_activation=use_activation
        )
        classes = [
            ClassificationOutput(rules.finish(packed_vector(one[2]), params.activates).tolist())
            for params, one in zip(per_prompt, ended, strict=True)
        ]
        return _outputs(ClassificationRequestOutput, ended, classes)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Any = None,
        *,
        pooling_task: str | None = None,
        use_activation: bool | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """`pooling_task` "embed" or "classify": what `embed` or `classify` return, as arrays; "token_embed" or
        "token_classify": the same for each token, [tokens, values].  Raises RequestError."""
        if pooling_task not in TASKS:
            raise invalid("pooling_task", f"must be one of {', '.join(TASKS)}, got {pooling_task!r}")
        kind = VectorRules if pooling_task.endswith("embed") else LabelRules
        rules = rules_for(self._rules(kind), pooling_task, "pooling_task")
        per_prompt, ended = self._pooled_each(
            prompts, rules, pooling_params, tokenization_kwargs, lora_request, use_tqdm, use_activation=use_activation
        )
        if isinstance(rules, VectorRules):
            hidden = self.ready.facts["hidden_size"]
            rows = [
                rules.finish(packed_vector(one[2]), params.dimensions, params.activates, hidden)
                for params, one in zip(per_prompt, ended, strict=True)
            ]
        else:
            rows = [
                rules.finish(packed_vector(one[2]), params.activates)
                for params, one in zip(per_prompt, ended, strict=True)
            ]
        return _outputs(PoolingRequestOutput, ended, map(PoolingOutput, rows))

    def reward(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: Any = None, **options: Any
    ) -> list[PoolingRequestOutput]:
        """What a reward model says of each token: `encode` with the task "token_classify".  Raises RequestError."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify", **options)

    def _pooled_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        rules: Any,
        pooling_params: Any,
        kwargs: Mapping[str, Any] | None,
        lora_request: Any,
        use_tqdm: Any,
        **given: Any,
    ) -> tuple[list[PoolingParams], list[Ended]]:
        """What is to be made of each prompt's vector, and the vectors."""
        how = tokenization(kwargs)
        parsed = self._read(prompts, how)
        per_prompt = each_pooling(pooling_params, len(parsed), **given)
        for params in per_prompt:
            if params.task not in (None, rules.task):
                raise invalid("pooling_params.task", f"must be {rules.task}, got {params.task!r}")
            if params.dimensions is not None and not isinstance(rules, VectorRules):
                raise invalid("dimensions", "is for embeddings, and the model is a classifier", code="unsupported")
            if isinstance(rules, VectorRules):
                rules.check_dimensions(params.dimensions, self.ready.facts["hidden_size"])
        short = [
            Tokenization(keep=params.truncate_prompt_tokens).shorten(self._short(prompt, how, rules), self._context)
            for params, prompt in zip(per_prompt, parsed, strict=True)
        ]
        return per_prompt, self._pool(short, rules.params, lora_request, use_tqdm)

    @property
    def _context(self) -> int:
        return self.ready.max_model_len

    def _short(self, prompt: ParsedPrompt, how: Tokenization, rules: Any) -> ParsedPrompt:
        return how.shorten(prompt, self._context, rules.side)

    def _score_pairs(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        instruction: str | None = None,
        pooling_params: Any = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """The similarity of each pair, or a cross-encoder's score."""
        rules = self._pooler
        assert rules is not None
        server = self.config.server
        template = chat_template or server.chat_template
        prompts = PairPrompts(self.tokenizer, template, server.special_tokens_in_content)
        how = tokenization(tokenization_kwargs)
        use_activation = each_pooling(pooling_params, 1, use_activation=use_activation)[0].activates
        first, second = as_list(queries), as_list(documents)
        pairs = counterparts(len(first), len(second))
        if isinstance(rules, VectorRules):
            parsed = [self._short(read_prompt(one, self.tokenizer, how), how, rules) for one in (*first, *second)]
            ended = self._pool(parsed, rules.params, lora_request, use_tqdm)
            vectors = [rules.finish(packed_vector(delta)) for _, _, delta in ended]
            return [
                _score(similarity(vectors[a], vectors[len(first) + b]), ended[a], ended[len(first) + b])
                for a, b in pairs
            ]
        check_scores_pairs(rules)
        joined_ids = [prompts.pair(_side(first[a]), _side(second[b]), instruction) for a, b in pairs]
        joined = [self._short(ParsedPrompt(ids, second=start), how, rules) for ids, start in joined_ids]
        ended = self._pool(joined, rules.params, lora_request, use_tqdm)
        return [_score(float(rules.finish(packed_vector(one[2]), use_activation)[0]), one) for one in ended]

    def _read(self, prompts: Prompt | Sequence[Prompt], how: Tokenization = AS_USUAL) -> list[ParsedPrompt]:
        return [read_prompt(prompt, self.tokenizer, how) for prompt in as_list(prompts)]

    def _rules(self, kind: Any) -> Any:
        if self._pooler is None:
            raise RequestError('this model generates: LLM(..., runner="pooling") makes embeddings', field="runner")
        if not isinstance(self._pooler, kind):
            makes = "embeddings" if isinstance(self._pooler, VectorRules) else "probabilities of labels"
            raise RequestError(f"this model makes {makes}", code="unsupported")
        return self._pooler


def _outputs(kind: type[R], ended: Sequence[Ended], outputs: Iterable[Any]) -> list[R]:
    """What the methods return: of this kind, one for each prompt."""
    return [
        kind(stream.request_id, prompt.text, list(stream.prompt_ids), output, delta.cached_tokens)
        for (prompt, stream, delta), output in zip(ended, outputs, strict=True)
    ]


def _side(prompt: Prompt) -> Side:
    """One side of a pair, as a text or as ids."""
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return str(prompt["prompt"])
    return prompt if isinstance(prompt, str) else read_prompt(prompt, None).ids


def _score(value: float, *ended: Ended) -> ScoringRequestOutput:
    ids = [token for _, stream, _ in ended for token in stream.prompt_ids]
    cached = sum(delta.cached_tokens for _, _, delta in ended)
    return ScoringRequestOutput(ended[0][1].request_id, None, ids, ScoringOutput(value), cached)
