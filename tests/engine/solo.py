"""What a request of the scripted model gives when it runs alone: any function of its tokens will do.

The next token is a hash of (seed, position, all tokens before), so it cannot depend on scheduling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokserve.protocol.columns import Column
from tokserve.protocol.logprobs import logprob_records, stride_of
from tokserve.protocol.messages import EngineRequest
from tokserve.protocol.params import PoolingParams, RequestOptions, SamplingParams
from tokserve.protocol.plan import Float32, Int32
from tokserve.protocol.prompt import Feature, TokenPrompt, pack_ids

VOCAB = 20
EOS = (1,)
START = hashlib.blake2b(b"start", digest_size=8).digest()


def engine_request(
    request_id: str,
    prompt: Sequence[int] | bytes,
    task: SamplingParams | PoolingParams | None = None,
    seed: int = 0,
    *,
    arrival: float = 0.0,
    features: tuple[Feature, ...] = (),
    **options: Any,
) -> EngineRequest:
    """A request that streams, unless told otherwise."""
    packed = prompt if isinstance(prompt, bytes) else pack_ids(prompt)
    options = {"stream": True} | {name: value for name, value in options.items() if value not in ("", None)}
    task = SamplingParams() if task is None else task
    return EngineRequest(request_id, TokenPrompt(packed, features), task, RequestOptions(**options), seed, arrival)


def chain(prefix: bytes, token: int) -> bytes:
    return hashlib.blake2b(prefix + token.to_bytes(4, "little"), digest_size=8).digest()


def prefixes_of(tokens: Sequence[int], features: Sequence[Feature] = ()) -> list[bytes]:
    """Hashes of tokens[:0], tokens[:1], ...; a feature counts at each of its positions."""
    inside = {f.start + i: f"{f.kind},{i}".encode() + f.hash for f in features for i in range(f.length)}
    prefixes = [START]
    for position, token in enumerate(tokens):
        prefixes.append(chain(prefixes[-1] + inside.get(position, b""), token))
    return prefixes


def vector(prefix: bytes) -> Float32:
    """What pooling brings for the tokens hashed in `prefix`."""
    return np.frombuffer(hashlib.blake2b(prefix + b"pooled", digest_size=16).digest(), np.uint8).astype(np.float32)


def draw(
    prefix: bytes, seed: int, position: int, banned: Iterable[int] = (), vocab: int = VOCAB, weights: str = ""
) -> int:
    """The token at `position` after the tokens hashed in `prefix`."""
    digest = hashlib.blake2b(prefix + f"{seed},{position}{weights}".encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % vocab
    while token in set(banned):
        token = (token + 1) % vocab
    return token


def logprob_row(
    prefix: bytes, token: int, width: int, named: Sequence[int] = (), weights: str = ""
) -> tuple[float, int, Any, Any]:
    """Logprob, rank, top ids and top logprobs of `token` after `prefix`: any function of these will do."""
    digest = hashlib.blake2b(prefix + b"lp" + weights.encode(), digest_size=8).digest()
    number = int.from_bytes(digest[:4], "little") / 2**32
    ids = [(digest[4] + i) % VOCAB for i in range(width - len(named))] + list(named)
    return -number - token, 1 + digest[5], ids, [-number - i for i in range(width)]


def rows_of(rows: Sequence[tuple[float, int, Any, Any]], width: int, padding: int = 0) -> Int32:
    """The records of these rows."""
    count = len(rows)
    ids = np.full((count, width + padding), -7, np.int32)
    values = np.full((count, width + padding), np.nan, np.float32)
    for i, (_, _, top_ids, top_values) in enumerate(rows):
        ids[i, : len(top_ids)], values[i, : len(top_ids)] = top_ids, top_values
    token_logprobs = np.array([row[0] for row in rows], np.float32)
    return logprob_records(token_logprobs, np.array([row[1] for row in rows], np.int32), ids, values)


def packed(rows: Sequence[tuple[float, int, Any, Any]], width: int, mode: str = "raw") -> Column:
    return Column(rows_of(rows, width).tobytes(), stride_of(width), b"", mode)


@dataclass
class Solo:
    """The request run alone: all its tokens, and why it ends."""

    tokens: list[int]
    detail: str
    logprobs: Column | None
    prompt_logprobs: Column | None
    pooled: bytes = b""


def logprob_width(params: SamplingParams) -> int:
    k = params.logprobs or 0
    return (VOCAB if k < 0 else k) + len(params.logprob_token_ids or ())


def solo(
    prompt: Sequence[int],
    params: SamplingParams | PoolingParams,
    seed: int,
    context: int,
    eos: Sequence[int] = EOS,
    weights: Callable[[int], str] = lambda index: "",
    features: Sequence[Feature] = (),
    prompt_weights: str = "",
) -> Solo:
    """An engine in fifteen lines.  `weights`: those that make the output token of that index; `prompt_weights`: those
    that make the prompt's logprobs."""
    prefixes = prefixes_of(prompt, features)
    if isinstance(params, PoolingParams):
        return Solo([], "pooled", None, None, vector(prefixes[-1]).tobytes())
    forbidden = {*params.stop_token_ids, *eos}  # EOS below min_tokens, though it be ignored
    tokens: list[int] = []
    rows = []
    detail = "max_tokens" if params.max_tokens == 0 else ""
    while not detail:
        banned = forbidden if len(tokens) < params.min_tokens else ()
        token = draw(prefixes[-1], seed, len(prompt) + len(tokens), banned, weights=weights(len(tokens)))
        rows.append(logprob_row(prefixes[-1], token, logprob_width(params), params.logprob_token_ids or ()))
        tokens.append(token)
        prefixes.append(chain(prefixes[-1], token))
        if len(tokens) >= params.min_tokens:
            if token in eos and not params.ignore_eos:
                detail = "eos"
            elif token in params.stop_token_ids:
                detail = "stop_token"
            elif any(tokens[-len(s) :] == s for s in params.stop_token_sequences):
                detail = "stop_sequence"
        if not detail and len(tokens) == params.max_tokens:
            detail = "max_tokens"
        if not detail and len(prompt) + len(tokens) == context:
            detail = "context"
    requested = params.logprobs is not None or params.logprob_token_ids
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        width = VOCAB if params.prompt_logprobs < 0 else params.prompt_logprobs
        start = max(1, params.prompt_logprobs_start)
        scored = [logprob_row(prefixes[j], prompt[j], width, weights=prompt_weights) for j in range(start, len(prompt))]
        prompt_logprobs = packed(scored, width)
    return Solo(tokens, detail, packed(rows, logprob_width(params)) if requested else None, prompt_logprobs)
