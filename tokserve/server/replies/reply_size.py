"""Estimates the size of a reply from the request's parameters, before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence

from tokserve.base.errors import RequestError
from tokserve.protocol.logprobs import prompt_width
from tokserve.protocol.params import SamplingParams

OBJECT_BYTES = 96  # JSON of a token with its logprob, or of an alternative, as an object
COLUMN_BYTES = 24  # the same in columns
MASK_ID_BYTES = 4  # of an id in a sampling mask; its JSON is made while it is sent
TOKEN_BYTES = 16  # JSON of an id and its text


def reply_bytes(
    lengths: Sequence[int],
    params: SamplingParams,
    context: int,
    vocab_size: int,
    *,
    stream: bool,
    score_each: bool,
    entry_bytes: int,
    max_mask: int = 0,
    routed_bytes: int = 0,
) -> int:
    """An upper estimate in bytes.  `lengths`: of the prompts, in tokens; `entry_bytes`: of a logprob in the reply's
    format; `max_mask`: most ids of a sampling mask, 0 if there are none; `routed_bytes`: of the routed experts of a
    position.  Of a stream only the prompts' logprobs and the routed experts count, which are sent at once."""
    repeats = params.n if score_each else 1
    per_token = TOKEN_BYTES + _output_entries(params, vocab_size) * entry_bytes
    if max_mask:
        per_token += 2 * COLUMN_BYTES + _mask_ids(params, min(max_mask, vocab_size)) * MASK_ID_BYTES
    total = 0
    longest = context if params.max_tokens is None else params.max_tokens
    for length in lengths:
        if params.prompt_logprob_token_ids is not None:
            rows = max(0, length - 1 - params.prompt_logprob_start)
            total += rows * (1 + prompt_width(params, vocab_size)) * COLUMN_BYTES
        if params.prompt_logprobs is not None:
            rows = max(0, length - max(1, params.prompt_logprobs_start))
            total += repeats * rows * (1 + _width(params.prompt_logprobs, vocab_size)) * entry_bytes
        if routed_bytes:
            positions = min(length + longest, context) - params.routed_experts_prompt_start
            total += params.n * max(0, positions) * routed_bytes * 4 // 3  # in base64
        if not stream:
            tokens = min(longest, max(0, context - length))
            total += params.n * tokens * per_token
    return total


def _mask_ids(params: SamplingParams, limit: int) -> int:
    if params.temperature == 0.0:
        return 1
    return min(limit, params.top_k) if params.top_k > 0 else limit


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
    names = ("return_sampling_mask", "prompt_logprobs", "prompt_logprob_token_ids", "logprobs")
    at_fault = [name for name in names if getattr(params, name) not in (None, False)]
    raise RequestError(
        f"the reply may have {size >> 20} MiB, above the limit of {limit >> 20} (--max-reply-bytes): request fewer "
        "choices, tokens or logprobs, logprobs in columns, smaller sampling masks (top_k), or a stream",
        field=at_fault[-1] if at_fault else "n",
        code="reply_too_large",
    )
