"""What the pooling routes share: bodies, prompts, and the one way to have vectors made."""

from __future__ import annotations

import base64
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.base.errors import Overloaded, RequestError, invalid
from tokserve.dialects.openai import schemas
from tokserve.dialects.openai.completions import parse_prompts, tokenized
from tokserve.features.chat.prompts import Side, cut
from tokserve.features.chat.text_context import TextContext
from tokserve.features.pooling.columns import packed_vector
from tokserve.features.pooling.pooled_outputs import LabelRules, PoolingRules, VectorRules
from tokserve.features.pooling.server_pooling import ServerPooling
from tokserve.protocol.params import PoolingParams
from tokserve.server import compat
from tokserve.server.http.errors import renamed
from tokserve.server.replies import sse
from tokserve.server.request_starter import FieldPaths, Prompts
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

BYTES_OF_VALUE = 24  # of a float in JSON, at most
REPLY_BYTES = 1 << 20  # of any reply with vectors: it is made in a thread
CUT_BYTES = 1 << 20  # a text that is to be cut may have so many bytes, even if they exceed the context
MAX_TRIES = 3  # to have all vectors of a request made by the same weights
UNSUPPORTED = "unsupported"  # code of what this model cannot do: a 400, not a 501, which SDKs repeat


class PoolingBody(schemas.ScheduledBody):
    """What the bodies of all pooling routes share."""

    others: ClassVar[compat.FieldTable] = compat.POOLING

    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


class InputBody(PoolingBody):
    """A body with inputs, each of which becomes a vector."""

    input: Any = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PoolingUsage(msgspec.Struct):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class PooledPrompts(NamedTuple):
    """What the engine made: a vector for each prompt.  `key`: of the request, for the reply's id.  `version`: of the
    weights, and of the adapter."""

    key: str
    vectors: list[bytes]
    usage: PoolingUsage
    headers: dict[str, str]
    version: str


def vector_rules(serving: Serving) -> VectorRules:
    """How this server makes embeddings; raises RequestError if it does not."""
    rules = any_rules(serving)
    if not isinstance(rules, VectorRules):
        raise RequestError("this model classifies: use /classify", field="model", code=UNSUPPORTED)
    return rules


def label_rules(serving: Serving) -> LabelRules:
    """How this server classifies; raises RequestError if it does not."""
    rules = any_rules(serving)
    if not isinstance(rules, LabelRules):
        raise RequestError("this model makes embeddings and does not classify", field="model", code=UNSUPPORTED)
    return rules


def any_rules(serving: Serving) -> PoolingRules:
    """How this server pools; raises RequestError if it generates."""
    pooler = serving.state_of(ServerPooling).rules
    if pooler is None:
        raise RequestError("this server generates text: use --runner pooling", field="model", code=UNSUPPORTED)
    return pooler


def prompts_of(serving: Serving, body: InputBody) -> list[list[int]]:
    """The ids of each input.  Raises RequestError."""
    check_truncation(serving, body)
    if (body.input is None) == (body.messages is None):
        raise RequestError("give input or messages", field="input")
    if body.messages is not None:
        prompts = _conversations(serving, body, body.messages)
    else:
        parsed = parse_prompts(body.input, "input")
        special = body.add_special_tokens is not False
        prompts = tokenized(serving, parsed, special, is_listed(body.input), "input", _min_bytes(body))
    rules, context = any_rules(serving), serving.llm.ready.max_model_len
    framed = serving.text and body.messages is None and body.add_special_tokens is not False
    frame = serving.tokenizer.frame if framed else (0, 0)
    values = body.input if is_listed(body.input) else [body.input]
    return [
        truncated(ids, body, context, rules.side, frame if isinstance(one, str) else (0, 0))[0]
        for ids, one in zip(prompts, values if body.messages is None else prompts, strict=True)
    ]


def _min_bytes(body: PoolingBody) -> int:
    """The bytes of a text that need not fit into the context."""
    return 0 if body.truncate_prompt_tokens is None else CUT_BYTES


def fields_of(body: InputBody) -> FieldPaths:
    """Where the prompts of the body are, for errors."""
    name = "messages" if body.input is None else "input"
    value: Any = body.messages if body.input is None else body.input
    listed = is_listed(value) and (body.messages is None or isinstance(value[0], list))
    return FieldPaths(f"{name}[0]" if listed and len(value) == 1 else name)


def is_listed(value: Any) -> bool:
    """Whether a field of inputs holds a list of them, not one."""
    return isinstance(value, list) and bool(value) and type(value[0]) is not int


def _conversations(serving: Serving, body: InputBody, messages: list[Any]) -> list[list[int]]:
    several = bool(messages) and isinstance(messages[0], list)
    prompts = []
    for index, one in enumerate(messages if several else [messages]):
        field = f"messages[{index}]" if several else "messages"
        if not isinstance(one, list):
            raise invalid(field, "must be a list of messages")
        serving.state_of(TextContext).check_messages(one, field)
        try:
            ids = serving.state_of(TextContext).template.render(
                one,
                add_generation_prompt=bool(body.add_generation_prompt),
                continue_final_message=bool(body.continue_final_message),
                kwargs=body.chat_template_kwargs,
                context=serving.llm.ready.max_model_len,
                min_bytes=_min_bytes(body),
            )
        except RequestError as error:
            if error.field is not None and error.field.startswith("messages"):
                renamed(error, field + error.field.removeprefix("messages"))
            raise
        prompts.append(ids)
    return prompts


def check_truncation(serving: Serving, body: PoolingBody) -> None:
    """Raise RequestError for a length that nothing can be cut to, or that the context does not have."""
    limit, context = body.truncate_prompt_tokens, serving.llm.ready.max_model_len
    if limit is not None and (limit < -1 or limit == 0):
        raise invalid("truncate_prompt_tokens", f"must be -1 or at least 1, got {limit}")
    if limit is not None and limit > context:
        raise invalid("truncate_prompt_tokens", f"must be at most the context, {context} tokens, got {limit}")


def truncated(
    ids: list[int], body: PoolingBody, context: int, side: Side, frame: tuple[int, int] = (0, 0), second: int = -1
) -> tuple[list[int], int]:
    """The ids, cut as the body says, or else at this `side`, but not of the special tokens before and after the text;
    and `second`, as in `TokenPrompt`, of what is left."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return ids, second
    limit = context if limit == -1 else limit
    return cut(ids, limit, body.truncation_side or side, frame, second)


def check_reply(serving: Serving, size: int, field: str, advice: str) -> None:
    """Raise RequestError for a reply of more bytes than one may have; `advice`: what to send instead."""
    limit = serving.config.limits.max_reply_bytes
    if size > limit:
        raise RequestError(
            f"the reply may have {size >> 20} MiB, above the limit of {limit >> 20} (--max-reply-bytes): send {advice}",
            field=field,
            code="reply_too_large",
        )


def encoded(vector: NDArray[np.float32], encoding: str) -> Any:
    """A vector, or one for each token: as numbers, or as base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


async def pool(
    call: RouteCall[PoolingBody], params: PoolingParams, prompts: Prompts, fields: FieldPaths
) -> PooledPrompts:
    """A vector for each prompt, all of one version of the weights; all of them, or RequestError."""
    requests = call.serving.requests
    generate = requests.request_of(call.request, call.body, params, text=False)
    headers = {"X-Request-Id": generate.request_id, **call.headers}
    for _ in range(MAX_TRIES):
        generation = await requests.start(call.request, generate, prompts, fields)
        choices = await sse.collect(generation, call.request)
        for choice in choices:
            if not packed_vector(choice):
                raise sse.unfinished(choice, "the request ended without a vector")
        versions = {choice.weight_versions[-1][0] for choice in choices}
        if len(versions) == 1:
            tokens = generation.usage().prompt_tokens
            vectors = [packed_vector(choice) for choice in choices]
            return PooledPrompts(generation.key, vectors, PoolingUsage(tokens, tokens), headers, versions.pop())
    raise Overloaded(f"the weights changed in each of {MAX_TRIES} tries to pool these inputs", code="weights_changed")
