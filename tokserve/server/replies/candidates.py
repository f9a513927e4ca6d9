"""The logprobs of candidates at the prompt's positions, as `.npy` arrays: base64 in JSON, byte strings in msgpack."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from tokserve.client.outputs import Column
from tokserve.protocol.candidates import pack_array
from tokserve.protocol.logprobs import Logprobs


class CandidateFields(msgspec.Struct, kw_only=True):
    """The fields of a reply whose request has `prompt_logprob_token_ids`; null if its prompt was not computed.

    Row i is of prompt token `prompt_logprob_start` + i + 1, float32: of the candidates [rows, K] (-inf where there is
    none), of all other ids together [rows], and of the token itself [rows].
    """

    prompt_token_id_logprobs: bytes | UnsetType | None = UNSET
    prompt_rest_logprobs: bytes | UnsetType | None = UNSET
    prompt_token_logprobs: bytes | UnsetType | None = UNSET


def write_candidates(reply: CandidateFields, column: Column | None) -> None:
    """Fill in the fields from the column of the prompt's logprobs."""
    if column is None:
        reply.prompt_token_id_logprobs = reply.prompt_rest_logprobs = reply.prompt_token_logprobs = None
        return
    logprobs = Logprobs.of(column)
    reply.prompt_token_id_logprobs = pack_array(np.ascontiguousarray(logprobs.top_logprobs[:, :-1]))
    reply.prompt_rest_logprobs = pack_array(np.ascontiguousarray(logprobs.top_logprobs[:, -1]))
    reply.prompt_token_logprobs = pack_array(np.ascontiguousarray(logprobs.token_logprobs))
