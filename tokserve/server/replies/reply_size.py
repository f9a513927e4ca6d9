"""Estimates the size of a reply from the request's parameters, before anything is generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from tokserve.base.errors import RequestError
from tokserve.protocol.column_table import column_specs, value_specs
from tokserve.protocol.columns import NUMBER_BYTES, ChoiceBytes, ColumnSpec, ReplyLimits
from tokserve.protocol.logprobs import prompt_width
from tokserve.protocol.params import SamplingParams

OBJECT_BYTES = 96  # JSON of a token with its logprob, or of an alternative, as an object
COLUMN_BYTES = NUMBER_BYTES  # the same in columns
TOKEN_BYTES = 16  # JSON of an id and its text


def reply_sizes(
    lengths: Sequence[int],
    params: SamplingParams,
    limits: ReplyLimits,
    *,
    stream: bool,
    score_each: bool,
    entry_bytes: int,
) -> Counter[str]:
    """Upper estimates in bytes, by the sampling parameter that asks for them; "n": what every choice has.

    `lengths`: of the prompts, in tokens; `entry_bytes`: of a logprob in the reply's format.  Of a stream only the
    prompts' logprobs and values of whole choices count, which are sent at once.
    """
    sizes: Counter[str] = Counter()
    context, vocab_size, n = limits.context, limits.vocab_size, params.n
    longest = context if params.max_tokens is None else params.max_tokens
    both = "logprobs" if params.logprobs is not None else None  # one field asks for them if a prompt is echoed
    for length in lengths:
        if params.prompt_logprob_token_ids is not None:
            rows = max(0, length - 1 - params.prompt_logprob_start)
            size = rows * (1 + prompt_width(params, vocab_size)) * COLUMN_BYTES
            sizes[both or "prompt_logprob_token_ids"] += size
        if params.prompt_logprobs is not None:
            rows = max(0, length - max(1, params.prompt_logprobs_start)) * (n if score_each else 1)
            size = rows * (1 + _width(params.prompt_logprobs, vocab_size)) * entry_bytes
            sizes[both or "prompt_logprobs"] += size
        for asked_by, choice_bytes in _sized_values():
            sizes[asked_by] += n * choice_bytes(params, min(length + longest, context), limits)
    if stream:
        return sizes
    tokens = n * sum([min(longest, max(0, context - length)) for length in lengths])
    sizes["n"] += tokens * TOKEN_BYTES
    named = len(params.logprob_token_ids or ())
    if both or named:
        entries = 1 + _width(params.logprobs or 0, vocab_size) + named
        sizes[both or "logprob_token_ids"] += tokens * entries * entry_bytes
    for column in _sized_columns():
        if column.token_bytes is not None and column.form_of(params, vocab_size, "raw") is not None:
            sizes[column.asked_by] += tokens * column.token_bytes(params, limits)
    return sizes


@cache
def _sized_columns() -> list[ColumnSpec]:
    return [spec for spec in column_specs().values() if spec.token_bytes is not None]


@cache
def _sized_values() -> list[tuple[str, ChoiceBytes]]:
    """What asks for values whose size is declared, or "n", and their sizes."""
    specs = value_specs().values()
    return [(spec.asked_by or "n", spec.choice_bytes) for spec in specs if spec.choice_bytes is not None]


def _width(top: int, vocab_size: int) -> int:
    return vocab_size if top == -1 else top


def check_reply_size(sizes: Counter[str], limit: int) -> None:
    """Raise `RequestError`, which names what takes most, for a reply of more than `limit` bytes."""
    size = sizes.total()
    if size <= limit:
        return
    raise RequestError(
        f"the reply may have {size >> 20} MiB, above the limit of {limit >> 20} (--max-reply-bytes): request fewer "
        "choices, tokens, logprobs or hidden states, logprobs in columns, smaller sampling masks (top_k), or a stream",
        field=sizes.most_common(1)[0][0],
        code="reply_too_large",
    )
