"""Turns what a client asks for into `Add` messages, or a `RequestError` that names the field.

Checks that need the model (vocabulary, lengths, limits, a tokenizer) are made here, for all routes and the
offline API; ranges that need no model are checked by `SamplingParams.validate`.  Prompts of 32k tokens are
checked in bulk.  Sends nothing, and must not know HTTP.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from tokserve import checkpoint
from tokserve.client.outputs import Choice, TextRules
from tokserve.config import Config, LimitsConfig, ModelConfig
from tokserve.errors import RequestError, StartError
from tokserve.messages import Add, Ready
from tokserve.params import SamplingParams
from tokserve.text.detokenizer import Detokenizer
from tokserve.text.stops import StopStrings
from tokserve.text.tokenizer import Tokenizer

PREFIXES = ("generate-tokens-", "chatcmpl-", "cmpl-", "resp_")  # of the `id` of replies
MAX_SALT = 128
REPETITIONS = 4096  # entries that a list of token ids may have even if the vocabulary is smaller
MAX_ID = 1024
MAX_EXTRA = 1 << 16  # bytes of extra_args: each choice carries them
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
COUNTS = ("top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "prompt_logprobs_start")
INT32, INT64 = 1 << 31, 1 << 63
NO_TOKENIZER = "this server has no tokenizer (--tokens-only)"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a request is for, as in vLLM.  `lora_int_id` is ignored: adapters are identified by name.

    `load_inplace`: load it again even if it is loaded.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    load_inplace: bool = False


def adapter_name(lora_request: LoRARequest | str | None) -> str:
    """The name, "" for none."""
    return lora_request.lora_name if isinstance(lora_request, LoRARequest) else lora_request or ""


@dataclass(frozen=True, slots=True)
class Order:
    """A request as given, unchecked: one prompt, n choices, and how to serve it.

    Several prompts may be one request; `first_choice` is then the number of choices of the prompts before it.
    `adapter`: the name of a loaded one, "" for none.  `score_each`: every choice returns the prompt's logprobs, not
    only the first.
    """

    prompt: Sequence[int] | bytes
    params: SamplingParams
    request_id: str | None = None
    stream: bool = True
    text: bool = False
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int | None = None
    queue_timeout_ms: int | None = None
    first_choice: int = 0
    adapter: str = ""
    score_each: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: what is sent, and the choices that receive the outputs.  `key`: the id without a prefix."""

    request_id: str
    key: str
    seed: int
    prompt: bytes
    adds: list[Add]
    choices: list[Choice]


class Inputs:
    """Checks and builds requests for one engine."""

    def __init__(self, config: Config, ready: Ready, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self._ready = ready
        self._tokenizer = tokenizer
        self._has_priority = config.scheduler.scheduling_policy == "priority"
        self._max_logprobs = config.model.max_logprobs
        self._limits = config.limits

    def prepare(self, order: Order) -> Prepared:
        """Check a request and build its messages.  Raises RequestError for the first thing wrong with it."""
        params = order.params
        _check_sizes(order)
        check_lists(params, self._limits, self._ready.vocab_size)
        prompt, length = self._check_prompt(order.prompt)
        params.validate()
        self._check_vocabulary(params)
        self._check_logprobs(params, length)
        self._check_text(params, order.text)
        self._check_terms(order)
        request_id = secrets.token_hex(16) if order.request_id is None else order.request_id
        key = bare_id(request_id)
        seed = secrets.randbits(63) if params.seed in (None, -1) else params.seed  # -1: null, to some clients
        bad = self._bad_sequences(params)
        self._check_choice_left(params, bad)
        sampling = params.for_engine(seed=None, bad_token_sequences=bad)
        unscored = msgspec.structs.replace(sampling, prompt_logprobs=None, prompt_logprobs_start=0)  # computed once
        stops = params.stop_strings()
        adds = [
            Add(
                f"{key}#{order.first_choice + i}", prompt, unscored if i else sampling, _wrap(seed + i),
                not order.stream and not stops, order.priority, order.cache_salt, time.monotonic(), order.deadline_ms,
                order.queue_timeout_ms, order.adapter,
            )
            for i in range(params.n)
        ]  # fmt: skip
        shares = order.score_each and params.prompt_logprobs is not None and length > 1
        rules, searched = TextRules(order.text, params.include_stop_str_in_output), StopStrings(stops)
        choices = [
            Choice(
                i,
                add.rid,
                not order.stream,
                self._detokenizer(params, order.text, searched),
                rules,
                awaits_scores=shares and i > 0,
            )
            for i, add in enumerate(adds)
        ]
        return Prepared(request_id, key, seed, prompt, adds, choices)

    def _detokenizer(self, params: SamplingParams, text: bool, stops: StopStrings) -> Detokenizer | None:
        if not stops and not (text and params.detokenize):
            return None
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # `_check_text`
        return Detokenizer(
            tokenizer, stops, include_stop=params.include_stop_str_in_output, skip_special=params.skip_special_tokens,
            spaces_between_special=params.spaces_between_special_tokens, min_tokens=params.min_tokens,
        )  # fmt: skip

    def _check_prompt(self, prompt: Sequence[int] | bytes) -> tuple[bytes, int]:
        """The prompt as packed int32, and its length in tokens."""
        packed = pack_prompt(prompt, self._ready.vocab_size)
        length = len(packed) // 4
        if length == 0:
            _refuse("token_ids", "must not be empty")
        ids = np.frombuffer(packed, dtype="<i4")
        if int(ids.min()) < 0 or int(ids.max()) >= self._ready.vocab_size:
            place = int(np.flatnonzero((ids < 0) | (ids >= self._ready.vocab_size))[0])
            _refuse_id("token_ids", f"token_ids[{place}]", int(ids[place]), self._ready.vocab_size)
        if length + 1 > self._ready.max_model_len:
            raise RequestError(  # clients recognise this error, and shorten the prompt, by the first words or the code
                f"This model's maximum context length is {self._ready.max_model_len} tokens (max_model_len), and the "
                f"prompt has {length}: no room for at least one output token",
                field="token_ids", code="context_length_exceeded",
            )  # fmt: skip
        if -(-length // self._ready.block_size) > self._ready.num_blocks:
            raise RequestError(
                f"the prompt has {length} tokens and the whole KV cache holds "
                f"{self._ready.num_blocks * self._ready.block_size}",
                field="token_ids",
            )
        return packed, length

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logprob_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        for name in ("stop_token_sequences", "bad_token_sequences"):
            for i, sequence in enumerate(getattr(params, name)):
                self._check_ids(f"{name}[{i}]", sequence)
        if params.logit_bias:
            for token in params.logit_bias:
                if not 0 <= token < self._ready.vocab_size:
                    _refuse_id(f"logit_bias.{token}", f"logit_bias.{token}", token, self._ready.vocab_size)

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        size = self._ready.vocab_size
        if not ids or (min(ids) >= 0 and max(ids) < size):
            return
        place = next(i for i, token in enumerate(ids) if not 0 <= token < size)
        _refuse_id(f"{field}[{place}]", f"{field}[{place}]", ids[place], size)

    def _check_choice_left(self, params: SamplingParams, bad_sequences: Sequence[Sequence[int]]) -> None:
        """At least one token id must be possible at every position, as far as that can be known in advance."""
        bad = set(params.bad_token_ids)
        bad.update(sequence[0] for sequence in bad_sequences if len(sequence) == 1)
        if params.min_tokens:
            bad.update(params.stop_token_ids)
            bad.update(() if params.ignore_eos else self._ready.eos_token_ids)
        allowed = params.allowed_token_ids
        if allowed is None:
            if len(bad) >= self._ready.vocab_size:
                _refuse("bad_token_ids", "and the other constraints leave no token to sample")
        elif bad.issuperset(allowed):
            _refuse("allowed_token_ids", "leaves no token to sample: every id in it is forbidden (min_tokens forbids "
                    "those that end the request)")  # fmt: skip

    def _check_logprobs(self, params: SamplingParams, length: int) -> None:
        vocab = self._ready.vocab_size
        limit = vocab if self._max_logprobs == -1 else min(self._max_logprobs, vocab)
        for name in ("logprobs", "prompt_logprobs"):
            asked: int | None = getattr(params, name)
            wanted = vocab if asked == -1 else asked or 0
            if wanted > limit:
                whole = f" (the whole vocabulary: {wanted})" if asked == -1 else ""
                _refuse(name, f"must be at most {limit} (--max-logprobs), got {asked}{whole}")
        if params.prompt_logprobs_start and params.prompt_logprobs_start >= length:
            _refuse(
                "prompt_logprobs_start",
                f"must be below the prompt's length {length}, got {params.prompt_logprobs_start}",
            )

    def _check_text(self, params: SamplingParams, text: bool) -> None:
        stops = params.stop_strings()
        if stops and not params.detokenize:
            _refuse("stop", "strings are matched in the text, which detokenize=false turns off")
        grammar = params.structured_outputs is not None
        if not (text or stops or params.bad_words or grammar) or self._tokenizer() is not None:
            return
        if grammar:
            _refuse("structured_outputs", f"need text, and {NO_TOKENIZER}")
        if stops:
            _refuse("stop", f"strings need text, and {NO_TOKENIZER}; use stop_token_ids or stop_token_sequences")
        if params.bad_words:
            _refuse("bad_words", f"need text, and {NO_TOKENIZER}; use bad_token_sequences")
        raise RequestError(f"text output is not possible: {NO_TOKENIZER}", field="output_mode")

    def _check_terms(self, order: Order) -> None:
        if order.priority and not self._has_priority:
            _refuse("priority", "is not served with --scheduling-policy fcfs")
        if len(order.cache_salt) > MAX_SALT:
            _refuse("cache_salt", f"must have 1 to {MAX_SALT} characters, got {len(order.cache_salt)}")
        for name, value in (("deadline_ms", order.deadline_ms), ("queue_timeout_ms", order.queue_timeout_ms)):
            if value is not None and value < 1:
                _refuse(name, f"must be at least 1, got {value}")
        if order.request_id is not None and not 0 < len(order.request_id) <= MAX_ID:
            _refuse("request_id", f"must have 1 to {MAX_ID} characters")

    def _bad_sequences(self, params: SamplingParams) -> list[list[int]]:
        """Forbidden sequences: those given as ids, and every word as tokenized at a text's start and after a space."""
        if not params.bad_words:
            return params.bad_token_sequences
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # `_check_text`
        found = [tuple(sequence) for sequence in params.bad_token_sequences]
        for i, word in enumerate(params.bad_words):
            for spelling in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
                if ids:
                    self._check_ids(f"bad_words[{i}]", ids)
                    found.append(ids)
        return [list(sequence) for sequence in dict.fromkeys(found)]


def _check_sizes(order: Order) -> None:
    """Refuse numbers that a message to the engine, or the engine's clock, cannot hold."""
    params = order.params
    numbers = [(name, getattr(params, name), INT32) for name in COUNTS]
    numbers += [("deadline_ms", order.deadline_ms, INT32), ("queue_timeout_ms", order.queue_timeout_ms, INT32)]
    for name, value, end in (*numbers, ("priority", order.priority, INT64)):
        if value is not None and not -end <= value < end:
            _refuse(name, f"must fit in {end.bit_length()} bits")
    if params.extra_args is not None:
        try:
            size = len(msgspec.msgpack.encode(params.extra_args))
        except (OverflowError, TypeError):
            _refuse("extra_args", "holds a number that does not fit in 64 bits, or a value that JSON cannot represent")
        if size > MAX_EXTRA:
            _refuse("extra_args", f"must have at most {MAX_EXTRA} bytes, got {size}")


def check_lists(params: SamplingParams, limits: LimitsConfig, vocab_size: int) -> None:
    """Refuse lists that are longer than any use of them, before anything is done with their entries."""
    stops, words = params.stop_strings(), params.bad_words
    for name, entries, most, option in (
        ("stop", stops, limits.max_stop_strings, "--max-stop-strings"),
        ("stop_token_sequences", params.stop_token_sequences, limits.max_stop_strings, "--max-stop-strings"),
        ("bad_words", words, limits.max_bad_words, "--max-bad-words"),
        ("bad_token_sequences", params.bad_token_sequences, limits.max_bad_words, "--max-bad-words"),
    ):
        if len(entries) > most:
            _refuse(name, f"must have at most {most} entries ({option}), got {len(entries)}")
    for name, texts in (("stop", stops), ("bad_words", words)):
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > limits.max_words_bytes:
            _refuse(name, f"must have at most {limits.max_words_bytes} bytes together (--max-words-bytes), got {size}")
    for name in ("stop_token_sequences", "bad_token_sequences"):
        count = sum(map(len, getattr(params, name)))
        if count > limits.max_words_bytes:
            _refuse(name, f"must have at most {limits.max_words_bytes} ids together (--max-words-bytes), got {count}")
    for name in ("stop_token_ids", "bad_token_ids", "allowed_token_ids", "logit_bias"):
        count, most = len(getattr(params, name) or ()), max(vocab_size, REPETITIONS)
        if count > most:
            _refuse(name, f"must have at most {most} entries, got {count}")


def pack_prompt(prompt: Sequence[int] | bytes, vocab_size: int) -> bytes:
    """Token ids as little-endian int32 bytes; packed ids are returned as they are."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        packed = bytes(prompt)
        if len(packed) % 4:
            _refuse("token_ids", f"must be int32 values, 4 bytes each, got {len(packed)} bytes")
        return packed
    try:
        return array("i", prompt).tobytes()
    except OverflowError:
        place, token = next((i, t) for i, t in enumerate(prompt) if not -(1 << 31) <= t < 1 << 31)
        _refuse_id("token_ids", f"token_ids[{place}]", token, vocab_size)
    except TypeError:
        raise RequestError("token_ids must be a list of integers", field="token_ids") from None


def bare_id(request_id: str) -> str:
    """A request's id without the prefix that a reply's `id` has."""
    for prefix in PREFIXES:
        if request_id.startswith(prefix) and len(request_id) > len(prefix):
            return request_id[len(prefix) :]
    return request_id


def generation_defaults(model: ModelConfig) -> SamplingParams:
    """The sampling parameters that the checkpoint's generation_config.json recommends.  Raises StartError."""
    if model.generation_config == "none":
        return SamplingParams()
    directory = Path(model.model if model.generation_config == "auto" else model.generation_config)
    if not directory.is_dir():
        raise StartError(f"option generation_config: {str(directory)!r} is not a directory")
    found = checkpoint.read_json(directory, "generation_config.json") or {}
    values = {name: found[name] for name in RECOMMENDED if found.get(name) is not None}
    try:
        params = msgspec.convert(values, SamplingParams)
        params.validate()
    except (msgspec.ValidationError, RequestError) as error:
        raise StartError(f"generation_config.json of the model has a bad value: {error}") from None
    return params


def typed(params: Any) -> SamplingParams:
    """`params` with every field checked for its type, as the HTTP edge has done already."""
    values = msgspec.structs.asdict(params) if isinstance(params, SamplingParams) else params
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`").replace("[...]", "") or None
        raise RequestError(f"{field}: {what}" if field else what, field=field) from None


def _wrap(seed: int) -> int:
    """A 64-bit signed integer, wrapped around."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _refuse(field: str, rule: str) -> NoReturn:
    raise RequestError(f"{field} {rule}", field=field)


def _refuse_id(field: str, name: str, token: int, vocab_size: int) -> NoReturn:
    raise RequestError(f"{name} is {token}; this model's token ids are 0 to {vocab_size - 1}", field=field)
