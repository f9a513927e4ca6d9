"""Checks a `GenerateRequest` and makes its `EngineRequest`s, or raises a `RequestError` that names the field.

Checks that need the model (vocabulary, lengths, limits, a tokenizer) are made here, for all routes and the offline API;
ranges that need no model are checked by `validate` of the structs in `params`.  Prompts are checked in bulk.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from tokserve.base.errors import RequestError, mistyped
from tokserve.base.rooms import request_part, require_room
from tokserve.client.form_defaults import FormDefaults
from tokserve.client.request_state import ChoiceState, DeliveryRules, RequestState
from tokserve.config import Config, LimitsConfig
from tokserve.protocol.candidates import FIELD, Int32, candidate_rows
from tokserve.protocol.messages import EngineRequest, Ready
from tokserve.protocol.params import PoolingParams, RequestOptions, SamplingParams, check_ranges, wrap_seed
from tokserve.protocol.prompt import TokenPrompt, pack_ids, without_content
from tokserve.text.detokenizer import Detokenizer
from tokserve.text.stops import StopStrings
from tokserve.text.tokenizer import Tokenizer

PREFIXES = ("generate-tokens-", "chatcmpl-", "cmpl-", "resp_", "msg_")  # of the `id` of replies
REPETITIONS = 4096  # entries that a list of token ids may have even if the vocabulary is smaller
MAX_ID = 1024
MAX_EXTRA = 1 << 16  # bytes of extra_args: each choice carries them
S = TypeVar("S", bound=msgspec.Struct)
POOLS = "this server computes vectors (--runner pooling) and generates no tokens"
NO_TOKENIZER = "this server has no tokenizer (--tokens-only)"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the front end has it, unchecked: one prompt and what to return for it.

    `request_id`: as the client gave it.  Several prompts may be one request; `first_choice` is then the number of
    choices of the prompts before it.  `text`: outputs carry text.  `score_each`: every choice returns the prompt's
    logprobs, not only the first.
    """

    request_id: str
    prompt: TokenPrompt
    task: SamplingParams | PoolingParams
    options: RequestOptions = RequestOptions()
    text: bool = False
    first_choice: int = 0
    score_each: bool = False


class Inputs:
    """Checks and builds requests for one engine."""

    def __init__(self, config: Config, ready: Ready, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self.ready = ready
        self._tokenizer = tokenizer
        self._has_priority = config.scheduler.scheduling_policy == "priority"
        self._pools = config.model.runner == "pooling"
        self._max_logprobs = config.model.max_logprobs
        self._return_sampling_mask = config.model.return_sampling_mask
        self._num_engines = config.parallel.data_parallel_size
        self._transfer = config.kv.transfer()
        self._limits = config.limits
        self._forms = FormDefaults.of(config.server)

    def prepare(self, request: GenerateRequest) -> RequestState:
        """Check a request; build what is sent, and the state that receives the output.  Raises RequestError."""
        task, params, options, seed = self.validate(request), request.task, request.options, 0
        tasks = [task]
        if isinstance(params, SamplingParams) and isinstance(task, SamplingParams):
            # -1: some clients' null
            seed = secrets.randbits(63) if params.seed is None or params.seed == -1 else params.seed
            if params.n > 1:  # the prompt's logprobs are computed once
                unscored = {"prompt_logprobs": None, "prompt_logprobs_start": 0}
                unscored |= {"prompt_logprob_token_ids": None, "prompt_logprob_start": 0}
                tasks += [msgspec.structs.replace(task, **unscored)] * (params.n - 1)
            if params.stop_strings() and not options.stream:  # the text is searched as it comes
                options = msgspec.structs.replace(options, stream=True)
        drafts = b"" if not options.draft_token_ids else pack_ids(options.draft_token_ids)
        if options.draft_token_ids is not None:
            options = msgspec.structs.replace(options, draft_token_ids=None)
        prefix, now = f"{bare_id(request.request_id)}#", time.monotonic()
        prompts = [request.prompt] + [without_content(request.prompt)] * (len(tasks) - 1)
        engine_requests = [
            EngineRequest(
                f"{prefix}{request.first_choice + index}", prompt, task, options, wrap_seed(seed + index), now, drafts
            )
            for index, (prompt, task) in enumerate(zip(prompts, tasks, strict=True))
        ]
        choices = self._choices(request, [engine_request.request_id for engine_request in engine_requests])
        return RequestState(request.request_id, request.prompt, seed, choices, engine_requests)

    def _choices(self, request: GenerateRequest, request_ids: Sequence[str]) -> list[ChoiceState]:
        params = request.task
        if isinstance(params, PoolingParams):
            return [ChoiceState(0, request_ids[0], DeliveryRules(request.options.stream))]
        stops = StopStrings(params.stop_strings())
        rules = DeliveryRules(request.options.stream, request.text, params.include_stop_str_in_output)
        has_scores = params.prompt_logprobs is not None and len(request.prompt.ids) > 4
        return [
            ChoiceState(
                index,
                request_id,
                rules,
                self._detokenizer(params, request.text, stops),
                awaits_scores=request.score_each and has_scores and index > 0,
            )
            for index, request_id in enumerate(request_ids)
        ]

    def validate(self, request: GenerateRequest) -> SamplingParams | PoolingParams:
        """Check a request; returns its task as the engine gets it.  Raises RequestError for the first fault."""
        params = request.task
        if isinstance(params, PoolingParams):
            self._check_prompt(request.prompt.ids, outputs=0)
            self._check_request(request)
            if params.classify and not self.ready.facts.get("classifies", True):
                raise RequestError("classify: this model has no labels", field="classify", code="unsupported")
            return params
        if self._pools:
            raise RequestError(POOLS, field="model", code="unsupported")
        if params.structured_outputs is not None:
            require_room("grammar", "structured_outputs")
            params = msgspec.structs.replace(params, structured_outputs=self._forms.apply(params.structured_outputs))
        if params.return_sampling_mask:
            require_room("masks", "return_sampling_mask")
        if params.hidden_states is not None:
            require_room("hidden_states", "hidden_states")
        _check_extra(params)
        check_lists(params, self._limits, self.ready.vocab_size)
        length = self._check_prompt(request.prompt.ids, outputs=int(params.max_tokens != 0))
        params.validate()
        self._check_trace(params, length)
        self._check_vocabulary(params)
        self._check_logprobs(params, length)
        self._check_text(params, request.text)
        self._check_request(request)
        bad_sequences = self._bad_sequences(params)
        self._check_choice_left(params, bad_sequences)
        has_mask = params.return_sampling_mask
        if has_mask is None:
            has_mask = self._return_sampling_mask
        return params.for_engine(seed=None, bad_token_sequences=bad_sequences, return_sampling_mask=has_mask or None)

    def _detokenizer(self, params: SamplingParams, text: bool, stops: StopStrings) -> Detokenizer | None:
        if not stops and not (text and params.detokenize):
            return None
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # `_check_text`
        return Detokenizer(
            tokenizer,
            stops,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            spaces_between_special=params.spaces_between_special_tokens,
            min_tokens=params.min_tokens,
            stop_after=params.stop_after,
        )

    def _check_prompt(self, packed: bytes, outputs: int) -> int:
        """The prompt's length in tokens.  `outputs`: how many tokens the context must have room for after it."""
        length = len(packed) // 4
        if length == 0:
            _refuse("token_ids", "must not be empty")
        ids = np.frombuffer(packed, dtype="<i4")
        if int(ids.min()) < 0 or int(ids.max()) >= self.ready.vocab_size:
            index = int(np.flatnonzero((ids < 0) | (ids >= self.ready.vocab_size))[0])
            self._refuse_prompt_id(index, int(ids[index]))
        if length + outputs > self.ready.max_model_len:
            raise RequestError(  # clients recognize this error, and shorten the prompt, by the first words or the code
                f"This model's maximum context length is {self.ready.max_model_len} tokens (max_model_len), and the "
                f"prompt has {length}{': no room for at least one output token' if outputs else ''}",
                field="token_ids",
                code="context_length_exceeded",
            )
        if -(-length // self.ready.block_size) > self.ready.num_blocks:
            raise RequestError(
                f"the prompt has {length} tokens and the whole KV cache holds "
                f"{self.ready.num_blocks * self.ready.block_size}",
                field="token_ids",
            )
        return length

    def _refuse_prompt_id(self, index: int, token: int) -> NoReturn:
        tokenizer = self._tokenizer()
        spelled = None if tokenizer is None else tokenizer.spelling(token)
        if spelled is not None:  # perhaps of a text
            raise RequestError(
                f"token_ids: token {index} is {spelled!r} ({token}), which is not in the model's vocabulary: "
                f"its token ids are 0 to {self.ready.vocab_size - 1}",
                field="token_ids",
            )
        _refuse_id("token_ids", f"token_ids[{index}]", token, self.ready.vocab_size)

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for name in (
            "stop_token_ids",
            "allowed_token_ids",
            "bad_token_ids",
            "logprob_token_ids",
            "trace_decode_token_ids",
        ):
            self._check_ids(name, getattr(params, name) or ())
        for name in ("stop_token_sequences", "bad_token_sequences"):
            for i, sequence in enumerate(getattr(params, name)):
                self._check_ids(f"{name}[{i}]", sequence)
        if params.thinking_token_budget not in (None, -1) and params.thinking_markers is None:
            _refuse("thinking_token_budget", "needs thinking_markers, the token ids around reasoning")
        if params.thinking_markers is not None:
            for name in ("opens", "closes"):
                self._check_ids(f"thinking_markers.{name}", getattr(params.thinking_markers, name))
        if params.logit_bias:
            for token in params.logit_bias:
                if not 0 <= token < self.ready.vocab_size:
                    _refuse_id(f"logit_bias.{token}", f"logit_bias.{token}", token, self.ready.vocab_size)

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        size = self.ready.vocab_size
        if not ids or (min(ids) >= 0 and max(ids) < size):
            return
        index = next(i for i, token in enumerate(ids) if not 0 <= token < size)
        _refuse_id(f"{field}[{index}]", f"{field}[{index}]", ids[index], size)

    def _check_choice_left(self, params: SamplingParams, bad_sequences: Sequence[Sequence[int]]) -> None:
        """Check that at least one token id is possible at every position, as far as that can be known in advance."""
        bad = set(params.bad_token_ids)
        bad.update(sequence[0] for sequence in bad_sequences if len(sequence) == 1)
        if params.min_tokens:
            bad.update(params.stop_token_ids)
            bad.update(() if params.ignore_eos else self.ready.eos_token_ids)
        allowed = params.allowed_token_ids
        if allowed is None:
            if len(bad) >= self.ready.vocab_size:
                _refuse("bad_token_ids", "and the other constraints leave no token to sample")
        elif bad.issuperset(allowed):
            _refuse(
                "allowed_token_ids",
                "leaves no token to sample: every id in it is forbidden (min_tokens forbids "
                "those that end the request)",
            )

    def _check_logprobs(self, params: SamplingParams, length: int) -> None:
        vocab = self.ready.vocab_size
        limit = vocab if self._max_logprobs == -1 else min(self._max_logprobs, vocab)
        for name in ("logprobs", "prompt_logprobs"):
            value: int | None = getattr(params, name)
            count = vocab if value == -1 else value or 0
            if count > limit:
                whole = f" (the whole vocabulary: {count})" if value == -1 else ""
                _refuse(name, f"must be at most {limit} (--max-logprobs), got {value}{whole}")
        if params.prompt_logprobs_start and params.prompt_logprobs_start >= length:
            _refuse(
                "prompt_logprobs_start",
                f"must be below the prompt's length {length}, got {params.prompt_logprobs_start}",
            )

        if params.prompt_logprob_token_ids is not None:
            self._check_candidates(candidate_rows(params.prompt_logprob_token_ids), params, length)

    def _check_trace(self, params: SamplingParams, length: int) -> None:
        count, room = len(params.trace_decode_token_ids or ()), self.ready.max_model_len - length
        if count > room:
            _refuse("trace_decode_token_ids", f"must have at most {room} ids, as many as the context has room for")

    def _check_candidates(self, candidates: Int32, params: SamplingParams, length: int) -> None:
        vocab, count = self.ready.vocab_size, max(0, length - 1 - params.prompt_logprob_start)
        if candidates.ndim == 2 and len(candidates) != count:
            what = f"must have {count} rows, one for each prompt token after prompt_logprob_start"
            _refuse(FIELD, f"{what} ({params.prompt_logprob_start}), got {len(candidates)}")
        if candidates.size and candidates.max() >= vocab:
            index = np.argwhere(candidates >= vocab)[0].tolist()
            _refuse_id(FIELD, FIELD + "".join(f"[{i}]" for i in index), int(candidates[tuple(index)]), vocab)

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

    def _check_request(self, request: GenerateRequest) -> None:
        request.options.validate()
        if request.options.spec_decode_metrics is not None:
            require_room("speculation", "spec_decode_metrics")
        if request.options.priority and not self._has_priority:
            _refuse("priority", "is not served with --scheduling-policy fcfs")
        if request.options.kv_transfer_params is not None:
            check_transfer = request_part("kv", "check_transfer", "kv_transfer_params")
            check_transfer(request.options.kv_transfer_params, self._transfer, self.ready.num_blocks)
        rank = request.options.data_parallel_rank
        if rank is not None and rank >= self._num_engines:
            _refuse("data_parallel_rank", f"must be below {self._num_engines} (--data-parallel-size), got {rank}")
        drafts = request.options.draft_token_ids or ()
        if len(drafts) > self.ready.max_model_len:
            _refuse(
                "draft_token_ids",
                f"must have at most {self.ready.max_model_len} ids (max_model_len), got {len(drafts)}",
            )
        self._check_ids("draft_token_ids", drafts)
        if not 0 < len(request.request_id) <= MAX_ID:
            _refuse("request_id", f"must have 1 to {MAX_ID} characters")

    def _bad_sequences(self, params: SamplingParams) -> list[list[int]]:
        """Forbidden sequences: those given as ids, and every word as tokenized at a text's start and after a space."""
        if not params.bad_words:
            return params.bad_token_sequences
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # `_check_text`
        sequences = [tuple(sequence) for sequence in params.bad_token_sequences]
        for i, word in enumerate(params.bad_words):
            for spelling in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
                if ids:
                    self._check_ids(f"bad_words[{i}]", ids)
                    sequences.append(ids)
        return [list(sequence) for sequence in dict.fromkeys(sequences)]


def _check_extra(params: SamplingParams) -> None:
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
    for name, entries, limit, option in (
        ("stop", stops, limits.max_stop_strings, "--max-stop-strings"),
        ("stop_token_sequences", params.stop_token_sequences, limits.max_stop_strings, "--max-stop-strings"),
        ("bad_words", words, limits.max_bad_words, "--max-bad-words"),
        ("bad_token_sequences", params.bad_token_sequences, limits.max_bad_words, "--max-bad-words"),
    ):
        if len(entries) > limit:
            _refuse(name, f"must have at most {limit} entries ({option}), got {len(entries)}")
    for name, texts in (("stop", stops), ("bad_words", words)):
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > limits.max_words_bytes:
            _refuse(name, f"must have at most {limits.max_words_bytes} bytes together (--max-words-bytes), got {size}")
    for name in ("stop_token_sequences", "bad_token_sequences"):
        count = sum(map(len, getattr(params, name)))
        if count > limits.max_words_bytes:
            _refuse(name, f"must have at most {limits.max_words_bytes} ids together (--max-words-bytes), got {count}")
    for name in ("stop_token_ids", "bad_token_ids", "allowed_token_ids", "logit_bias"):
        count, limit = len(getattr(params, name) or ()), max(vocab_size, REPETITIONS)
        if count > limit:
            _refuse(name, f"must have at most {limit} entries, got {count}")


def token_prompt(prompt: Sequence[int] | bytes | TokenPrompt, vocab_size: int) -> TokenPrompt:
    """Token ids, as a sequence or packed (little-endian int32), as a prompt.  Raises RequestError."""
    return prompt if isinstance(prompt, TokenPrompt) else TokenPrompt(_packed(prompt, vocab_size))


def _packed(prompt: Sequence[int] | bytes, vocab_size: int) -> bytes:
    if isinstance(prompt, bytes | bytearray | memoryview):
        packed = bytes(prompt)
        if len(packed) % 4:
            _refuse("token_ids", f"must be int32 values, 4 bytes each, got {len(packed)} bytes")
        return packed
    try:
        return array("i", prompt).tobytes()
    except OverflowError:
        index, token = next((i, t) for i, t in enumerate(prompt) if not -(1 << 31) <= t < 1 << 31)
        _refuse_id("token_ids", f"token_ids[{index}]", token, vocab_size)
    except TypeError:
        raise RequestError("token_ids must be a list of integers", field="token_ids") from None


def bare_id(request_id: str) -> str:
    """A request's id without the prefix that a reply's `id` has."""
    for prefix in PREFIXES:
        if request_id.startswith(prefix) and len(request_id) > len(prefix):
            return request_id[len(prefix) :]
    return request_id


def typed(kind: type[S], value: Any) -> S:
    """`value`, a struct of this kind or its fields, with every field checked for its type and range."""
    values = {name: getattr(value, name) for name in kind.__struct_fields__} if isinstance(value, kind) else value
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        if isinstance(values, dict):
            check_ranges(kind, values)
        raise mistyped(error) from None


def _refuse(field: str, rule: str) -> NoReturn:
    raise RequestError(f"{field} {rule}", field=field)


def _refuse_id(field: str, name: str, token: int, vocab_size: int) -> NoReturn:
    raise RequestError(f"{name} is {token}; this model's token ids are 0 to {vocab_size - 1}", field=field)
