"""Estimates the size of a reply from the request's parameters, before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence

from tokserve.base.errors import RequestError
from tokserve.protocol.column_table import asked_columns, column_specs, output_specs, value_specs
from tokserve.protocol.columns import NUMBER_BYTES, ReplyLimits
from tokserve.protocol.logprobs import prompt_width
from tokserve.protocol.params import SamplingParams

OBJECT_BYTES = 96  # JSON of a token with its logprob, or of an alternative, as an object
COLUMN_BYTES = NUMBER_BYTES  # the same in columns
TOKEN_BYTES = 16  # JSON of an id and its text


def reply_bytes(
    lengths: Sequence[int],
    params: SamplingParams,
    limits: ReplyLimits,
    *,
    stream: bool,
    score_each: bool,
    entry_bytes: int,
) -> int:
    """An upper estimate in bytes.  `lengths`: of the prompts, in tokens; `entry_bytes`: of a logprob in the reply's
    format.  Of a stream only the prompts' logprobs and values of whole choices count, which are sent at once."""
    context, vocab_size = limits.context, limits.vocab_size
    repeats = params.n if score_each else 1
    per_token = TOKEN_BYTES + _output_entries(params, vocab_size) * entry_bytes
    for name in asked_columns(params):
        token_bytes = column_specs()[name].token_bytes
        per_token += 0 if token_bytes is None else token_bytes(params, limits)
    total = 0
    longest = context if params.max_tokens is None else params.max_tokens
    for length in lengths:
        if params.prompt_logprob_token_ids is not None:
            rows = max(0, length - 1 - params.prompt_logprob_start)
            total += rows * (1 + prompt_width(params, vocab_size)) * COLUMN_BYTES
        if params.prompt_logprobs is not None:
            rows = max(0, length - max(1, params.prompt_logprobs_start))
            total += repeats * rows * (1 + _width(params.prompt_logprobs, vocab_size)) * entry_bytes
        for spec in value_specs().values():
            if spec.choice_bytes is not None:
                total += params.n * spec.choice_bytes(params, min(length + longest, context), limits)
        if not stream:
            tokens = min(longest, max(0, context - length))
            total += params.n * tokens * per_token
    return total


def _output_entries(params: SamplingParams, vocab_size: int) -> int:
    named = len(params.logprob_token_ids or ())
    if params.logprobs is None and not named:
        return 0
    return 1 + _width(params.logprobs or 0, vocab_size) + named


def _width(top: int, vocab_size: int) -> int:
    return vocab_size if top == -1 else top


def check_reply_size(size: int, limit: int, params: SamplingParams) -> None:
    """Raise `RequestError` for a reply of more than `limit` bytes."""
    if size <= limit:
        return
    of_rooms = [spec.asked_by for spec in output_specs() if spec.asked_by]
    names = (*of_rooms, "prompt_logprobs", "prompt_logprob_token_ids", "logprobs")
    at_fault = [name for name in names if getattr(params, name) not in (None, False)]
    raise RequestError(
        f"the reply may have {size >> 20} MiB, above the limit of {limit >> 20} (--max-reply-bytes): request fewer "
        "choices, tokens or logprobs, logprobs in columns, smaller sampling masks (top_k), or a stream",
        field=at_fault[-1] if at_fault else "n",
        code="reply_too_large",
    )
