"""The markers of a model's reasoning as token ids, for requests that limit its length."""

from __future__ import annotations

import msgspec

from tokserve.base.errors import invalid
from tokserve.features.chat.text_context import TextContext
from tokserve.protocol.params import SamplingParams, ThinkingMarkers
from tokserve.server.serving import Serving


def with_markers(serving: Serving, params: SamplingParams) -> SamplingParams:
    """The parameters with the markers that a budget of reasoning needs, if there is one and they have none.  Raises
    RequestError if the server does not know them."""
    if params.thinking_token_budget in (None, -1) or params.thinking_markers is not None:
        return params
    thinking = serving.state_of(TextContext).thinking if serving.text else None
    if thinking is None:
        reason = "this server does not know where reasoning ends (--reasoning-parser)"
        raise invalid("thinking_token_budget", f"is not supported here: {reason}", code="unsupported")
    opens, closes = (serving.tokenizer.encode(text.strip(), False) for text in (thinking.opens, thinking.closes))
    return msgspec.structs.replace(params, thinking_markers=ThinkingMarkers(opens=opens, closes=closes))


def beginning(params: SamplingParams, *, inside: bool) -> SamplingParams:
    """The parameters for an output that begins in the reasoning, or not."""
    markers = params.thinking_markers
    if markers is None or markers.inside is not None:
        return params
    return msgspec.structs.replace(params, thinking_markers=msgspec.structs.replace(markers, inside=inside))
