"""Options of what every reply contains, for clients that cannot be changed to request it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tokserve.config.common import about


class ReplyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What replies contain without a request for it."""

    enable_force_include_usage: Annotated[
        bool, about("Report usage in every chunk of a stream and at its end, whatever stream_options say.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, about('Show tokens in logprobs as "token_id:7", unless the request says otherwise.')
    ] = False
    enable_per_request_metrics: Annotated[
        bool,
        about(
            "Put the times of a request with one choice into its reply, and at the end of a stream with usage "
            "(`metrics`)."
        ),
    ] = False
    enable_request_id_headers: Annotated[
        bool, about("Make an X-Request-Id for every reply to a request without one, also of routes without ids.")
    ] = False
