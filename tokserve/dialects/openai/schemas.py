"""The bodies of the text routes: OpenAI's fields, the extensions of other servers, and what is refused.

pydantic validates them in strict mode (a string is no number); null is the same as absent.  A field that no
model declares is ignored and reported to the client, unless it would change the output: those are refused (`fields`).
What the values mean is decided in `params` and by the routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema
from starlette.requests import Request

from tokserve.base.errors import LONGEST_SHOWN, RequestError
from tokserve.dialects.openai import tools
from tokserve.features.grammar import structured
from tokserve.protocol.params import RepetitionDetection, SamplingParams, declared
from tokserve.server import compat
from tokserve.server.http import errors
from tokserve.server.http.body import convert, is_msgpack, unpack_ids
from tokserve.server.http.declared import OPTIONS, model
from tokserve.server.http.workers import off_loop
from tokserve.server.replies import sse
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# sampling parameters that these bodies have in another form, or not at all; and those that not all of them have
OTHER_FORM = (
    "logit_bias",
    "repetition_detection",
    "thinking_markers",
    "structured_outputs",
    "extra_args",
    "detokenize",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "trace_decode_token_ids",
    "hidden_states",
)
NOT_OF_RESPONSES = (
    "n",
    "max_tokens",
    "prompt_logprobs_start",
    "prompt_logprobs_mode",
    "routed_experts_prompt_start",
    "routed_experts_format",
    "return_sampling_mask",
    "return_entropy",
)
SAMPLING = tuple(field for field in declared(SamplingParams) if field.name not in OTHER_FORM)

# Fields that may hold bytes in msgpack, also those of a request within a body: who reads them looks at them.
PACKED = frozenset({"tokens", "prompt", "prompt_token_ids", "generate_response", "generate_responses"})
WITHIN = re.compile(r"^(chat|completion)_request\.")

Body = TypeVar("Body", bound="RequestBody")
MAX_NAMES = {"logit_bias": 1 << 18}  # entries of an object at the top of a body
OTHER_MAX_NAMES = 1 << 12
NO_LIMIT = -1  # of tokens, as some clients say it
MAX_PARTS = 4096  # of a prediction: pydantic makes all of them in one call, which holds the interpreter's lock


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for inner in schema.values():
            _fail_fast(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _fail_fast(inner)


class OptionsModel(BaseModel):
    """An object in a body; its unknown fields are kept, to be reported as ignored."""

    model_config = ConfigDict(strict=True, extra="allow")


class TextStreamOptions(OptionsModel):
    """What a stream contains besides deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(BaseModel):
    """What all text routes share."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    others: ClassVar[compat.FieldTable] = compat.TEXT  # that have no effect

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lists stop at their first wrong entry: a million of them would make a million errors."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    model: str | None = None


SCHEDULING = ("priority", "cache_salt", "group_id", "deadline_ms", "queue_timeout_ms", "data_parallel_rank")
_ScheduledFields: Any = model("_ScheduledFields", RequestBody, (field for field in OPTIONS if field.name in SCHEDULING))


class ScheduledBody(_ScheduledFields):  # type: ignore[misc]
    """What all routes share that make no tokens: when and where the engine computes."""

    request_id: str | None = None


_GeneratingFields: Any = model(
    "_GeneratingFields", RequestBody, (*OPTIONS, *(f for f in SAMPLING if f.name not in NOT_OF_RESPONSES))
)


class GeneratingBody(_GeneratingFields):  # type: ignore[misc]
    """What all routes share that generate text, besides the options and parameters that `params` declares."""

    stream_options: TextStreamOptions | None = None
    repetition_detection: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None


_TextFields: Any = model("_TextFields", GeneratingBody, (f for f in SAMPLING if f.name in NOT_OF_RESPONSES))


class PredictionPart(OptionsModel):
    """A part of a predicted text."""

    type: Literal["text"]
    text: str


class Prediction(OptionsModel):
    """What the output may be: it makes the same answer faster."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(max_length=MAX_PARTS)]


class TextBody(_TextFields):  # type: ignore[misc]
    """What chat and completions share."""

    max_completion_tokens: int | None = None
    kv_transfer_params: Any = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: bool | int | None = None
    add_special_tokens: bool | None = None
    prediction: Prediction | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_weight_versions: bool | None = None
    return_token_offsets: bool | None = None  # this and the next: of render
    return_prompt_text: bool | None = None


class TemplateFields(BaseModel):
    """What the chat template is given besides messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    required_prefix_token_ids: list[int] | None = None


class ChatBody(TextBody, TemplateFields):
    """The body of /v1/chat/completions; `tokens` only on the route that takes the prompt as ids."""

    messages: list[Any] | None = None
    tokens: list[int] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None
    return_assistant_tokens_mask: bool | None = None  # of render

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is returned separately, on a server that can tell it from content."""
        return True


class CompletionBody(TextBody):
    """The body of /v1/completions.  The route checks `prompt`, whose four forms need better errors than a union's."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    packed_top_logprobs: bool | None = None


class TextOptions(OptionsModel):
    """The form of a response's text."""

    format: dict[str, Any] | None = None


class ReasoningOptions(OptionsModel):
    """How much a model thinks before it answers.  `summary`: reasoning is returned as a summary, which is all of it."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(GeneratingBody):
    """The body of /v1/responses.  The items of `input` are checked by the route."""

    others: ClassVar[compat.FieldTable] = compat.RESPONSES

    input: str | list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


class TokenizeBody(RequestBody, TemplateFields):
    """The body of /tokenize: text or messages."""

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """The body of /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool | None = None


async def read_body(serving: Serving, request: Request, kind: type[Body]) -> RouteCall[Body]:
    """A request's body, checked, for a model that is served.  Raises `RequestError`."""
    value, size = await serving.bodies.load(request)

    def work() -> tuple[Body, list[str]]:
        if is_msgpack(request):
            try:
                _check_json(value, "")
            except RecursionError as error:
                raise errors.malformed(error, "msgpack") from None
        return parse(kind, value, strict=serving.config.server.strict)

    body, ignored = await off_loop(request, size, work)
    await serving.model.find(body.model)
    return RouteCall(serving, request, body, size, ignored)


def parse(kind: type[Body], value: Any, *, strict: bool) -> tuple[Body, list[str]]:
    """Validate a decoded body; returns it and the names of ignored fields.  Raises `RequestError` naming a field."""
    value = _as_in_json(value)
    _check_names(value)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise errors.from_pydantic(error, value) from None
    ignored, unknown = _without_effect(body, value.get("n"))
    if isinstance(body, ChatBody):
        tools.check_tools(body.tools, body.tool_choice)
    elif isinstance(body, TokenizeBody):
        tools.check_functions(body.tools or [])
    known = [*kind.model_fields]
    for name in kind.model_fields:
        options = getattr(body, name)
        if isinstance(options, BaseModel):
            known += type(options).model_fields
            more, more_unknown = _without_effect(options, None, f"{name}.")
            ignored, unknown = ignored + more, unknown + more_unknown
    if strict and unknown:
        raise errors.unknown_field(unknown[0], unknown[0].rpartition(".")[2], known)
    return body, ignored


def _without_effect(body: RequestBody | BaseModel, n: Any, prefix: str = "") -> tuple[list[str], list[str]]:
    """The fields that are ignored, and those of them that --strict refuses.  Raises `RequestError` for one that is
    refused always.  `n`: the number of choices; `prefix`: where the body is."""
    ignored, refusable = [], []
    others = body.others if isinstance(body, RequestBody) else compat.INNER
    for name, value in (body.model_extra or {}).items():
        if not prefix:
            structured.refuse_other_names(name, value)
        field = others.get(prefix + name)
        if field is None and not prefix and name in compat.OTHER_NAMES:
            continue
        if field is None or (field.treatment == "ignored" and not compat.has_no_effect(field, value)):
            ignored.append(prefix + name)
            if field is None or field.strict:
                refusable.append(prefix + name)
        elif field.treatment == "refused":
            idle = (*field.no_effect, n) if name == "best_of" else field.no_effect  # the best n of n
            errors.refuse_unsupported(prefix + name, value, idle, field.note)
    return ignored, refusable


def _check_json(value: Any, field: str) -> None:
    """Refuse what msgpack can say and JSON cannot: bytes, times, extensions, and keys that are no names."""
    if WITHIN.sub("", field) in PACKED:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str | int):
                raise RequestError(f"{field or 'the body'}: keys must be strings", field=field or None)
            _check_json(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            if type(inner) is not int:
                _check_json(inner, f"{field}[{i}]")
    elif not isinstance(value, str | int | float | None):
        field = field[:LONGEST_SHOWN]
        raise RequestError(f"{field or 'the body'} must be a value that JSON can represent", field=field or None)


def _check_names(value: Any) -> None:
    """Refuse objects with more names than any use of them: each wrong entry would make an error."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        limit = MAX_NAMES.get(name, OTHER_MAX_NAMES)
        if isinstance(inner, dict) and len(inner) > limit:
            field = name[:LONGEST_SHOWN]
            raise RequestError(f"{field} must have at most {limit} names, got {len(inner)}", field=field)
    bias = value.get("logit_bias") if isinstance(value, dict) else None
    if isinstance(bias, dict):
        wrong = next((key for key, number in bias.items() if type(number) not in (int, float)), None)
        if wrong is not None:
            field = f"logit_bias.{wrong}"[:LONGEST_SHOWN]
            raise RequestError(f"{field}: input should be a valid number", field=field)


def _as_in_json(value: Any) -> Any:
    """The body as JSON would have it: in msgpack, ids may be packed, and the keys of logit_bias numbers."""
    if not isinstance(value, dict):
        return value
    changed: dict[str, Any] = {}
    for name in ("tokens", "prompt"):
        packed = value.get(name)
        if isinstance(packed, bytes):
            changed[name] = unpack_ids(packed, name)
    bias = value.get("logit_bias")
    if isinstance(bias, dict):
        changed["logit_bias"] = {str(key) if type(key) is int else key: number for key, number in bias.items()}
    return value | changed


def sampling(body: TextBody, defaults: Mapping[str, Any], **computed: Any) -> SamplingParams:
    """The sampling parameters: the client's, else the model's defaults; the route sets `computed`."""
    values = dict(defaults)
    values |= {field.name: value for field in SAMPLING if (value := getattr(body, field.name)) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    if body.repetition_detection is not None:
        fields = {name: value for name, value in body.repetition_detection.items() if value is not None}
        values["repetition_detection"] = convert(fields, RepetitionDetection, "repetition_detection")
    values["prompt_logprobs"] = count(body.prompt_logprobs)
    values["extra_args"] = body.vllm_xargs
    if computed.get("max_tokens") is None and defaults.get("max_tokens") is not None:
        computed["max_tokens"] = defaults["max_tokens"]
    return SamplingParams(**(values | computed))


def output_limit(body: TextBody, default: int | None = None) -> tuple[int | None, str]:
    """The most output tokens, and the name of the field that says so.  `default`: if neither field is there."""
    limit, name = body.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, name = (body.max_tokens if "max_tokens" in body.model_fields_set else default), "max_tokens"
    elif body.max_tokens not in (None, limit):
        raise RequestError(f"max_tokens and {name} differ; send one of them", field="max_tokens")
    return (None if limit == NO_LIMIT else limit), name


def count(value: bool | int | None) -> int | None:
    """A number of logprobs; some clients send true or false."""
    if isinstance(value, bool):
        return 1 if value else None
    return value


def _token(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9 or key != str(int(key)):
        raise RequestError(f"logit_bias must have token ids as keys, got {key[:20]!r}", field="logit_bias")
    return int(key)


def check_stream(body: GeneratingBody, packed: bool) -> None:
    """Refuse stream options without a stream, and a stream in msgpack."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    sse.check_format(body.stream, packed)


def usage_options(serving: Serving, body: TextBody) -> tuple[bool, bool]:
    """Whether a stream reports usage at its end, and whether in every chunk."""
    if serving.config.replies.enable_force_include_usage:
        return True, True
    options = body.stream_options or TextStreamOptions()
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


def shows_ids(serving: Serving, body: GeneratingBody) -> bool:
    """Whether logprobs name tokens by their ids."""
    if body.return_tokens_as_token_ids is None:
        return serving.config.replies.return_tokens_as_token_ids
    return bool(body.return_tokens_as_token_ids)
