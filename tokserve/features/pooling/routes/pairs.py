"""Scores of pairs: the cosine of two embeddings, or what a classifier with one label makes of both texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokserve.base.errors import RequestError, invalid
from tokserve.client.inputs import token_prompt
from tokserve.dialects.openai.completions import MAX_PROMPTS, parse_prompts
from tokserve.features.pooling.pairs import PairPrompts, Side, check_scores_pairs, counterparts, similarity
from tokserve.features.pooling.pooled_outputs import VectorRules
from tokserve.features.pooling.routes import inputs
from tokserve.features.pooling.routes.inputs import PooledPrompts, PoolingBody
from tokserve.protocol.prompt import TokenPrompt
from tokserve.server.request_starter import FieldPaths
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

MAX_PAIR_TOKENS = 1 << 24  # of all pairs of a request: a long query may be in each


class PairsBody(PoolingBody):
    """What /score and /rerank share."""

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None


class Sides(NamedTuple):
    """The two lists of a request, with the fields that they came in; `listed`: they came as lists."""

    first: list[Side]
    second: list[Side]
    fields: tuple[str, str]
    listed: tuple[bool, bool]

    def path(self, side: int, index: int) -> str:
        """Where an entry is in the body."""
        return f"{self.fields[side]}[{index}]" if self.listed[side] else self.fields[side]


class PairPaths(FieldPaths, frozen=True):
    """Where the prompts of a request come from, in their order."""

    paths: tuple[str, ...] = ()

    def rename(self, error: RequestError, index: int | None = None) -> RequestError:
        """The error with the field as the client wrote it."""
        if index is None and len(self.paths) > 1:
            return super().rename(error, index)
        path = self.paths[index or 0]
        return FieldPaths(path).rename(error)


class Scored(NamedTuple):
    """A score for each pair, and what the engine said."""

    scores: list[float]
    pooled: PooledPrompts


def entries(value: Any, field: str) -> list[Side]:
    """Texts, objects {"text": text}, or token ids, one or several.  Raises RequestError."""
    if isinstance(value, Mapping):
        return [_text(value, field)]
    if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        if len(value) > MAX_PROMPTS:
            raise invalid(field, f"must have at most {MAX_PROMPTS} entries, got {len(value)}")
        value = [_text(one, f"{field}[{index}]") for index, one in enumerate(value)]
    return [*parse_prompts(value, field)]


def _text(value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if not isinstance(value.get("text"), str) or len(value) > 1:
        raise invalid(field, 'must be a text, or an object with "text" alone', code=inputs.UNSUPPORTED)
    return value["text"]


async def score(call: RouteCall[PairsBody], sides: Sides) -> Scored:
    """The score of each pair.  Raises RequestError."""
    serving, body = call.serving, call.body
    rules = inputs.any_rules(serving)
    if not isinstance(rules, VectorRules):
        check_scores_pairs(rules)
    inputs.check_truncation(serving, body)
    try:
        pairs = counterparts(len(sides.first), len(sides.second))
    except RequestError as error:
        raise RequestError(error.message, field=sides.fields[1]) from None
    bare = _Prompts(serving, body, sides)
    serving.requests.name_request(call.request, body)
    if isinstance(rules, VectorRules):
        prompts, paths = await call.run(bare.alone)
    else:
        prompts, paths = await call.run(lambda: bare.joined(pairs), call.size * max(1, len(pairs) // 8))
    places = PairPaths(paths[0], paths=tuple(paths))
    pooled = await inputs.pool(call, rules.params, prompts, places)
    if not isinstance(rules, VectorRules):
        return Scored([float(rules.finish(vector, body.use_activation)[0]) for vector in pooled.vectors], pooled)

    def cosines() -> list[float]:
        vectors = [rules.finish(vector) for vector in pooled.vectors]  # those of the first side come first
        return [similarity(vectors[first], vectors[len(sides.first) + second]) for first, second in pairs]

    return Scored(await call.run(cosines, inputs.REPLY_BYTES), pooled)


class _Prompts:
    """Makes the prompts of a request, with the fields that they come from."""

    def __init__(self, serving: Serving, body: PairsBody, sides: Sides) -> None:
        self._serving, self._body, self._sides = serving, body, sides
        self._context = serving.llm.ready.max_model_len
        tokenizer = serving.tokenizer if serving.text else None
        self._prompts = PairPrompts(
            tokenizer, serving.config.server.chat_template, serving.config.server.special_tokens_in_content
        )
        limits = body.max_tokens_per_query, body.max_tokens_per_doc
        for name, limit in zip(("max_tokens_per_query", "max_tokens_per_doc"), limits, strict=True):
            if limit is not None and limit < 0:
                raise invalid(name, f"must be at least 0, got {limit}")
        self._limits = limits[0] or 0, limits[1] or 0
        self._side = inputs.any_rules(serving).side
        self._frame = (0, 0) if tokenizer is None or self._prompts.has_template else tokenizer.frame

    def alone(self) -> tuple[list[TokenPrompt], list[str]]:
        """Every entry of both sides by itself."""
        if self._body.instruction is not None:
            raise RequestError(
                "instruction needs a cross-encoder: write it into the queries",
                field="instruction",
                code=inputs.UNSUPPORTED,
            )
        prompts, paths = [], []
        for side, entries in ((0, self._sides.first), (1, self._sides.second)):
            for index in range(len(entries)):
                path = self._sides.path(side, index)
                prompts.append(self._checked(self._prompts.side(self._entry(side, index)), path))
                paths.append(path)
        return prompts, paths

    def joined(self, pairs: Sequence[tuple[int, int]]) -> tuple[list[TokenPrompt], list[str]]:
        queries: dict[int, Side] = {}
        prompts, paths, total = [], [], 0
        for first, second in pairs:
            if first not in queries:
                queries[first] = self._entry(0, first)
            path = self._sides.path(1, second)
            ids, start = self._prompts.pair(queries[first], self._entry(1, second), self._body.instruction)
            prompts.append(self._checked(ids, path, start))
            paths.append(path)
            total += len(prompts[-1].ids) // 4
            if total > MAX_PAIR_TOKENS:
                raise invalid(self._sides.fields[1], f"the pairs must have at most {MAX_PAIR_TOKENS} tokens together")
        return prompts, paths

    def _entry(self, side: int, index: int) -> Side:
        entry, path = (self._sides.first, self._sides.second)[side][index], self._sides.path(side, index)
        limit = self._limits[side]
        if isinstance(entry, str):
            is_cut = limit or self._body.truncate_prompt_tokens is not None
            self._serving.check_text(entry, path, inputs.CUT_BYTES if is_cut else 0)
        return self._prompts.cut(entry, limit)

    def _checked(self, ids: list[int], path: str, start: int = -1) -> TokenPrompt:
        if not ids:
            raise invalid(path, "must not be empty")
        ids, start = inputs.truncated(ids, self._body, self._context, self._side, self._frame, start)
        if len(ids) > self._context:
            raise RequestError(
                f"This model's maximum context length is {self._context} tokens (max_model_len), and {path} makes a "
                f"prompt of {len(ids)}",
                field=path,
                code="context_length_exceeded",
            )
        prompt = token_prompt(ids, self._serving.llm.ready.vocab_size)
        return prompt if start < 0 else msgspec.structs.replace(prompt, second=start)
