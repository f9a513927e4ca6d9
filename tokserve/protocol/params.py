"""The parameters and options of a request: names, types, defaults and ranges, declared once.

`SamplingParams` and `RequestOptions` are the same structs from HTTP to the engine; the bodies of HTTP routes and the
OpenAPI document take fields and ranges from these annotations.  Checks that need a model are made in `client/inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tokserve.base.errors import RequestError
from tokserve.protocol import jsonschema
from tokserve.protocol.candidates import Candidates, candidate_rows, pack_array
from tokserve.protocol.ebnf import EbnfError, as_lark, is_ebnf
from tokserve.protocol.kv_transfer import KVTransferParams
from tokserve.protocol.reduced_schema import SchemaError, reduced, text_of
from tokserve.protocol.regex import explicit_classes

DraftReport = Literal["none", "summary", "detailed"]  # vLLM's levels of metrics.speculative_decoding
RoutedFormat = Literal["npy", "object", "compact"]
LogprobsMode = Literal["raw", "temperature", "processed", "raw_logprobs", "processed_logprobs"]
LOGPROBS_MODES: tuple[LogprobsMode, ...] = ("raw", "temperature", "processed")
VLLM_LOGPROBS_MODES: dict[str, LogprobsMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
WHOLE_VOCABULARY, MASK_TOO_LONG = -1, -2  # counts of a sampling mask without ids: nothing is cut, too many ids
MAX_CHOICES = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 256  # of a repetition: every size costs a comparison per token
MIN_REPETITION_PENALTY = 1e-30  # a logit divided by less overflows float32
MAX_WHITESPACE = 256  # bytes
WHITE = r"[\x20\x0A\x0D\x09]{1,20}"  # between the parts of JSON; without an end, a weak model finds none either
# largest size of each form of structured outputs, in bytes: what compiles within about a second, even in the worst
# case; a grammar may have one of the other forms in it
GRAMMAR_BYTES = {"json": 1 << 16, "regex": 1 << 14, "choice": 1 << 16, "grammar": (1 << 16) + 4096, "json_object": 1}
INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumLogprobs = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: the whole vocabulary


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """End an output that repeats itself: it ends in a pattern of `min_pattern_size` (0: 1) to `max_pattern_size` ids,
    `min_count` times in a row.  `max_pattern_size` 0 is off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def validate(self) -> None:
        """Raise `RequestError` with the field's name for a value out of its range."""
        at = "repetition_detection."
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            _at_least(at + name, getattr(self, name), 0)
        if self.max_pattern_size > MAX_PATTERN_SIZE:
            _refuse(f"{at}max_pattern_size", f"must be at most {MAX_PATTERN_SIZE}, got {self.max_pattern_size}")
        if self.min_pattern_size > self.max_pattern_size:
            _refuse(f"{at}min_pattern_size", f"must not be above max_pattern_size, got {self.min_pattern_size}")
        if self.min_count >= 1 << 31:
            _refuse(f"{at}min_count", "must fit in 32 bits")
        if self.max_pattern_size:
            _at_least(f"{at}min_count", self.min_count, 2)


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form that the text of an output must have: exactly one of the first five fields is given.

    `json`: JSON that matches a schema (an object, or its JSON text).  `regex`: a full match.  `choice`: one of these.
    `grammar`: a sentence of a Lark grammar in llguidance's dialect, or of one in EBNF (`::=`).  `json_object`: any JSON
    object.  The next two restrict the white space in JSON: none between tokens, or what a regex matches.
    `disable_additional_properties`: objects have no properties that the schema does not name, unless it says that they
    may.  `unicode_classes`: \\d, \\w and \\s in the regex or in the schema's patterns are of all scripts, not ASCII's.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    unicode_classes: bool | None = None

    @property
    def kind(self) -> str:
        """The name of the field that is given; call `validate` first."""
        return next(name for name in GRAMMAR_BYTES if getattr(self, name) not in (None, False))

    def validate(self) -> None:
        """Raise `RequestError` with the field's name unless one thing is asked for, and it is not too large."""
        at = "structured_outputs"
        forms = [name for name in GRAMMAR_BYTES if getattr(self, name) not in (None, False)]
        if len(forms) != 1:
            _refuse(at, f"must have exactly one of {', '.join(GRAMMAR_BYTES)}; got {' and '.join(forms) or 'none'}")
        if self.json is None and self.json_object is not True:
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if getattr(self, name):
                    _refuse(f"{at}.{name}", "applies to json and json_object only")
        if self.disable_additional_properties and self.json is None:
            _refuse(f"{at}.disable_additional_properties", "applies to json only")
        if self.unicode_classes and self.json is None and self.regex is None:
            _refuse(f"{at}.unicode_classes", "applies to json and regex only")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            _refuse(f"{at}.whitespace_pattern", "and disable_any_whitespace are mutually exclusive")
        if self.choice is not None and not self.choice:
            _refuse(f"{at}.choice", "must not be empty")
        for name, most in (*GRAMMAR_BYTES.items(), ("whitespace_pattern", MAX_WHITESPACE)):
            try:
                value = getattr(self, name)
                size = _size(value if name != "json" or value is None else self._schema(suited=False))
            except UnicodeEncodeError:
                _refuse(f"{at}.{name}", "must be valid Unicode")
            if name == "grammar" and value is not None and size <= most and is_ebnf(value):
                self._lark(value)
            if size > most:
                what = " without its annotations" if name == "json" else ""
                _refuse(f"{at}.{name}", f"must have at most {most} bytes{what}, got {size}")

    def plain(self) -> StructuredOutputs:
        """A copy as it is compiled, which every encoding can represent: the schema as text, its objects closed, and
        classes of characters spelled out."""
        unicode = bool(self.unicode_classes)
        changes: dict[str, Any] = {}
        for name in ("regex", "whitespace_pattern"):
            pattern = getattr(self, name)
            if pattern is not None and not unicode:  # as they are, they are all scripts'
                changes[name] = explicit_classes(pattern, unicode=False)
        if self.grammar is not None and is_ebnf(self.grammar):
            changes["grammar"] = self._lark(self.grammar)
        if self.json is not None:
            changes["json"] = self._schema()
        return msgspec.structs.replace(self, disable_additional_properties=None, unicode_classes=None, **changes)

    def _lark(self, grammar: str) -> str:
        try:
            return as_lark(grammar)
        except EbnfError as error:
            _refuse("structured_outputs.grammar", str(error))

    def _schema(self, *, suited: bool = True) -> str:
        """The schema as text, as it is compiled, or if not `suited`, as it was meant."""
        try:
            schema = reduced("" if self.json is None else self.json, suited=suited)
            jsonschema.spell_classes(schema, unicode=bool(self.unicode_classes))
            if self.disable_additional_properties:
                jsonschema.close(schema)
            return text_of(schema)
        except SchemaError as error:
            _refuse("structured_outputs.json", str(error))


# sampling parameters of other servers that the token route accepts: they change no token, ...
PARAMS_WITHOUT_EFFECT = (
    "output_kind",
    "flat_logprobs",
    "skip_clone",
    "skip_reading_prefix_cache",
    "stream_interval",
    "watermarking",
    "output_text_buffer_length",
    "_all_stop_token_ids",
    "_bad_words_token_ids",
    "_eos_token_id",
    "_watermarking_skipped",
)
# ... or would, but for null and these values
PARAMS_REFUSED: dict[str, tuple[Any, ...]] = {
    "logits_processors": ([],),
    "truncate_prompt_tokens": (-1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
}


MAX_MARKER = 64  # ids


class ThinkingMarkers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The token ids around a model's reasoning.

    `opens`: before it; empty: only the start of the output may be inside of it.  `closes`: after it.  `inside`: whether
    the output begins inside of it; None: if the last marker of the prompt opens one.
    """

    opens: list[int] = []
    closes: list[int]
    inside: bool | None = None


class HiddenStateChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which hidden states are returned, both ascending.

    `layers`: after so many layers, 0 are the embeddings, and all layers what the head reads.  `positions`: of prompt
    and output, from the first token of the prompt on; those that are not computed are left out.
    """

    layers: Annotated[list[Count], Meta(min_length=1)]
    positions: Annotated[list[Count], Meta(min_length=1)]

    def validate(self) -> None:
        """Raise RequestError for numbers that do not ascend."""
        for name in ("layers", "positions"):
            values = getattr(self, name)
            if any(after <= before for before, after in pairwise(values)):
                _refuse(f"hidden_states.{name}", "must be ascending, without repetitions")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to draw tokens and when to stop; vLLM's names and meanings.

    `temperature` 0 is greedy.  `top_k` 0 or -1 is off.  `max_tokens` None is the rest of the context; 0, with
    `prompt_logprobs`, scores the prompt, which may then fill the context.
    `logprobs` k returns the sampled token's logprob and the k most probable (-1: the whole
    vocabulary); `prompt_logprobs` the same for prompt tokens from `prompt_logprobs_start` on;
    `prompt_logprob_token_ids` the logprobs of given ids, the same or others for each, at the positions that predict the
    prompt's tokens after `prompt_logprob_start`, of all other ids together, and of the tokens;
    `logprob_token_ids` the logprobs of given ids at every generated position.  `routed_experts_prompt_start`: so
    many of the first tokens of the prompt are left out of the routed experts; `routed_experts_format`: how replies
    have these (`families.mixtures.reply`).  `return_sampling_mask` returns the
    ids that each token was drawn from; None is the server's default.  `return_entropy` returns the entropy of the
    model's distribution at the temperature for each token.  `hidden_states` returns those of chosen positions and
    layers.  `prompt_logprobs_mode`: of the prompt's
    logprobs; None: `logprobs_mode`.  `trace_decode_token_ids`: the output, which is decoded as if it had been sampled.
    `stop_after`: two texts, the markers of reasoning; in an output that begins with the first, `stop` counts after the
    second.  `thinking_token_budget`: so many tokens of reasoning, after which the marker that ends it is all that may
    come; -1 or None: no limit.  `thinking_markers`: of the reasoning.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Int64 | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY)] = 1.0
    max_tokens: Count | None = None
    min_tokens: Count = 0
    stop_token_ids: list[int] = []
    stop_token_sequences: list[list[int]] = []
    repetition_detection: RepetitionDetection | None = None
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    bad_token_ids: list[int] = []
    bad_token_sequences: list[list[int]] = []
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    thinking_markers: ThinkingMarkers | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    prompt_logprobs_start: Count = 0
    prompt_logprob_token_ids: Candidates | None = None
    prompt_logprob_start: Count = 0
    routed_experts_prompt_start: Count = 0
    routed_experts_format: RoutedFormat | None = None
    logprob_token_ids: Annotated[list[int], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs_mode: LogprobsMode | None = None
    return_sampling_mask: bool | None = None
    return_entropy: bool = False
    hidden_states: HiddenStateChoice | None = None
    trace_decode_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    extra_args: dict[str, Any] | None = None

    # for the front end
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stop: str | list[str] = []
    stop_after: list[str] = []
    bad_words: list[str] = []
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt's tokens are asked for, in either form."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def computed_mode(self, default: LogprobsMode) -> LogprobsMode:
        """The kind of logprobs under this server's name for it; `default`: that of requests that do not say."""
        mode = self.logprobs_mode or default
        return VLLM_LOGPROBS_MODES.get(mode, mode)

    def for_engine(self, **changes: Any) -> SamplingParams:
        """A copy without the front end's fields, with `changes` applied."""
        if self.thinking_token_budget == -1:
            changes["thinking_token_budget"] = None
        if self.trace_decode_token_ids is not None:
            length = len(self.trace_decode_token_ids)
            most = length if self.max_tokens is None else min(length, self.max_tokens)
            changes |= {"max_tokens": most, "min_tokens": 0, "ignore_eos": True}
            changes |= {"stop_token_ids": [], "stop_token_sequences": []}
        if self.structured_outputs is not None:
            changes["structured_outputs"] = self.structured_outputs.plain()
        if self.prompt_logprob_token_ids is not None:
            rows = candidate_rows(self.prompt_logprob_token_ids)
            changes |= {"prompt_logprobs": 0, "prompt_logprobs_start": self.prompt_logprob_start + 1}
            changes["prompt_logprob_token_ids"] = pack_array(rows)
        for name in ("logprobs_mode", "prompt_logprobs_mode"):
            if (mode := getattr(self, name)) is not None:
                changes[name] = VLLM_LOGPROBS_MODES.get(mode, mode)
        return msgspec.structs.replace(
            self,
            n=1,
            stop=[],
            stop_after=[],
            bad_words=[],
            include_stop_str_in_output=False,
            detokenize=True,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            **changes,
        )

    def validate(self) -> None:
        """Raise `RequestError` with the field's name for a value out of its range."""
        check_ranges(type(self), msgspec.structs.asdict(self))
        if self.max_tokens == 0 and not self.scores_prompt and self.hidden_states is None:
            _refuse("max_tokens", "must be at least 1 (0 scores a prompt, with prompt_logprobs)")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"must not be above max_tokens ({self.max_tokens}), got {self.min_tokens}")
        self._validate_candidates()
        self._validate_trace()
        if self.repetition_detection is not None:
            self.repetition_detection.validate()
        if self.hidden_states is not None:
            self.hidden_states.validate()
        if self.structured_outputs is not None:
            self.structured_outputs.validate()
        self._validate_ids()
        self._validate_text()

    def _validate_candidates(self) -> None:
        if self.prompt_logprob_token_ids is None:
            return
        for name, neutral in (("prompt_logprobs", None), ("prompt_logprobs_start", 0)):
            if getattr(self, name) != neutral:
                _refuse(name, "is not taken with prompt_logprob_token_ids, whose reply has the tokens' logprobs")
        candidate_rows(self.prompt_logprob_token_ids)

    def _validate_trace(self) -> None:
        if self.trace_decode_token_ids is None:
            return
        budget = self.thinking_token_budget
        for name, is_set in (
            ("n", self.n > 1),
            ("stop", bool(self.stop_strings())),
            ("structured_outputs", self.structured_outputs is not None),
            ("repetition_detection", self.repetition_detection is not None),
            ("thinking_token_budget", budget is not None and budget >= 0),
            ("bad_words", bool(self.bad_words)),
        ):
            if is_set:
                _refuse(name, "is not taken with trace_decode_token_ids, which are the output")

    def _validate_ids(self) -> None:
        for name in ("stop_token_sequences", "bad_token_sequences"):
            if any(not sequence for sequence in getattr(self, name)):
                _refuse(name, "must not contain an empty sequence")
        if self.thinking_markers is not None:
            if not self.thinking_markers.closes:
                _refuse("thinking_markers.closes", "must not be empty")
            for name in ("opens", "closes"):
                if (count := len(getattr(self.thinking_markers, name))) > MAX_MARKER:
                    _refuse(f"thinking_markers.{name}", f"must have at most {MAX_MARKER} ids, got {count}")
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias):
                _refuse("logit_bias", f"must be finite, got {bias} for token {token}")

    def _validate_text(self) -> None:
        if any(not text for text in self.stop_strings()):
            _refuse("stop", "must not contain an empty string")
        if self.stop_after and (len(self.stop_after) != 2 or not self.stop_after[1]):
            _refuse("stop_after", "must have two texts, the second not empty")
        if any(not text for text in self.bad_words):
            _refuse("bad_words", "must not contain an empty string")


def wrap_seed(seed: int) -> int:
    """A 64-bit signed integer, wrapped around."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


class PoolingParams(NamedTuple):  # not a Struct: a union of these would have to be tagged
    """What a request returns that generates no tokens: one vector, or with `pooling` "all" one for each token.

    `pooling`: the hidden state of the last token, of the first, or the mean of all.  `normalize`: to length 1.
    `classify`: the logits of the classifier's labels for that state, instead of it.
    """

    pooling: Literal["last", "first", "mean", "all"] = "last"
    normalize: bool = True
    classify: bool = False


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request says besides its prompt and its task; the one declaration, from HTTP bodies to the engine.

    `stream`: outputs as they come, else one at the end.  `priority`: lower runs earlier under the priority policy.
    `cache_salt`: shares cached blocks only with requests of the same salt.  `group_id`: aborted together.  `adapter`:
    the name of a loaded LoRA adapter, "" for none.  `deadline_ms`: ends the request so long after its arrival with what
    it has; `queue_timeout_ms`: likewise while it has no slot.  `speculate`: drafts may be made for it.
    `draft_token_ids`: what the output may be, from its first token on; it is verified, and changes how fast tokens
    come, never which.  `draft_group`: earlier outputs of requests with the same name are drafts as well; default:
    those of the same client with the same prompt.  `spec_decode_metrics`: what the reply says about its drafts; None is
    the server's default.  `data_parallel_rank`: the engine that serves it, of several; default: chosen by prefix and
    load.  `kv_transfer_params`: what another server does with the request's KV, or has.  `session`: what the engine
    knows the session by that the request is a turn of, "" for none; no body has it.
    """

    stream: bool = False
    priority: Int64 = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    group_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    adapter: str = ""
    speculate: bool = True
    draft_token_ids: list[int] | None = None
    draft_group: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    spec_decode_metrics: DraftReport | None = None
    deadline_ms: PositiveCount | None = None
    queue_timeout_ms: PositiveCount | None = None
    data_parallel_rank: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    kv_transfer_params: KVTransferParams | None = None
    session: str = ""

    @property
    def reports_drafts(self) -> bool:
        """Whether the reply says something about its drafts."""
        return self.spec_decode_metrics not in (None, "none")

    def validate(self) -> None:
        check_ranges(type(self), msgspec.structs.asdict(self))


class Field(NamedTuple):
    """A declared field.  `type`: without the range and None.  `range`: None if every value of the type is valid."""

    name: str
    type: Any
    default: Any
    range: Meta | None


@cache
def declared(kind: type[msgspec.Struct]) -> tuple[Field, ...]:
    hints = get_type_hints(kind, include_extras=True)
    fields = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if get_origin(hint) in (Union, UnionType):
            members = [member for member in get_args(hint) if member is not type(None)]
            hint = Union[tuple(members)] if len(members) > 1 else members[0]  # noqa: UP007
        meta = None
        if get_origin(hint) is Annotated:
            hint, meta = get_args(hint)[:2]
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        fields.append(Field(field.name, hint, default, meta))
    return tuple(fields)


def check_ranges(kind: type[msgspec.Struct], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise `RequestError` for the first of the `values`, by field of `kind`, that is out of its declared range.  None,
    and what is not of the field's type, is left to the caller.  `prefix`: the path of the values in a body."""
    for name, form, _, meta in declared(kind):
        value = values.get(name)
        if meta is None or value is None:
            continue
        field = prefix + name
        if form is float and isinstance(value, int | float):
            _check_number(field, value, meta)
        elif form is int and type(value) is int:
            _check_integer(field, value, meta)
        elif isinstance(value, str | list):
            _check_length(field, len(value), meta, "characters" if isinstance(value, str) else "ids")


def _refuse(field: str, rule: str) -> NoReturn:
    raise RequestError(f"{field} {rule}", field=field)


def _size(value: Any) -> int:
    """Bytes of a text, or of several."""
    texts = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    return sum(len(text.encode()) for text in texts)


def _check_number(field: str, value: float, meta: Meta) -> None:
    is_open = meta.gt is not None
    low, high = meta.gt if is_open else meta.ge, math.inf if meta.le is None else meta.le
    assert low is not None  # of every declared number
    if math.isfinite(value) and (low < value if is_open else low <= value) and value <= high:
        return
    if high == math.inf:
        rule = f"must be a finite number {'above' if is_open else 'of at least'} {low:g}"
    else:
        rule = f"must be {'above' if is_open else 'from'} {low:g} {'and at most' if is_open else 'to'} {high:g}"
    _refuse(field, f"{rule}, got {value}")


def _check_integer(field: str, value: int, meta: Meta) -> None:
    if meta.ge is not None and value < meta.ge and meta.ge != -INT64_MAX - 1:
        _refuse(field, f"must be at least {meta.ge}, got {value}")
    if meta.le is not None and not -meta.le - 1 <= value <= meta.le:
        if meta.le in (INT32_MAX, INT64_MAX):
            _refuse(field, f"must fit in {int(meta.le).bit_length() + 1} bits")
        _refuse(field, f"must be at most {meta.le}, got {value}")


def _check_length(field: str, length: int, meta: Meta, units: str) -> None:
    low, high = meta.min_length or 0, meta.max_length
    if length < low and high is None:
        _refuse(field, "must not be empty")
    if high is not None and not low <= length <= high:
        _refuse(field, f"must have {low} to {high} {units}, got {length}")


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        _refuse(field, f"must be at least {low}, got {value}")
