"""The probabilities of labels, each a token, as the next token after a query and an item, for every item.

An item is a request of one token, whose `logprob_token_ids` are the labels: the query is computed once, and a score is
the same whatever other items there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokserve.base.errors import RequestError, invalid
from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.openai import schemas
from tokserve.dialects.openai.completions import MAX_PROMPTS
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.params import SamplingParams
from tokserve.server import compat
from tokserve.server.generation import Usage
from tokserve.server.http.workers import ITEM
from tokserve.server.replies import sse
from tokserve.server.request_starter import FieldPaths
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

Text = str | list[int]


class LabelScoresBody(schemas.ScheduledBody):
    """A query, and items that follow it, or with `item_first` precede it: texts or token ids.  `apply_softmax`: the
    labels' probabilities are those among the labels, not among all tokens."""

    others: ClassVar[compat.FieldTable] = {}

    query: str | list[int] | None = None
    items: str | list[str] | list[list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None


class LabelScores(NamedTuple):
    """`probabilities`: [items, labels].  `key`: of the request, for the reply's id."""

    probabilities: NDArray[np.float64]
    key: str
    usage: Usage
    headers: dict[str, str]


async def score_labels(call: RouteCall[LabelScoresBody], *, joins_texts: bool) -> LabelScores:
    """The labels' probabilities.  `joins_texts`: a query and an item that are texts are tokenized as one.  Raises
    RequestError."""
    serving, request, body = call.serving, call.request, call.body
    query = body.query
    if query is None:
        raise RequestError("query is required", field="query")
    if not body.label_token_ids:
        raise invalid("label_token_ids", "must have at least one token id")
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprob_token_ids=body.label_token_ids, logprobs_mode="raw", ignore_eos=True
    )
    serving.requests.name_request(request, body)
    prompts = await call.run(lambda: prompts_of(serving, body, query, joins_texts=joins_texts))
    generate = serving.requests.request_of(request, body, params, text=False)
    place = "items[0]" if len(prompts) == 1 else "items"
    paths = FieldPaths(place, others={"logprob_token_ids": "label_token_ids"})
    generation = await serving.requests.start(request, generate, prompts, paths)
    choices = await sse.collect(generation, request)
    softmax = bool(body.apply_softmax)
    rows = await call.run(lambda: [probabilities(one, softmax) for one in choices], ITEM * len(choices))
    headers = {"X-Request-Id": generate.request_id, **call.headers}
    return LabelScores(np.stack(rows), generation.key, generation.usage(), headers)


def prompts_of(serving: Serving, body: LabelScoresBody, query: Text, *, joins_texts: bool) -> list[list[int]]:
    """The ids of the query with each item.  Raises RequestError."""
    if not body.items:
        raise invalid("items", "must have at least one item")
    items: Sequence[Text] = [body.items] if isinstance(body.items, str) else body.items
    if len(items) > MAX_PROMPTS:
        raise invalid("items", f"must have at most {MAX_PROMPTS} entries, got {len(items)}")
    special, places = body.add_special_tokens is not False, [f"items[{index}]" for index in range(len(items))]
    if joins_texts and isinstance(query, str) and isinstance(items[0], str):
        joined = [f"{item}{query}" if body.item_first else f"{query}{item}" for item in items]
        return _encoded(serving, joined, places, special)
    [query_ids] = _encoded(serving, [query], ["query"], special)
    prompts = []
    for item, place in zip(_encoded(serving, items, places, False), places, strict=True):
        ids = item + query_ids if body.item_first else query_ids + item
        if not ids:
            raise invalid(place, "and query must not both be empty")
        prompts.append(ids)
    return prompts


def _encoded(serving: Serving, values: Sequence[Text], places: Sequence[str], special: bool) -> list[list[int]]:
    """The ids of texts, or ids as they are."""
    texts = [value for value in values if isinstance(value, str)]
    if texts and not serving.text:
        raise invalid(
            places[0], "needs a tokenizer, and this is a tokens-only server: send token ids", code="tokens_only"
        )
    limit = serving.llm.ready.vocab_size
    for value, place in zip(values, places, strict=True):
        if isinstance(value, str):
            serving.check_text(value, place)
        elif value and not 0 <= min(value) <= max(value) < limit:
            index = next(index for index, token in enumerate(value) if not 0 <= token < limit)
            raise invalid(f"{place}[{index}]", f"must be a token id from 0 to {limit - 1}")
    encoded = iter(serving.tokenizer.encode_each(texts, special) if texts else ())
    return [next(encoded) if isinstance(value, str) else value for value in values]


def probabilities(choice: ChoiceOutput, softmax: bool) -> NDArray[np.float64]:
    """The probabilities [labels] of an item's labels; `softmax`: among them.  Raises RequestError."""
    if choice.logprobs is None or not choice.logprobs.num_rows:
        raise sse.unfinished(choice, "an item ended without scores")
    logprobs = Logprobs.of(choice.logprobs).top_logprobs[0].astype(np.float64)
    if not softmax:
        return np.exp(logprobs)
    largest = logprobs.max()
    if largest == -np.inf:
        return np.zeros_like(logprobs)
    weights = np.exp(logprobs - largest)
    return weights / weights.sum()
