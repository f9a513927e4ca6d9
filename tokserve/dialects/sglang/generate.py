"""POST /generate: text or ids in, text, ids and logprobs out, for one prompt or several.

A request is one `GenerateRequest` here too, with a task per prompt.  Logprobs are of logits over temperature, as in
SGLang, not the server's default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.openai.completions import MAX_CHOICES, MAX_PROMPTS
from tokserve.dialects.sglang import sampling
from tokserve.dialects.sglang.reply import GenerateRenderer, ReplyForm, last_events
from tokserve.features.chat.open_turn import answer_start
from tokserve.features.chat.output_format import OutputFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.text_context import TextContext
from tokserve.features.chat.thinking_budget import with_markers
from tokserve.features.chat.token_segments import SegmentReader
from tokserve.protocol.params import SamplingParams
from tokserve.server import compat
from tokserve.server.http import body, declared, errors
from tokserve.server.http.workers import ITEM, off_loop
from tokserve.server.replies import sse
from tokserve.server.replies.logprobs import TextOffset
from tokserve.server.request_starter import FieldPaths
from tokserve.server.route_call import ignored_header
from tokserve.server.serving import Serving


class SglangGenerateBody(msgspec.Struct, omit_defaults=True):
    """The body of /generate; what takes a list has an entry per prompt then."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    request_id: str | list[str] | None = msgspec.field(default=None, name="rid")
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_sampling_mask: bool | None = None
    return_entropy: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    require_reasoning: bool | None = None
    stream: bool | None = None
    lora_path: str | list[str | None] | None = None
    priority: int | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # its name before routed_dp_rank


class PromptFields(Protocol):
    """The fields of a body that hold its prompts."""

    text: str | list[str] | None
    input_ids: list[Any] | None


class GenerateCall(NamedTuple):
    """A body, read and checked."""

    body: SglangGenerateBody
    ignored: list[str]
    prompts: list[list[int]]
    tasks: list[SamplingParams]
    forms: list[ReplyForm]
    request_id: str | None
    listed: bool
    fields: FieldPaths


async def generate(serving: Serving, request: Request) -> Response:
    """POST /generate: text or ids in, text and ids out"""
    value, size = await serving.bodies.load(request)
    if isinstance(value, dict) and isinstance(name := value.get("rid"), str):
        with suppress(RequestError):  # raised again, when the rest of the body has been checked
            serving.requests.name_request(request, SimpleNamespace(request_id=name, group_id=None))
    call = await off_loop(request, size + ITEM * _num_prompts(value), lambda: read_generate(serving, value))
    sent = call.body
    lora = _one_value(sent.lora_path, "lora_path")
    if lora and (not serving.config.lora.enable_lora or serving.model.adapter(lora) != lora):
        raise invalid("lora_path", "needs the name of a loaded adapter (--enable-lora, /load_lora_adapter)")
    options = {field.name: field.default for field in declared.OPTIONS} | {
        "stream": bool(sent.stream),
        "cache_salt": _cache_salt(sent),
        "priority": -(sent.priority or 0),
        "request_id": call.request_id,
        "model": lora,
        "data_parallel_rank": _rank(sent),
    }
    try:
        await serving.model.find(lora)
        tasks = [with_markers(serving, task) for task in call.tasks]
        bare = serving.requests.request_of(
            request, SimpleNamespace(**options), tasks[0], text=serving.text, score_each=True
        )
    except RequestError as error:
        raise call.fields.rename(error) from None
    generation = await serving.requests.start(request, bare, call.prompts, call.fields, tasks=tasks)
    render = GenerateRenderer(
        generation,
        call.forms,
        _names(serving, sent),
        request_ids=[bare.request_id] * len(call.prompts),
        listed=call.listed,
        text=serving.text,
        echo=bool(sent.return_prompt_token_ids),
        version=lambda: serving.llm.status.weight_version,
        reader_after=_reasoning_reader(serving, call.tasks[0]),
    )
    headers = {"X-Request-Id": bare.request_id, **ignored_header(call.ignored)}
    if sent.stream:
        return sse.EventStream(generation, render, headers, close=last_events)
    choices: list[ChoiceOutput] = await sse.collect(generation, request)
    columns = sum(map(sse.columns_size, choices))
    raw = await off_loop(request, columns + ITEM * len(choices), lambda: render.reply(choices))
    return Response(raw, headers=headers, media_type=body.JSON)


def _check_reasoning(serving: Serving, tasks: Sequence[SamplingParams]) -> None:
    """Refuse `require_reasoning` where reasoning is not told apart, or none can come before the output's form."""
    if not serving.text or serving.state_of(TextContext).thinking is None:
        errors.refuse_unsupported("require_reasoning", True, reason="it needs --reasoning-parser")
    if any(task.structured_outputs is not None for task in tasks):
        errors.refuse_unsupported("require_reasoning", True, reason="structured output applies to reasoning, too")


def _reasoning_reader(serving: Serving, params: SamplingParams) -> Callable[[Sequence[int]], SegmentReader] | None:
    """What reads the outputs to prompts, to count the tokens of reasoning; None: the server does not tell it apart."""
    if not serving.text:
        return None
    text = serving.state_of(TextContext)
    thinking = text.thinking
    if thinking is None:
        return None
    before_answer = text.template.before_answer()
    pieces = serving.tokenizer.pieces(params.skip_special_tokens)

    def reader_after(prompt: Sequence[int]) -> SegmentReader:
        start = answer_start(thinking, serving.tokenizer, prompt, before_answer)
        return SegmentReader(Parser(OutputFormat(thinking=thinking), start), TextOffset(pieces))

    return reader_after


def _num_prompts(value: Any) -> int:
    """About how many prompts a body that is not checked yet has."""
    prompts = value.get("text") or value.get("input_ids") if isinstance(value, dict) else None
    return len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1


def _rank(sent: SglangGenerateBody) -> int | None:
    """The engine that the body names."""
    if None not in (sent.routed_dp_rank, sent.data_parallel_rank) and sent.routed_dp_rank != sent.data_parallel_rank:
        raise invalid("data_parallel_rank", "differs from routed_dp_rank; send one of them")
    return sent.data_parallel_rank if sent.routed_dp_rank is None else sent.routed_dp_rank


def read_generate(serving: Serving, value: Any) -> GenerateCall:
    """Check a decoded body and tokenize its texts.  Raises `RequestError` naming the field."""
    sent, ignored = _body(value)
    prompts, field, batched = prompts_of(serving, sent)
    params = [
        sampling.read_sampling(
            one, f"sampling_params[{index}]" if isinstance(sent.sampling_params, list) else "sampling_params"
        )
        for index, one in enumerate(_each(sent.sampling_params, len(prompts), "sampling_params"))
    ]
    if any((one.max_new_tokens or 0) < 0 for one in params):
        raise invalid(f"{sampling.PREFIX}max_new_tokens", "must be at least 0")
    if len({one.n or 1 for one in params}) > 1:
        raise invalid("sampling_params", "must have the same n for all prompts")
    if len(prompts) * max(1, params[0].n or 1) > MAX_CHOICES:
        raise invalid(f"{sampling.PREFIX}n", f"and the number of prompts make more than {MAX_CHOICES} choices")
    forms = _forms(serving, sent, prompts)
    named = _token_ids(sent, len(prompts))
    entropy = bool(sent.return_entropy)
    tasks = [
        _task(serving, *of_prompt, entropy=entropy) for of_prompt in zip(params, forms, named, prompts, strict=True)
    ]
    if sent.require_reasoning:
        _check_reasoning(serving, tasks)
    if sent.return_text_in_logprobs and not serving.text:
        raise invalid("return_text_in_logprobs", "needs a tokenizer, and this server has none (--tokens-only)")
    others = {**sampling.OTHER_NAMES, "structured_outputs": sampling.form_field(params)}
    if sent.routed_dp_rank is not None:
        others |= {"data_parallel_rank": "routed_dp_rank"}
    return GenerateCall(
        sent,
        ignored,
        prompts,
        tasks,
        forms,
        request_id(sent.request_id, len(prompts)),
        batched or tasks[0].n > 1,
        FieldPaths(field, sampling.PREFIX, others),
    )


def _body(value: Any) -> tuple[SglangGenerateBody, list[str]]:
    """The body, and the names of its unknown fields."""
    if not isinstance(value, dict):
        raise RequestError("the body must be an object")
    for name, rule in compat.SGLANG.items():
        if rule.treatment == "refused" and not _is_blank(value.get(name)):
            errors.refuse_unsupported(name, value[name], rule.no_effect, rule.note)
    unknown = [
        name
        for name in value
        if isinstance(name, str)
        and name not in SglangGenerateBody.__struct_encode_fields__
        and name not in compat.SGLANG
    ]
    return body.convert(value, SglangGenerateBody), unknown


def _is_blank(value: Any) -> bool:
    """Whether a value is null, nothing, or lists of that: what clients send who always send a field."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif part not in (None, ""):
            return False
    return True


def prompts_of(serving: Serving, sent: PromptFields) -> tuple[list[list[int]], str, bool]:
    """The prompts as ids, the name of their field, and whether they came as a batch."""
    if sent.text is not None and sent.input_ids is not None:
        raise RequestError("give text or input_ids, not both", field="text")
    value: list[Any] | str | None = sent.text if sent.input_ids is None else sent.input_ids
    field = "text" if sent.input_ids is None else "input_ids"
    if value is None:
        raise RequestError("text or input_ids is required", field="input_ids")
    if not value:
        raise invalid(field, "must not be empty")
    batched = isinstance(value, list) and not isinstance(value[0], int)
    listed: list[Any] = value if batched else [value]  # type: ignore[assignment]
    if len(listed) > MAX_PROMPTS:
        raise invalid(field, f"must have at most {MAX_PROMPTS} entries, got {len(listed)}")
    places = [f"{field}[{index}]" if batched else field for index in range(len(listed))]
    if field == "text":
        return _encode(serving, listed, places), field, batched
    for ids, place in zip(listed, places, strict=True):
        _check_ids(ids, place)
    return listed, field, batched


def _encode(serving: Serving, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
    if not serving.text:
        raise invalid("text", "needs a tokenizer, and this is a tokens-only server: send input_ids", code="tokens_only")
    for text, place in zip(texts, places, strict=True):
        serving.check_text(text, place)
    encoded = serving.tokenizer.encode_each(texts)
    for ids, place in zip(encoded, places, strict=True):
        if not ids:
            raise invalid(place, "must not be empty")
    return encoded


def _check_ids(ids: Any, field: str) -> None:
    if not isinstance(ids, list):
        raise invalid(field, "must be a list of token ids")
    if not ids:
        raise invalid(field, "must not be empty")
    if set(map(type, ids)) != {int}:
        index = next(i for i, token in enumerate(ids) if type(token) is not int)
        raise invalid(f"{field}[{index}]", "must be a token id")


def _each(value: Any, count: int, field: str) -> list[Any]:
    """A value per prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise invalid(field, f"must have an entry per prompt ({count}), got {len(value)}")
    return value


def _one_value(value: Any, field: str) -> str | None:
    """The one value of a field that may be given per prompt, but is the same for all here."""
    if not isinstance(value, list):
        return value or None
    if len(set(value)) > 1:
        raise invalid(field, "must be the same for all prompts of a batch")
    return (value[0] if value else None) or None


def request_id(request_ids: str | list[str] | None, count: int) -> str | None:
    """The one id of a request with so many prompts."""
    if isinstance(request_ids, list):
        if count > 1 or len(request_ids) > 1:
            raise invalid("rid", "must be one string: a batch is one request here")
        return request_ids[0] if request_ids else None
    return request_ids


def _cache_salt(sent: SglangGenerateBody) -> str | None:
    """What separates this request in the prefix cache: both fields do in SGLang."""
    salts = [salt for name in ("cache_salt", "extra_key") if (salt := _one_value(getattr(sent, name), name))]
    return salts[0] if len(salts) == 1 else hashlib.sha256(repr(salts).encode()).hexdigest() if salts else None


def _forms(serving: Serving, sent: SglangGenerateBody, prompts: Sequence[Sequence[int]]) -> list[ReplyForm]:
    count = len(prompts)
    has_masks = sent.return_sampling_mask
    if has_masks is None:
        has_masks = serving.config.model.return_sampling_mask
    has_drafts = serving.config.speculation.per_request_spec_decode_metrics != "none"
    routed = _routed_start(serving, sent, prompts)
    named = _token_ids(sent, count)
    starts = _each(sent.logprob_start_len, count, "logprob_start_len")
    tops = _each(sent.top_logprobs_num, count, "top_logprobs_num")
    forms = []
    for index, has_logprobs in enumerate(_each(sent.return_logprob, count, "return_logprob")):
        start, top = starts[index], tops[index] or 0
        if not has_logprobs:
            forms.append(ReplyForm(False, None, 0, False, has_masks, has_drafts, routed))
            continue
        if start is None or start == -1:
            start = None
        elif not 0 <= start <= len(prompts[index]):
            raise invalid("logprob_start_len", f"must be -1, or at most the prompt's length {len(prompts[index])}")
        if top < 0:
            raise invalid("top_logprobs_num", f"must be at least 0, got {top}")
        if named[index] and start is not None:
            raise invalid("token_ids_logprob", "is served for the output only: logprob_start_len must be -1 with it")
        forms.append(ReplyForm(True, start, top, bool(named[index]), has_masks, has_drafts, routed))
    return forms


def _routed_start(serving: Serving, sent: SglangGenerateBody, prompts: Sequence[Sequence[int]]) -> int | None:
    """The first position whose routed experts are returned; None: they are not."""
    start, most = sent.routed_experts_start_len or 0, min(map(len, prompts))
    if not 0 <= start <= most:
        raise invalid("routed_experts_start_len", f"must be from 0 to the prompt's length {most}")
    if not sent.return_routed_experts:
        return None
    check_routed(serving)
    return start


def check_routed(serving: Serving) -> None:
    """Refuse `return_routed_experts` where the server does not keep them."""
    if not serving.config.model.enable_return_routed_experts:
        errors.refuse_unsupported("return_routed_experts", True, reason="it needs --enable-return-routed-experts")


def _token_ids(sent: SglangGenerateBody, count: int) -> list[list[int] | None]:
    value = sent.token_ids_logprob
    if value and not isinstance(value[0], int):
        lists: list[list[int] | None] = _each(value, count, "token_ids_logprob")
    else:
        lists = [value or None] * count
    for ids in lists:
        if ids is not None:
            _check_ids(ids, "token_ids_logprob")
    return lists


def _task(
    serving: Serving,
    sent: sampling.SglangSamplingParams,
    form: ReplyForm,
    named: list[int] | None,
    prompt: Sequence[int],
    *,
    entropy: bool,
) -> SamplingParams:
    scores = form.start is not None and form.start + 1 < len(prompt)
    computed: dict[str, Any] = {"logprobs_mode": sent.logprobs_mode or "temperature"}
    if form.has_logprobs:
        computed |= {"logprobs": form.top, "logprob_token_ids": named}
    if scores and form.start is not None:
        computed |= {"prompt_logprobs": form.top, "prompt_logprobs_start": form.start + 1}
        if sent.logprobs_mode is None:  # SGLang divides the output's logits by the temperature, and not the prompt's
            computed["prompt_logprobs_mode"] = "raw"
    elif sent.max_new_tokens == 0:  # nothing is wanted of the prompt, but that it is computed
        computed |= {"prompt_logprobs": 0, "prompt_logprobs_start": len(prompt) - 1}
    computed |= {"return_sampling_mask": form.has_masks, "return_entropy": entropy}
    computed["routed_experts_prompt_start"] = form.routed_start or 0
    return sampling.translate(sent, **computed)


def _names(serving: Serving, sent: SglangGenerateBody) -> Any:
    """What names tokens in the triples: their text, if that was requested."""
    if not sent.return_text_in_logprobs:
        return lambda token_id: None
    return serving.tokenizer.token
