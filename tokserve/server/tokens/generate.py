"""The token route: ids in, ids and logprobs out.  No text library is needed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.rooms import request_part
from tokserve.client.inputs import bare_id
from tokserve.protocol.params import RoutedFormat, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, unpack_ids
from tokserve.server.http.body import is_msgpack, wants_msgpack
from tokserve.server.http.body_reader import free_at_end
from tokserve.server.http.workers import off_loop
from tokserve.server.replies import reply_size, sse
from tokserve.server.replies.messages import MessageReader, message_reader
from tokserve.server.serving import Serving
from tokserve.server.tokens.generate_body import AnyBody, decode_request, prompt_of
from tokserve.server.tokens.generate_reply import TokenRender


async def generate_tokens(serving: Serving, request: Request) -> Response:
    """POST /inference/v1/generate: token ids in, token ids and logprobs out"""
    return await respond(serving, request)


async def respond(serving: Serving, request: Request, routed_format: RoutedFormat | None = None) -> Response:
    """Read the body, generate and answer.  `routed_format`: of routed experts, where the body names none."""
    packed = is_msgpack(request)
    raw = await serving.bodies.read(request)

    def decode() -> tuple[AnyBody, SamplingParams]:
        serving.bodies.check_values(request, raw, packed)
        return decode_request(raw, packed, routed_format)

    body, params = await off_loop(request, len(raw), decode)
    free_at_end(request, len(raw), body.token_ids)
    sse.check_format(body.stream, wants_msgpack(request))
    await serving.model.find(body.model)
    generate = serving.requests.request_of(request, body, params, text=body.output_mode in ("text", "derender"))
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
    generation = await serving.requests.start(request, generate, [prompt], paths, entry_bytes=entry_bytes)
    body.token_ids, body.token_ids_b64, body.sampling_params = None, None, UNSET  # what would keep the body
    body.features, expands = None, body.content_parts is not None
    body.content_parts = body.chat_request = body.parse_context = None
    packed = wants_msgpack(request)
    render = TokenRender(serving, generation, body, params, packed=packed, expands=expands, messages=messages)
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
