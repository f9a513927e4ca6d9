"""The body of the token route: what msgspec decodes it into, and the request it makes.

Unknown fields are refused with the closest known name; what clients of other servers send is listed in `compat`.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tokserve.base.errors import RequestError
from tokserve.base.rooms import contributions
from tokserve.protocol.params import (
    Count,
    RepetitionDetection,
    RoutedFormat,
    SamplingParams,
    StructuredOutputs,
    check_ranges,
)
from tokserve.server import compat
from tokserve.server.http import declared, errors
from tokserve.server.http.body import decode, malformed, without_mark
from tokserve.server.request_starter import FieldPaths

SAMPLING = "sampling_params."
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


def decode_request(
    raw: bytes | bytearray | memoryview, packed: bool, routed_format: RoutedFormat | None = None
) -> tuple[AnyBody, SamplingParams]:
    """The body and its sampling parameters, with those that the body itself has.  `routed_format`: of routed experts,
    where neither names one.  Raises `RequestError` naming the field."""
    body = decode_body(raw, packed)
    params = with_mask(decode_params(body.sampling_params, packed), body.return_sampling_mask)
    start = body.routed_experts_prompt_start or params.routed_experts_prompt_start
    form = body.routed_experts_format or params.routed_experts_format or routed_format
    if (start, form) != (params.routed_experts_prompt_start, params.routed_experts_format):
        params = msgspec.structs.replace(params, routed_experts_prompt_start=start, routed_experts_format=form)
    return body, params


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
