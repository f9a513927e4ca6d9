"""The token route: ids in, ids and logprobs out.  No text library is needed.

msgspec decodes the raw body and encodes the reply; most of a streamed token's event is encoded once per choice.
Unknown fields are refused with the closest known name; what clients of other servers send is listed in `compat`.
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.base.rooms import contributions, request_part
from tokserve.client.inputs import bare_id
from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.protocol.logprobs import stride_of, width_of
from tokserve.protocol.params import (
    Count,
    RepetitionDetection,
    RoutedFormat,
    SamplingParams,
    StructuredOutputs,
    check_ranges,
)
from tokserve.protocol.prompt import TokenPrompt, unpack_ids
from tokserve.server import compat
from tokserve.server.generation import Generation, Usage
from tokserve.server.http import declared, errors
from tokserve.server.http.body import decode, encode_json, is_msgpack, malformed, wants_msgpack, without_mark
from tokserve.server.http.body_reader import free_at_end
from tokserve.server.http.workers import off_loop
from tokserve.server.replies import fields, logprobs, reply_size, sse
from tokserve.server.replies.candidates import CandidateFields, write_candidates
from tokserve.server.replies.fields import ColumnFields
from tokserve.server.replies.messages import MessageReader, message_reader
from tokserve.server.replies.reply_fields import StopDetail, WeightVersion, prompt_versions, versions
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.replies.reply_parts import DeferredParts, single_part
from tokserve.server.serving import FieldPaths, Serving

ID_PREFIX = "generate-tokens-"
SAMPLING = "sampling_params."
HOLE = Raw(b"\0")  # stands for a value that comes later: a byte that no JSON contains
TEXT_ROUTES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}  # by field
Format = Literal["objects", "arrays", "base64"]

# null stands for the default of every parameter
NULLABLE = frozenset(SamplingParams.__struct_fields__)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries besides deltas."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


if TYPE_CHECKING:

    class OptionFields(msgspec.Struct, kw_only=True):
        """The fields of `RequestOptions`; here those that this file reads."""

        stream: bool | None = False

else:
    OptionFields = declared.struct("OptionFields", declared.OPTIONS)


class _Generate(OptionFields, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    sampling_params: Raw | UnsetType = UNSET  # a `SamplingParams`, decoded by itself
    request_id: str | None = None
    model: str | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_sampling_mask: bool | None = None  # the same as in sampling_params
    output_mode: Literal["tokens", "text", "derender"] | None = "tokens"
    chat_request: Any = None
    parse_context: Any = None
    logprobs_format: Format | None = "objects"
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    features: Any = None
    content_parts: Any = None
    token_offsets: Any = None  # this and the next four: what render adds; no effect here
    prompt_text: Any = None
    assistant_tokens_mask: Any = None
    reasoning_ended: Any = None
    reasoning_parser_kwargs: Any = None
    routed_experts_prompt_start: Count | None = None  # this and the next: as in sampling_params
    routed_experts_format: RoutedFormat | None = None
    output_kind: Any = None  # this and the next two belong in sampling_params, and have no effect there either
    flat_logprobs: Any = None
    skip_clone: Any = None


class GenerateBody(_Generate, kw_only=True):
    """The body of /inference/v1/generate."""

    token_ids: list[int] | None = None
    token_ids_b64: bytes | None = None


class PackedGenerateBody(_Generate, kw_only=True):
    """The same in msgpack, where ids may be a byte string; base64 is decoded by `prompt_of`."""

    token_ids: list[int] | bytes | None = None
    token_ids_b64: str | None = None


AnyBody = GenerateBody | PackedGenerateBody


class GenerateChoice(ColumnFields):
    """A choice, or a delta of one."""

    index: int
    token_ids: list[int] | bytes | Raw
    finish_reason: str | None
    stop_reason: int | str | list[int] | None
    logprobs: Any
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    prompt_weight_versions: list[WeightVersion] | UnsetType = UNSET
    stop_detail: StopDetail | UnsetType = UNSET
    text: str | Raw | UnsetType | None = UNSET
    message: Any = UNSET  # with output_mode "derender"; in a stream it is `delta`
    delta: Any = UNSET


class PlaceholderRange(msgspec.Struct):
    """Where the tokens of an image lie in the prompt."""

    offset: int
    length: int


class GenerateReply(CandidateFields):
    """The whole reply."""

    request_id: str
    id: str
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: Any
    seed: int
    prompt_token_ids: list[int] | bytes | UnsetType = UNSET
    mm_placeholders: dict[str, list[PlaceholderRange]] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | None = None
    exact: bool = True
    metrics: ReplyMetrics | UnsetType = UNSET
    output_mode: str = "tokens"
    object: str = "inference.generate"


class GenerateChunk(CandidateFields):
    """An event of a stream; the first has the fields after `usage`."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    mm_placeholders: dict[str, list[PlaceholderRange]] | UnsetType = UNSET
    prompt_logprobs: Any = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET  # in the last one
    output_mode: str = "tokens"


_KNOWN = (  # names to suggest; dotted ones are where a field belongs that was given at the top
    *GenerateBody.__struct_fields__,
    *StreamOptions.__struct_fields__,
    *(f"stream_options.{name}" for name in StreamOptions.__struct_fields__),
    *(f"{SAMPLING}{name}" for name in SamplingParams.__struct_fields__),
)
_json_body = msgspec.json.Decoder(GenerateBody).decode
_msgpack_body = msgspec.msgpack.Decoder(PackedGenerateBody).decode
_json_params = msgspec.json.Decoder(SamplingParams).decode
_msgpack_params = msgspec.msgpack.Decoder(SamplingParams).decode


def _with_route(error: RequestError) -> RequestError:
    """The error of an unknown field; that of a text names the route that takes it."""
    route = TEXT_ROUTES.get(error.field or "")
    if error.code != "unknown_field" or route is None:
        return error
    what = f"unknown field {error.field!r}: this route takes token_ids; text goes to {route}"
    return RequestError(what, field=error.field, code=error.code)


def decode_body(raw: bytes | bytearray | memoryview, packed: bool) -> AnyBody:
    """The body; raises `RequestError` naming the field."""
    try:
        body: AnyBody = _msgpack_body(raw) if packed else _json_body(without_mark(raw))
    except msgspec.ValidationError as error:
        raise _with_route(errors.from_msgspec(error, _KNOWN)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error, raw, packed) from None
    errors.refuse_unsupported("ec_transfer_params", body.ec_transfer_params)
    if body.chat_request is not None and body.output_mode != "derender":
        raise RequestError('chat_request goes with output_mode "derender"', field="chat_request")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    return body


def decode_params(raw: Raw | UnsetType, packed: bool) -> SamplingParams:
    """The sampling parameters; raises `RequestError` naming the field."""
    if raw is UNSET:
        return SamplingParams()
    try:
        return _msgpack_params(raw) if packed else _json_params(raw)
    except msgspec.ValidationError as error:
        if "out of range" in str(error):  # a number beyond all floats
            raise malformed(error, bytes(raw), packed, "sampling_params") from None
        values = decode(bytes(raw), packed, "sampling_params")
        if values is None:
            return SamplingParams()
        if not isinstance(values, dict):
            raise errors.from_msgspec(error, (), "sampling_params") from None
    except UnicodeDecodeError as error:
        raise malformed(error, bytes(raw), packed, "sampling_params") from None
    try:
        values = _without_ignored(values)
        return msgspec.convert(values, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        check_ranges(SamplingParams, values, SAMPLING)
        nested = (*RepetitionDetection.__struct_fields__, *StructuredOutputs.__struct_fields__)
        known = (*SamplingParams.__struct_fields__, *nested)
        raise errors.from_msgspec(error, known, "sampling_params") from None


def _without_ignored(values: dict[Any, Any]) -> dict[Any, Any]:
    """The parameters without those of other servers that have no effect; refuses those that would have one."""
    kept = {}
    for name, value in values.items():
        rule = compat.TOKEN_PARAMS.get(name)
        if rule is not None and rule.treatment == "refused":
            errors.refuse_unsupported(f"sampling_params.{name}", value, rule.no_effect)
        for _, read_parameter in contributions("parameters"):
            value = read_parameter(name, value, "sampling_params.")
        if name in ("logprobs", "prompt_logprobs") and isinstance(value, bool):
            value = 1 if value else None
        if rule is None and name not in compat.OTHER_NAMES and not (value is None and name in NULLABLE):
            kept[name] = value
    return kept


def with_mask(params: SamplingParams, value: bool | None) -> SamplingParams:
    """The parameters with the body's own `return_sampling_mask`."""
    if value is None or value == params.return_sampling_mask:
        return params
    if params.return_sampling_mask is not None:
        raise RequestError(
            f"return_sampling_mask is {str(value).lower()} and {SAMPLING}return_sampling_mask is not; send one of them",
            field="return_sampling_mask",
        )
    return msgspec.structs.replace(params, return_sampling_mask=value)


def prompt_of(body: AnyBody) -> tuple[list[int] | bytes, FieldPaths]:
    """The prompt, as a list or packed, and the names of its fields for errors."""
    in_base64 = body.token_ids_b64
    if in_base64 is None:
        if body.token_ids is None:
            raise RequestError("token_ids is required", field="token_ids")
        return body.token_ids, FieldPaths("token_ids", SAMPLING)
    if body.token_ids is not None:
        raise RequestError("give token_ids or token_ids_b64, not both", field="token_ids_b64")
    if isinstance(in_base64, str):
        try:
            in_base64 = base64.b64decode(in_base64, validate=True)
        except ValueError:
            raise RequestError("token_ids_b64 is not base64", field="token_ids_b64") from None
    return in_base64, FieldPaths("token_ids_b64", SAMPLING)


async def generate_tokens(serving: Serving, request: Request) -> Response:
    """POST /inference/v1/generate: token ids in, token ids and logprobs out"""
    return await respond(serving, request)


async def respond(serving: Serving, request: Request, routed_experts_format: RoutedFormat | None = None) -> Response:
    """Read the body, generate and answer.  `routed_experts_format`: that of a route whose clients name none."""
    packed = is_msgpack(request)
    raw = await serving.bodies.read(request)

    def decode() -> tuple[AnyBody, SamplingParams]:
        serving.bodies.check_values(request, raw, packed)
        body = decode_body(raw, packed)
        params = with_mask(decode_params(body.sampling_params, packed), body.return_sampling_mask)
        if body.routed_experts_prompt_start:
            params = msgspec.structs.replace(params, routed_experts_prompt_start=body.routed_experts_prompt_start)
        default = routed_experts_format if params.routed_experts_format == "npy" else None
        if form := body.routed_experts_format or default:
            params = msgspec.structs.replace(params, routed_experts_format=form)
        return body, serving.form_defaults.complete(params)

    body, params = await off_loop(request, len(raw), decode)
    free_at_end(request, len(raw), body.token_ids)
    sse.check_format(body.stream, wants_msgpack(request))
    await serving.find_model(body.model)
    generate = serving.request_of(request, body, params, text=body.output_mode in ("text", "derender"))
    ids, paths = prompt_of(body)
    messages = await _messages(serving, request, body, params, ids, generate.request_id)
    prompt: Sequence[int] | bytes | TokenPrompt = ids
    if body.content_parts is not None or body.features is not None:
        salt = generate.options.cache_salt or ""
        named = "features" if body.content_parts is None else "content_parts"
        prompt = await request_part("images", "prompt_with_images", named)(
            serving, request, body.content_parts, body.features, ids, paths.prompt, salt
        )
    entry_bytes = reply_size.OBJECT_BYTES if body.logprobs_format in (None, "objects") else reply_size.COLUMN_BYTES
    generation = await serving.start(request, generate, [prompt], paths, entry_bytes=entry_bytes)
    body.token_ids, body.token_ids_b64, body.sampling_params = None, None, UNSET  # what would keep the body
    body.features, expands = None, body.content_parts is not None
    body.content_parts = body.chat_request = body.parse_context = None
    packed = wants_msgpack(request)
    render = _Render(serving, generation, body, params, packed=packed, expands=expands, messages=messages)
    return await sse.respond(generation, request, render, {})


async def _messages(
    serving: Serving, request: Request, body: AnyBody, params: SamplingParams, ids: list[int] | bytes, request_id: str
) -> MessageReader | None:
    """Who reads the outputs as messages, if that is requested."""
    if body.output_mode != "derender" or serving.llm.tokenizer is None:  # without one, the engine's client refuses it
        return None
    field = "parse_context" if body.chat_request is None else "chat_request"
    sent, key = getattr(body, field), bare_id(request_id)

    def make() -> MessageReader:
        return message_reader(serving, sent, field, params, unpack_ids(ids) if isinstance(ids, bytes) else ids, key)

    return await off_loop(request, 8 * len(ids), make)


class _Render:
    """Completions as this route's JSON."""

    def __init__(
        self,
        serving: Serving,
        generation: Generation,
        body: AnyBody,
        params: SamplingParams,
        *,
        packed: bool,
        expands: bool = False,
        messages: MessageReader | None = None,
    ) -> None:
        """`expands`: the prompt is longer than the client's, which is told.  `messages`: reads the outputs."""
        self._messages = messages
        self._id = ID_PREFIX + generation.key
        self._serving = serving
        self._model = serving.answers_as(body.model)
        self._generation = generation
        self._params = params
        self._packed = packed
        self._mode = body.output_mode or "tokens"
        self._text = self._mode == "text"
        self._spelling = logprobs.Spelling(serving.tokenizer, as_ids=False) if self._text else None
        self._echo = bool(body.return_token_ids) or expands
        self._places: dict[str, list[PlaceholderRange]] | UnsetType = UNSET
        if expands:
            self._places = {"image": [PlaceholderRange(*place) for place in generation.placeholders()]}
        self._format = body.logprobs_format or "objects"
        options = body.stream_options or StreamOptions()
        forced = serving.config.replies.enable_force_include_usage
        self._usage = forced or bool(options.include_usage)
        self._continuous = forced or (self._usage and bool(options.continuous_usage_stats))
        self._first = True
        self._frames: dict[int, list[bytes]] = {}  # by choice
        self._has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        # a delta without tokens has no columns, and a client who requested logprobs gets empty lists
        self._no_rows = Column(b"", stride_of(0), b"", params.computed_mode(serving.config.model.logprobs_mode))
        self._columns = serving.columns_of(params)
        self._form: fields.Form = "lists" if self._format == "objects" else self._format
        if packed:
            self._form = "packed"
        self._scores_due = params.scores_prompt
        self._candidates = params.prompt_logprob_token_ids is not None

    def _choice(self, c: ChoiceOutput, parts: DeferredParts | None = None, *, is_delta: bool = False) -> GenerateChoice:
        choice = GenerateChoice(
            c.index,
            self._ids(c.token_ids),
            c.finish_reason,
            c.stop_reason,
            self._logprobs(c.logprobs or self._no_rows, c.token_ids, parts) if self._has_logprobs else None,
            UNSET if c.finish_reason is None else versions(c),
            prompt_versions(c) if len(c.prompt_weight_versions) > 1 else UNSET,
            UNSET if c.finish_reason is None else StopDetail(c.stop_detail, c.message),
            c.text or "" if self._text else UNSET,
        )
        if self._messages is not None and is_delta:
            choice.delta = self._messages.delta(c)
        elif self._messages is not None:
            choice.message = self._messages.message(c)
        fields.write_tokens(choice, c, self._columns, self._form, parts)
        if c.finish_reason is not None:
            fields.write_end(choice, c, self._columns, self._form)
        return choice

    def _ids(self, ids: list[int]) -> list[int] | bytes:
        return array("i", ids).tobytes() if self._packed else ids

    def _logprobs(self, columns: Column, ids: list[int], parts: DeferredParts | None = None) -> Any:
        if self._format == "objects":
            top = width_of(columns) - len(self._params.logprob_token_ids or ())
            if parts is not None:
                return parts.defer(logprobs.objects_encoder(columns, ids, top, self._spelling))
            return logprobs.objects(columns, ids, top, self._spelling)
        make = logprobs.packed if self._packed or self._format == "base64" else logprobs.arrays
        return make(columns) if parts is None else parts.defer(single_part(lambda: make(columns)))

    def _prompt_logprobs(self, columns: Column | None, parts: DeferredParts | None = None) -> Any:
        """The prompt's logprobs in the requested format.  There are no columns for a prompt of one token, nor for one
        that was never computed."""
        first = max(1, self._params.prompt_logprobs_start)
        columns = columns or self._no_rows
        if self._format == "objects":
            texts = self._serving.tokenizer.token_texts if self._text else None
            args = (columns, self._generation.prompt_ids(), first, width_of(columns), texts)
            if parts is not None:
                return parts.defer(logprobs.prompt_objects_encoder(*args))
            return logprobs.prompt_objects(*args)
        make = logprobs.packed if self._packed or self._format == "base64" else logprobs.arrays
        return make(columns, first) if parts is None else parts.defer(single_part(lambda: make(columns, first)))

    def reply(self, completions: list[ChoiceOutput], parts: DeferredParts | None = None) -> GenerateReply:
        generation = self._generation
        scores, columns = None, None
        if self._scores_due:
            columns = next((c.prompt_logprobs for c in completions if c.prompt_logprobs), None)
            scores = None if self._candidates else self._prompt_logprobs(columns, parts)
        reply = GenerateReply(
            request_id=self._id,
            id=self._id,
            created=int(time.time()),
            model=self._model,
            choices=[self._choice(c, parts) for c in completions],
            usage=generation.usage(),
            prompt_logprobs=scores,
            seed=generation.seed,
            prompt_token_ids=self._ids(generation.prompt_ids()) if self._echo else UNSET,
            mm_placeholders=self._places,
            kv_transfer_params=generation.kv_transfer_params,
            exact=bool(self._serving.llm.ready.facts.get("exact", True)),
            metrics=generation.metrics(sources=True),
            output_mode=self._mode,
        )
        if self._candidates:
            write_candidates(reply, columns)
        return reply

    def delta(self, delta: ChoiceOutput) -> bytes:
        changes = self._first or self._continuous or self._scores_due or self._messages is not None
        if changes or delta.finish_reason is not None:
            return self._event(delta)
        return self._plain_event(delta)

    def _plain_event(self, delta: ChoiceOutput) -> bytes:
        """The event of a delta in the middle of a stream: all but the tokens is constant, and encoded once."""
        frame = self._frames.get(delta.index)
        if frame is None:
            frame = self._frames[delta.index] = self._frame(delta.index)
        event = frame[0] + encode_json(delta.token_ids)
        if self._has_logprobs:
            event += frame[1] + encode_json(self._logprobs(delta.logprobs or self._no_rows, delta.token_ids))
        place = 2 if self._has_logprobs else 1
        if self._text:
            event += frame[place] + encode_json(delta.text or "")
            place += 1
        for name in self._columns:
            for value in fields.writers()[name].tokens(delta.columns.get(name), self._form).values():
                event += frame[place] + encode_json(value)
                place += 1
        return event + frame[-1]

    def _frame(self, index: int) -> list[bytes]:
        """The constant parts of an event: around the token ids and, if these are wanted, the logprobs, the text, and
        the fields of columns."""
        logprobs, text = HOLE if self._has_logprobs else None, HOLE if self._text else UNSET
        choice = GenerateChoice(index, HOLE, None, None, logprobs, text=text)
        for name in self._columns:
            for field in fields.writers()[name].of_tokens:
                setattr(choice, field, HOLE)
        chunk = GenerateChunk(self._id, [choice], None if self._usage else UNSET, output_mode=self._mode)
        return sse.event(encode_json(chunk)).split(HOLE)

    def _event(self, delta: ChoiceOutput) -> bytes:
        chunk = GenerateChunk(self._id, [self._choice(delta, is_delta=True)], output_mode=self._mode)
        if self._usage:
            chunk.usage = self._generation.usage() if self._continuous else None
        if self._first:
            self._first = False
            chunk.model, chunk.created, chunk.seed = self._model, int(time.time()), self._generation.seed
            if self._echo:
                chunk.prompt_token_ids = self._generation.prompt_ids()
            chunk.mm_placeholders = self._places
        if "kv_transfer" in delta.values:
            chunk.kv_transfer_params = delta.values["kv_transfer"]
        if self._scores_due and (delta.prompt_logprobs or self._generation.ended):
            self._scores_due = False
            if self._candidates:
                write_candidates(chunk, delta.prompt_logprobs)
            else:
                chunk.prompt_logprobs = self._prompt_logprobs(delta.prompt_logprobs)
        return sse.event(encode_json(chunk))

    def tail(self) -> bytes:
        if not self._usage:
            return b""
        usage, metrics = self._generation.usage(), self._generation.metrics(sources=True)
        return sse.event(encode_json(GenerateChunk(self._id, [], usage, metrics=metrics, output_mode=self._mode)))
