"""Chat completions: render the messages to ids, generate, and put the text into OpenAI's shapes.

Nothing is generated here; a chat answer is the token route's answer read through the tokenizer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.client.inputs import GenerateRequest, token_prompt
from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.dialects.openai import schemas, tools
from tokserve.dialects.openai.chat_prompts import (
    THINKING,
    followed_prompt,
    may_render,
    prompt_of,
    returned_message,
    template_effort,
)
from tokserve.dialects.openai.schemas import ChatBody
from tokserve.dialects.openai.tools import OutputParser, ParsedDelta, ResponseFormat, ToolCall, ToolPlan
from tokserve.features.beams.beam_fields import beam_params
from tokserve.features.beams.beam_search import BeamSearchParams
from tokserve.features.beams.beam_stream import search_of
from tokserve.features.chat import thinking_budget
from tokserve.features.chat.conversation_hooks import ConversationTurn
from tokserve.features.chat.output_format import AnswerStart
from tokserve.features.chat.text_context import TextContext
from tokserve.features.grammar import structured
from tokserve.features.speculation.prediction import with_prediction
from tokserve.protocol.logprobs import width_of
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.protocol.prompt import TokenPrompt, unpack_ids
from tokserve.server.generation import CompletionTokensDetails, Generation, ReplyContext, Usage
from tokserve.server.http.body import encode_json
from tokserve.server.replies import fields, logprobs, sse
from tokserve.server.replies.fields import ColumnFields
from tokserve.server.replies.logprobs import NO_ROWS
from tokserve.server.replies.reply_fields import StopDetail, WeightVersion, last_version, versions
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.replies.reply_parts import DeferredParts
from tokserve.server.request_starter import FieldPaths
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

ID_PREFIX = "chatcmpl-"
SWITCHES = ("enable_thinking", "thinking")  # variables that are false where no reasoning is wanted


class Message(msgspec.Struct):
    """The assistant's turn.  `content` is null if there is none beside reasoning or calls.  Reasoning comes under both
    names that clients read."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(ColumnFields):
    """A choice of a whole answer.  Here and in the answer, ids and scores that were not requested are null.
    `meta_info`, `prompt_token_ids`, `matched_stop`: in SGLang's dialect."""

    index: int
    message: Message
    logprobs: logprobs.ChatLogprobs | Raw | None
    finish_reason: str | None
    stop_reason: int | str | list[int] | None
    stop_detail: StopDetail
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    meta_info: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    matched_stop: int | str | list[int] | UnsetType | None = UNSET


class ChatReply(msgspec.Struct):
    """The whole reply."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Any = None
    weight_version: str | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    metrics: ReplyMetrics | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    metadata: dict[str, Any] | UnsetType = UNSET
    object: str = "chat.completion"


class Delta(msgspec.Struct):
    """What a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(ColumnFields):
    """A choice of a chunk."""

    index: int
    delta: Delta
    logprobs: logprobs.ChatLogprobs | Raw | None = None
    finish_reason: str | None = None
    stop_reason: int | str | list[int] | UnsetType | None = UNSET
    stop_detail: StopDetail | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    matched_stop: int | str | list[int] | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct):
    """An event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: Any = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET  # in the last one


async def chat(serving: Serving, request: Request) -> Response:
    """POST /v1/chat/completions: a chat completion"""
    return await respond(await read_chat(serving, request))


async def chat_tokens(serving: Serving, request: Request) -> Response:
    """POST /v1/chat/completions/tokens: a chat completion from the prompt's ids; messages are not rendered"""
    return await respond(await read_chat(serving, request, prompt="tokens"))


class ChatCall(NamedTuple):
    """A chat body, read: what is to be generated."""

    route: RouteCall[ChatBody]
    params: SamplingParams
    generate: GenerateRequest
    prompt: TokenPrompt
    fields: FieldPaths
    plan: ToolPlan
    start: AnswerStart
    beams: BeamSearchParams | None
    turn: ConversationTurn | None = None

    @property
    def ids(self) -> list[int]:
        """The prompt's, those of images included."""
        return unpack_ids(self.prompt.ids)


async def respond(call: ChatCall, renderer: type[ChatRenderer] | None = None) -> Response:
    """Generate, and answer with what `renderer` makes of it; None: chat's own."""
    serving, request = call.route.serving, call.route.request
    generation = await serving.requests.start(
        request, call.generate, [call.prompt], call.fields, search=search_of(call.beams)
    )
    follow(generation, call)
    answers = reader_of(serving, call.plan, generation, call.params, call.start)
    render = (renderer or ChatRenderer)(serving, generation, call.route.body, call.params, answers)
    return await sse.respond(generation, request, render, call.route.headers)


def follow(generation: Generation, call: ChatCall) -> None:
    """Have the turn of a conversation that a room follows take part in the output.  Called once, before any of it."""
    if call.turn is None:
        return

    def message(choice: ChoiceOutput) -> dict[str, Any]:
        answers = reader_of(call.route.serving, call.plan, generation, call.params, call.start)
        return returned_message(choice, answers)

    call.turn.attach(generation, message)


async def read_chat(serving: Serving, request: Request, *, prompt: str = "messages", replies: bool = True) -> ChatCall:
    """The body with its messages as ids.  `prompt`: the field with the prompt, `messages` or one with ids.  `replies`
    False: what comes back is no chat reply, and may be msgpack."""
    route = await schemas.read_body(serving, request, ChatBody)
    schemas.check_stream(route.body, replies and route.wants_msgpack)
    return await call_of(route, prompt, replies=replies)


async def call_of(route: RouteCall[ChatBody], source: str = "messages", *, replies: bool = True) -> ChatCall:
    """What a body that has passed `schemas.parse` comes to.  `source`: the field with the prompt; `replies`: as of
    `read_chat`."""
    serving, body, ignored = route.serving, route.body, route.ignored
    serving.requests.check_generates()
    serving.requests.name_request(route.request, body, is_sent=replies)

    def plan_and_params() -> tuple[ToolPlan, SamplingParams]:
        plan = tool_plan(serving, body)
        return plan, thinking_budget.with_markers(serving, sampling_params(serving, body, plan))

    plan, params = await route.run(plan_and_params)
    bare = serving.requests.request_of(route.request, body, params)
    generate = await route.run(lambda: with_prediction(serving, body, bare))
    turn: ConversationTurn | None = None
    if source != "messages":
        ids = getattr(body, source)
        if ids is None:
            raise RequestError(f"{source} is required", field=source)
        prompt = token_prompt(ids, serving.llm.ready.vocab_size)
    else:
        if body.tokens is not None:
            raise RequestError("tokens belongs to /v1/chat/completions/tokens", field="tokens")
        has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        if replies and beam_params(body, params) is None:
            prompt, turn = await followed_prompt(route, keeps_logprobs=has_logprobs)
        else:
            prompt = await prompt_of(route, body.reasoning_effort)
    template = serving.state_of(TextContext).template
    for field, variables in _template_fields(body):
        reads = (template.reads(name, body.chat_template, bool(body.tools)) for name in variables)
        if source != "messages" or not any(reads):
            if serving.config.server.strict:
                raise RequestError(f"{field}: has no effect on this prompt", field=field)
            ignored.append(field)
    start = AnswerStart()
    if plan.thinking is not None:
        start, form = await route.run(lambda: _beginning(serving, body, plan, unpack_ids(prompt.ids)))
        params = plan.with_stops_after(msgspec.structs.replace(params, structured_outputs=form), start)
        params = thinking_budget.beginning(params, inside=start.inside)
        generate = msgspec.structs.replace(generate, task=params)
    if turn is not None:
        generate = of_turn(generate, params, turn)
        route = route.replaced(body, [name for name in ignored if name != "session_id"])
    others = {"logprobs": "top_logprobs", "extra_args": "vllm_xargs"}
    others["max_tokens"], others["beam_width"] = schemas.output_limit(body)[1], "n"
    fields = _fields(plan.form_field, source, **others)
    return ChatCall(route, params, generate, prompt, fields, plan, start, beam_params(body, params), turn)


def of_turn(generate: GenerateRequest, params: SamplingParams, turn: ConversationTurn) -> GenerateRequest:
    """The request of a turn that a room follows: with the logprobs of its tokens, on the conversation's engine."""
    if params.logprobs is None and not params.logprob_token_ids:
        params = msgspec.structs.replace(params, logprobs=0)
    options = msgspec.structs.replace(generate.options, session=turn.cache_key)
    if options.data_parallel_rank is None and turn.rank is not None:
        options = msgspec.structs.replace(options, data_parallel_rank=turn.rank)
    return msgspec.structs.replace(generate, task=params, options=options)


def _template_fields(body: ChatBody) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fields of a body that only some templates read, with the variables that they set."""
    if body.reasoning_effort not in (None, "none"):
        yield "reasoning_effort", THINKING
    if body.documents:
        yield "documents", ("documents",)


def _fields(source: str | None, prompt: str = "messages", **others: str) -> FieldPaths:
    """How errors name what a chat body says.  `source`: a plan's."""
    form = {} if source is None else {"structured_outputs": source}
    return FieldPaths(prompt, others=others | form)


def tool_plan(serving: Serving, body: ChatBody) -> ToolPlan:
    text = serving.state_of(TextContext)
    off = serving.config.server.enable_auto_tool_choice is False
    return tools.make_plan(
        body.tools,
        body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        max_calls=body.max_tool_calls,
        response_format=_shape(serving, body),
        form=text.tool_format,
        no_form=tools.SWITCHED_OFF if off else tools.NO_FORMAT,
        thinking=text.thinking if body.separates_reasoning else None,
        tokenizer=serving.tokenizer,
    )


def _shape(serving: Serving, body: ChatBody) -> ResponseFormat | None:
    form = structured.requested_format(body.structured_outputs, body.response_format, serving.form_defaults)
    if form is None:
        return None
    shape = ResponseFormat(form, "response_format" if body.structured_outputs is None else "structured_outputs")
    try:
        form.validate()
    except RequestError as error:
        raise _fields(shape.source).rename(error) from None
    return shape


def answer_start(serving: Serving, body: ChatBody, plan: ToolPlan, prompt: Sequence[int]) -> AnswerStart:
    """Where the answers to a prompt begin."""
    template = body.chat_template
    if template is not None and not may_render(serving, template):
        template = None
    return plan.answer_start(
        serving.tokenizer, prompt, serving.state_of(TextContext).template.before_answer(template, bool(body.tools))
    )


def _beginning(
    serving: Serving, body: ChatBody, plan: ToolPlan, prompt: Sequence[int]
) -> tuple[AnswerStart, StructuredOutputs | None]:
    """Where the answers to a prompt begin, and the form that they have from there on."""
    start = answer_start(serving, body, plan, prompt)
    variables = dict(serving.config.server.default_chat_template_kwargs or {}) | template_effort(body.reasoning_effort)
    variables |= body.chat_template_kwargs or {}
    may_think = not body.continue_final_message and all(variables.get(name) is not False for name in SWITCHES)
    return start, plan.from_start(serving.tokenizer, prompt, start, may_think=may_think)


def reader_of(
    serving: Serving, plan: ToolPlan, reply: ReplyContext, params: SamplingParams, start: AnswerStart
) -> OutputParser | None:
    """Who reads the answers, if they are more than content.  `start`: where they begin."""
    if plan.output_format is None:
        return None
    pieces = serving.tokenizer.pieces(params.skip_special_tokens)
    return OutputParser(plan.output_format, tools.call_key(reply), start, pieces)


def sampling_params(serving: Serving, body: ChatBody, plan: ToolPlan) -> SamplingParams:
    """What the body asks for, with the model's recommended defaults."""
    top = body.top_logprobs
    if top is not None and not body.logprobs and top != 0:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    limit, _ = schemas.output_limit(body)
    num_logprobs = (top or 0) if body.logprobs else None
    more = plan.params(serving.tokenizer)
    return schemas.sampling(body, serving.model.defaults, max_tokens=limit, logprobs=num_logprobs, **more)


def message_of(c: ChoiceOutput, reader: OutputParser | None, *, shows_reasoning: bool) -> Message:
    """The message of a whole choice; `reader` None: its text is the content."""
    if reader is None:
        return Message("assistant", c.text or "")
    read = reader.read(c)
    for call in read.calls:
        call.index = UNSET
    alone = not (read.reasoning or read.calls)
    content = read.content if alone else read.content or None
    reasoning = read.reasoning if shows_reasoning else ""
    return Message("assistant", content, None, reasoning or None, reasoning or UNSET, read.calls or UNSET)


class ChatRenderer:
    """Completions as chat's JSON.  `reader` None: their text is the content."""

    def __init__(
        self,
        serving: Serving,
        generation: ReplyContext,
        body: ChatBody,
        params: SamplingParams,
        reader: OutputParser | None,
    ) -> None:
        self._id = ID_PREFIX + generation.key
        self._created = int(time.time())
        self._model = serving.model.answers_as(body.model)
        self.generation, self.body = generation, body
        self.reader = reader
        self._shows_reasoning = body.include_reasoning is not False
        self._spelling = logprobs.Spelling(serving.tokenizer, schemas.shows_ids(serving, body))
        self._texts = serving.tokenizer.token_texts
        self._ids = bool(body.return_token_ids)
        self._versions = self._ids or bool(body.return_weight_versions)
        self._params = params
        self._usage, self._continuous = schemas.usage_options(serving, body)
        self._begun: set[int] = set()
        self._has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        self._columns = serving.model.columns_of(params)
        self._scores_due = params.prompt_logprobs is not None

    def reply(self, completions: list[ChoiceOutput], parts: DeferredParts | None = None) -> ChatReply:
        scores: Any = None
        if self._scores_due:
            columns = next((c.prompt_logprobs for c in completions if c.prompt_logprobs), None)
            scores = self._prompt_logprobs(columns, parts)
        choices = [
            ChatChoice(
                c.index,
                message_of(c, self.reader, shows_reasoning=self._shows_reasoning),
                self._logprobs(c, parts),
                self._finish_reason(c),
                c.stop_reason,
                StopDetail(c.stop_detail, c.message),
                c.token_ids if self._ids else None,
                versions(c) if self._versions else UNSET,
            )
            for c in completions
        ]
        for choice, completion in zip(choices, completions, strict=True):
            fields.write_tokens(choice, completion, self._columns, "lists", parts)
            fields.write_end(choice, completion, self._columns, "lists")
        generation = self.generation
        reply = ChatReply(self._id, self._created, self._model, choices, self.usage(), prompt_logprobs=scores)
        reply.system_fingerprint, reply.metrics = generation.fingerprint, generation.metrics()
        if generation.kv_transfer_params is not None:
            reply.kv_transfer_params = generation.kv_transfer_params
        if self._ids:
            reply.prompt_token_ids, reply.weight_version = generation.prompt_ids(), last_version(completions)
        return reply

    def usage(self, later_tokens: int = 0) -> Usage:
        """Tokens so far, with those of reasoning if that is returned separately; without `later_tokens`, which come in
        later chunks."""
        usage = self.generation.usage(later_tokens)
        count = UNSET if self.reader is None else self.reader.reasoning_tokens()
        if count is not UNSET:
            usage.completion_tokens_details = usage.completion_tokens_details or CompletionTokensDetails()
            usage.completion_tokens_details.reasoning_tokens = count
        return usage

    def reasoning(self, read: ParsedDelta, index: int, *, is_last: bool) -> str | UnsetType:
        """The reasoning of a parsed delta of a choice that is shown with it; UNSET: none."""
        return read.reasoning or UNSET if self._shows_reasoning else UNSET

    def _finish_reason(self, c: ChoiceOutput) -> str | None:
        return c.finish_reason if self.reader is None else self.reader.finish_reason(c)

    def _logprobs(self, c: ChoiceOutput, parts: DeferredParts | None = None) -> logprobs.ChatLogprobs | Raw | None:
        if not self._has_logprobs:
            return None
        args = (c.logprobs or NO_ROWS, c.token_ids, self._spelling)
        return logprobs.content(*args) if parts is None else parts.defer(logprobs.content_encoder(*args))

    def _prompt_logprobs(self, columns: Column | None, parts: DeferredParts | None = None) -> Any:
        first = max(1, self._params.prompt_logprobs_start)
        columns = columns or NO_ROWS
        args = (columns, self.generation.prompt_ids(), first, width_of(columns), self._texts)
        return logprobs.prompt_objects(*args) if parts is None else parts.defer(logprobs.prompt_objects_encoder(*args))

    def delta(self, delta: ChoiceOutput) -> bytes:
        """The events of a delta: the role before a choice's first, its end in one of its own."""
        events = b""
        if delta.index not in self._begun:
            events += self._role(delta)
        added = self._added(delta)
        by_token = self._ids or self._columns or delta.logprobs
        choice = None
        if added.content or added.reasoning or added.tool_calls or (delta.token_ids and by_token):
            choice = ChunkChoice(delta.index, added, self._logprobs(delta))
            if self._ids:
                choice.token_ids = delta.token_ids
            fields.write_tokens(choice, delta, self._columns, "lists")
            if delta.finish_reason is None or not self._continuous:
                events += sse.event(encode_json(self._chunk(choice)))
        if delta.finish_reason is not None:
            # with usage in each chunk, one has both the last tokens and the end: no two chunks count the same tokens
            choice = choice if choice is not None and self._continuous else ChunkChoice(delta.index, Delta())
            events += sse.event(encode_json(self._last_chunk(choice, delta)))
        return events

    def _added(self, delta: ChoiceOutput) -> Delta:
        if self.reader is None:
            return Delta(content=delta.text or "")
        read = self.reader.read(delta)
        thought = self.reasoning(read, delta.index, is_last=delta.finish_reason is not None)
        return Delta(UNSET, read.content or UNSET, thought, thought, read.calls or UNSET)

    def skip(self, delta: ChoiceOutput) -> None:
        """Read a delta that was shown already."""
        self._begun.add(delta.index)
        self._added(delta)

    def empty_chunk(self) -> ChatChunk:
        """A chunk without choices."""
        return ChatChunk(self._id, self._created, self._model, [])

    def joined_chunk(self, delta: ChoiceOutput) -> ChatChunk:
        """One chunk with all that the events of a delta have: the role before a choice's first, and its end."""
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        added = self._added(delta)
        if is_first:
            added.role = "assistant"
        choice = ChunkChoice(delta.index, added, self._logprobs(delta))
        if self._ids:
            choice.token_ids = delta.token_ids
        chunk = self._chunk(choice) if delta.finish_reason is None else self._last_chunk(choice, delta)
        if is_first and self._ids:
            chunk.prompt_token_ids = self.generation.prompt_ids()
        return chunk

    def _last_chunk(self, choice: ChunkChoice, delta: ChoiceOutput) -> ChatChunk:
        """The chunk with a choice's end."""
        self.end(choice, delta)
        choice.stop_detail = StopDetail(delta.stop_detail, delta.message)
        if self._versions:
            choice.weight_versions = versions(delta)
        fields.write_end(choice, delta, self._columns, "lists")
        chunk = self._chunk(choice)
        chunk.system_fingerprint = self.generation.fingerprint
        if "kv_transfer" in delta.values:
            chunk.kv_transfer_params = delta.values["kv_transfer"]
        return chunk

    def end(self, choice: ChunkChoice, delta: ChoiceOutput) -> None:
        """Say in the chunk's choice why it ended, with its last `delta`."""
        choice.finish_reason, choice.stop_reason = self._finish_reason(delta), delta.stop_reason

    def _role(self, delta: ChoiceOutput) -> bytes:
        """The first chunk of a choice: the delta's tokens come after it."""
        chunk = self._chunk(ChunkChoice(delta.index, Delta("assistant", "")), later_tokens=len(delta.token_ids))
        if self._ids and not self._begun:
            chunk.prompt_token_ids = self.generation.prompt_ids()
        if self._scores_due and delta.prompt_logprobs:
            self._scores_due = False
            chunk.prompt_logprobs = self._prompt_logprobs(delta.prompt_logprobs)
        self._begun.add(delta.index)
        return sse.event(encode_json(chunk))

    def _chunk(self, choice: ChunkChoice, later_tokens: int = 0) -> ChatChunk:
        """`later_tokens`: those of the output so far that come in later chunks."""
        chunk = ChatChunk(self._id, self._created, self._model, [choice])
        if self._usage:
            chunk.usage = self.usage(later_tokens) if self._continuous else None
        return chunk

    def tail(self) -> bytes:
        if not self._usage:
            return b""
        chunk = ChatChunk(self._id, self._created, self._model, [])
        chunk.usage, chunk.metrics = self.usage(), self.generation.metrics()
        return sse.event(encode_json(chunk))
