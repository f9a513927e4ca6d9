"""Beam search on the text routes: `use_beam_search`, with `n` beams and as many choices, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokserve.base.errors import invalid
from tokserve.features.beams.beam_search import BeamSearchParams
from tokserve.protocol.params import SamplingParams

if TYPE_CHECKING:
    from tokserve.dialects.openai.schemas import TextBody

# fields of a body that beam search reads, and those that change nothing in it: of a distribution to draw from
TAKEN = frozenset(
    {
        "n",
        "max_tokens",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "detokenize",
        "include_stop_str_in_output",
        "allowed_token_ids",
        "logprobs",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
    }
)
REFUSED = (
    "stream",
    "echo",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "trace_decode_token_ids",
    "prediction",
    "draft_token_ids",
    "deadline_ms",
    "structured_outputs",
    "response_format",
    "tools",
)


def beam_params(body: TextBody, params: SamplingParams) -> BeamSearchParams | None:
    """What the body asks of beam search, if anything.  Raises RequestError for a field that it has no use for."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise invalid("length_penalty", "has no meaning without use_beam_search", code="unsupported")
        return None
    if params.logprobs == -1:
        raise invalid("logprobs", "must be at least 0 with use_beam_search")
    plain = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        value = getattr(body, name, None)
        if name not in TAKEN and value is not None and getattr(params, name) != getattr(plain, name):
            raise invalid(name, "is not supported with use_beam_search", code="unsupported")
    for name in REFUSED:
        value = getattr(body, name, None)
        if value and value != {"type": "text"}:
            raise invalid(name, "is not supported with use_beam_search", code="unsupported")
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=1 << 30 if params.max_tokens is None else params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        allowed_token_ids=params.allowed_token_ids,
        logprobs=params.logprobs,
    )


def refuse_beams(beams: BeamSearchParams | None) -> None:
    """Raise RequestError if there are any: no single request for tokens is a search."""
    if beams is not None:
        raise invalid("use_beam_search", "is not supported here", code="unsupported")
