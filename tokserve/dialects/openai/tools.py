"""The plan for a chat with tools: the grammar that constrains its output, and the format in which it is parsed.

Follows from the body's tools and tool_choice and the server's options.  The formats are in
`features.chat.tool_formats`, the grammars of calls in `features.chat.tool_grammars`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.base.errors import LONGEST_SHOWN, RequestError, invalid
from tokserve.client.outputs import ChoiceOutput
from tokserve.features.chat import open_turn, tool_grammars
from tokserve.features.chat.grammars.reasoning import after_reasoning
from tokserve.features.chat.output_format import AnswerStart, OutputFormat, Thinking, ToolFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.token_segments import SegmentReader, TokenSegment
from tokserve.features.chat.tool_formats import FORCED, TOOL_FORMATS
from tokserve.features.chat.tool_grammars import Functions
from tokserve.protocol import jsonschema
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.protocol.reduced_schema import SchemaError, reduced
from tokserve.server.generation import ReplyContext
from tokserve.server.replies.logprobs import TextOffset
from tokserve.text.tokenizer import Pieces, Tokenizer

ANY: dict[str, Any] = {"additionalProperties": True}  # the arguments of a function that is not strict
MODES = ("none", "auto", "required")
DEFAULT_CALLS = 16  # limit where a grammar demands a list of calls: a weak model would not end the list
MAX_CALLS = 128
TAIL = 16  # tokens at the end of a prompt that may have the end of a thought
ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
NO_FORMAT = (
    "this server does not know how this model writes tool calls: start it with --chat-template FILE, a template that "
    f"shows tools and calls as one of these formats does: {', '.join(form.name for form in TOOL_FORMATS)} (or, if the "
    "model's own template shows tools, name the format with --tool-call-parser); or force a call with tool_choice "
    '"required" or a named function'
)
ALLOWED_TOOLS = "tool_choice.allowed_tools"
NESTED = 'in chat, name, description and parameters are in "function" (/v1/responses has them beside "type")'
SWITCHED_OFF = (
    "this server does not read tool calls out of answers (--no-enable-auto-tool-choice); force a call with tool_choice "
    '"required" or a named function'
)


class Function(msgspec.Struct):
    """The called function and its arguments; in a delta, a piece of them."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call.  In deltas it has an `index`, and only its first delta has `id`, `type` and the name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ResponseFormat(NamedTuple):
    """The form that a body demands of the answer's text, and the field that demands it."""

    structured_outputs: StructuredOutputs
    field: str

    @property
    def source(self) -> str | None:
        """The field that errors name; None: the part of structured_outputs at fault."""
        return None if self.field == "structured_outputs" else self.field


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How the output of a chat is constrained and parsed.

    `output_format` None: the whole text is content.  `structured_outputs`: the form of the output; `source`: the field
    that errors about the form name, None: the part of structured_outputs at fault.
    """

    output_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    source: str | None = None

    @property
    def thinking(self) -> Thinking | None:
        """The reasoning that the output may have."""
        return self.output_format.thinking if self.output_format else None

    def from_start(
        self, tokenizer: Tokenizer, prompt: Sequence[int], start: AnswerStart, *, may_think: bool
    ) -> StructuredOutputs | None:
        """The form of the whole output, which begins with the reasoning where it is begun, or may begin.  `may_think`:
        the request does not say that there is none."""
        form, thinking = self.structured_outputs, self.thinking
        if form is None or thinking is None:
            return form
        if thinking.channels:
            assert self.output_format is not None
            if self.output_format.tools is None or not start.inside:
                return (
                    form
                    if self.output_format.tools
                    else after_reasoning(form, thinking, tokenizer, inside=start.inside)
                )
            return tool_grammars.within_thought(form, tokenizer)
        over = tokenizer.decode(prompt[-TAIL:], False).rstrip().endswith(thinking.closes)
        if not start.inside and (over or not may_think):
            return form
        return after_reasoning(form, thinking, tokenizer, inside=start.inside)

    @property
    def form_field(self) -> str | None:
        """The field that errors about the form name, also if it has become another."""
        if self.source is None and self.structured_outputs is not None and self.thinking is not None:
            return f"structured_outputs.{self.structured_outputs.kind}"
        return self.source

    def params(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The sampling parameters of the plan; special tokens stay in the text if they are markers."""
        ids = map(tokenizer.id_of, self.output_format.markers() if self.output_format else ())
        visible = {} if tokenizer.special_ids.isdisjoint(ids) else {"skip_special_tokens": False}
        return {"structured_outputs": self.structured_outputs} | visible

    def with_stops_after(self, params: SamplingParams, start: AnswerStart) -> SamplingParams:
        """The parameters whose stop strings do not count in reasoning that is told apart.  `start`: of the output."""
        thinking = self.thinking
        if thinking is None or not params.stop_strings() or params.stop_after:
            return params
        markers = ["" if start.inside else thinking.opens, thinking.closes]
        return msgspec.structs.replace(params, stop_after=markers)

    def answer_start(self, tokenizer: Tokenizer, prompt: Sequence[int], before_answer: str | None) -> AnswerStart:
        """Where the output begins.  `before_answer`: what the template writes between a question and its answer."""
        if self.thinking is None:
            return AnswerStart()
        return open_turn.answer_start(self.thinking, tokenizer, prompt, before_answer)


PLAIN_TEXT = ToolPlan()


class ToolChoice(NamedTuple):
    """What a tool_choice asks for.  `mode`: one of MODES, or "named" with the `name` of a function.  `allowed`: the
    functions that may be called; None: all of them."""

    mode: str
    name: str | None = None
    allowed: tuple[str, ...] | None = None


def check_tools(tools: list[dict[str, Any]] | None, choice: Any) -> None:
    """Refuse invalid tools and an invalid tool_choice.  `choice`: the body's tool_choice."""
    check_functions(tools or [])
    mode, name, allowed = _parse_choice(choice)
    if not tools and (mode == "required" or name is not None):
        raise RequestError("tool_choice: there are no tools to choose from", field="tool_choice")
    names = [tool["function"]["name"] for tool in tools or []]
    if name is not None and name not in names:
        raise RequestError(f"tool_choice: {name[:LONGEST_SHOWN]!r} is not one of the tools", field="tool_choice")
    for i, allowed_name in enumerate(allowed or ()):
        if allowed_name not in names:
            field = f"{ALLOWED_TOOLS}.tools[{i}].function.name"
            raise RequestError(f"{field}: {allowed_name[:LONGEST_SHOWN]!r} is not one of the tools", field=field)


def check_functions(tools: list[dict[str, Any]]) -> None:
    """Refuse tools that are not functions with distinct names and with object schemas as parameters."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise invalid(f"tools[{i}].type", "must be 'function'")
        function = tool.get("function")
        if function is None and "name" in tool:
            raise invalid(f"tools[{i}].function", f"is required: {NESTED}")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{i}].function.name", "must be a string that is not empty")
        if not isinstance(function.get("strict"), bool | None):
            raise invalid(f"tools[{i}].function.strict", "must be true or false")
        if function["name"] in names:
            field = f"tools[{i}].function.name"
            raise RequestError(f"{field}: two tools have the name {function['name'][:LONGEST_SHOWN]!r}", field=field)
        names.add(function["name"])
        parameters, field = function.get("parameters"), f"tools[{i}].function.parameters"
        if not isinstance(parameters, dict | None):
            raise invalid(field, "must be a JSON schema, an object")
        if parameters is not None and parameters.get("type", "object") != "object":
            raise invalid(f"{field}.type", "must be 'object': arguments have names")


def _parse_choice(choice: Any) -> ToolChoice:
    if choice is None:
        return ToolChoice("auto")
    if isinstance(choice, str):
        if choice not in MODES:
            raise invalid("tool_choice", f"must be one of {', '.join(MODES)} or name a function")
        return ToolChoice(choice)
    if not isinstance(choice, dict):
        raise invalid("tool_choice", "must be a string or an object")
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _parse_allowed(choice.get("allowed_tools"))
    if kind != "function":
        if not isinstance(kind, str):
            raise invalid("tool_choice.type", "must be 'function' or 'allowed_tools'")
        raise invalid(
            "tool_choice",
            f"of type {kind[:LONGEST_SHOWN]!r} is not supported by this server: send none, auto, "
            "required, allowed_tools, or name one function",
            code="unsupported",
        )
    return ToolChoice("named", _chosen_name("tool_choice", choice))


def _parse_allowed(allowed: Any) -> ToolChoice:
    """The choice among some of the tools: `mode` is auto or required, `tools` names functions."""
    if not isinstance(allowed, dict):
        raise invalid(ALLOWED_TOOLS, "must be an object with mode and tools")
    mode, entries = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"{ALLOWED_TOOLS}.mode", "must be 'auto' or 'required'")
    if not isinstance(entries, list) or not entries:
        raise invalid(f"{ALLOWED_TOOLS}.tools", "must be a list of functions that is not empty")
    names = []
    for i, entry in enumerate(entries):
        field = f"{ALLOWED_TOOLS}.tools[{i}]"
        if not isinstance(entry, dict) or entry.get("type") != "function":
            raise invalid(f"{field}.type", "must be 'function'")
        names.append(_chosen_name(field, entry))
    return ToolChoice(mode, allowed=tuple(names))


def _chosen_name(field: str, choice: dict[str, Any]) -> str:
    """The name of the function that `choice`, at `field`, refers to."""
    function = choice.get("function")
    if function is None and "name" in choice:
        raise invalid(f"{field}.function", f"is required: {NESTED}")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{field}.function.name", "must be a string")
    return str(function["name"])


def is_free(choice: Any) -> bool:
    """Whether the model decides about calls: then the prompt must show the tools."""
    return _parse_choice(choice).mode == "auto"


def make_plan(
    tools: list[dict[str, Any]] | None,
    choice: Any,
    *,
    parallel: bool,
    max_calls: int | None = None,
    response_format: ResponseFormat | None,
    form: ToolFormat | None,
    no_form: str = NO_FORMAT,
    thinking: Thinking | None,
    tokenizer: Tokenizer,
) -> ToolPlan:
    """The plan for a body that has passed `check`.

    `max_calls` None: no limit, or `DEFAULT_CALLS` where a grammar demands calls; without `parallel` it is 1.
    `response_format`: of an answer without calls.  `form`: the server's tool format, `no_form`: the message if it has
    none.  Raises RequestError.
    """
    if max_calls is not None and not 1 <= max_calls <= MAX_CALLS:
        raise invalid("max_tool_calls", f"must be from 1 to {MAX_CALLS}, got {max_calls}")
    max_calls = max_calls if parallel else 1
    mode, name, allowed = _parse_choice(choice)
    if not tools or mode == "none":
        output_format = None if thinking is None else OutputFormat(thinking=thinking)
        if response_format is None:
            return ToolPlan(output_format)
        return ToolPlan(output_format, response_format.structured_outputs, response_format.source)
    callable_names = {tool["function"]["name"] for tool in tools} if allowed is None else set(allowed)
    callable_tools = [tool["function"] for tool in tools if tool["function"]["name"] in callable_names]
    functions = {function["name"]: function.get("parameters") or {} for function in callable_tools}
    strict = {function["name"] for function in callable_tools if function.get("strict") is True}
    try:
        if name is not None or mode == "required":
            forced = {name: functions[name]} if name is not None else functions
            schemas = _schemas(tools, forced, strict)
            limit = 1 if name is not None else max_calls or DEFAULT_CALLS
            output_format = OutputFormat(form, thinking, functions, max_calls=max_calls, exact=True, chosen=name)
            return _forced(output_format, schemas, tokenizer, limit)
        if form is None:
            field = "tools" if choice is None else "tool_choice"
            raise RequestError(f"{field}: {no_form}", field=field, code="unsupported")
        limited = len(functions) < len(tools)
        structured = _constraint(response_format, form, tools, [*functions], strict, limited, tokenizer, max_calls)
        output_format = OutputFormat(form, thinking, functions, max_calls=max_calls, exact=structured is not None)
        return ToolPlan(output_format, structured, "tools" if response_format is None else response_format.field)
    except RecursionError:
        raise invalid("tools", "are nested too deeply") from None


def _forced(output_format: OutputFormat, schemas: Functions, tokenizer: Tokenizer, max_calls: int) -> ToolPlan:
    """The plan of calls that tool_choice forces: in the model's format, or else in one that is JSON for all models.
    `output_format`: as it is for the former."""
    form, thinking, name = output_format.tools, output_format.thinking, output_format.chosen
    if form is not None and not form.is_json:
        try:
            calls = tool_grammars.forced_calls(form, schemas, tokenizer, max_calls=max_calls)
            return ToolPlan(output_format, calls, "tools")
        except tool_grammars.NotExpressible as error:
            if form.body == "channels":
                words = f"tools cannot be put in a grammar, as {form.name} writes calls: {error}"
                raise RequestError(words, field="tools", code="unsupported") from None
    if thinking is not None and thinking.channels:  # whose calls are messages
        thinking = None
    if name is not None:
        arguments = replace(output_format, tools=None, thinking=thinking, named=name, max_calls=None)
        return ToolPlan(arguments, tool_grammars.arguments(schemas[name]), "tools")
    listed = replace(output_format, tools=FORCED, thinking=thinking)
    return ToolPlan(listed, tool_grammars.list_of_calls(schemas, max_calls=max_calls), "tools")


def _constraint(
    response_format: ResponseFormat | None,
    form: ToolFormat,
    tools: list[dict[str, Any]],
    names: Collection[str],
    strict: Collection[str],
    limited: bool,
    tokenizer: Tokenizer,
    max_calls: int | None,
) -> StructuredOutputs | None:
    """The structured outputs of an answer that may contain calls.  `names`: the functions that may be called, `strict`:
    those of them that are strict; `limited`: there are tools that may not be called."""
    try:
        if response_format is not None:
            functions = _schemas(tools, names, strict)
            return tool_grammars.answer_or_calls(
                response_format.structured_outputs, form, functions, tokenizer, max_calls=max_calls or DEFAULT_CALLS
            )
        if not (strict or limited) or form.bare:  # where a bare call begins is ambiguous
            return None
        schemas = {**dict.fromkeys(names, ANY), **_schemas(tools, strict, strict)}
        return tool_grammars.text_or_calls(form, schemas, tokenizer, parallel=max_calls != 1)
    except tool_grammars.NotExpressible as error:
        field = "tools" if response_format is None else response_format.field
        what = f"{field} and tools"
        if response_format is None:
            field, what = ("tool_choice", "tool_choice: some tools") if limited else (field, "tools: strict functions")
        words = f"{what} cannot be put in a grammar, as {form.name} writes calls: {error}"
        raise RequestError(words, field=field, code="unsupported") from None


def _schemas(tools: list[dict[str, Any]], names: Collection[str], strict: Collection[str]) -> Functions:
    """The schemas of these functions' arguments, as a grammar needs them; those of strict ones have closed objects."""
    schemas = {}
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name not in names:
            continue
        try:
            schemas[name] = reduced(tool["function"].get("parameters") or {})
        except SchemaError as error:
            raise invalid(f"tools[{index}].function.parameters", str(error)) from None
        if name in strict:
            jsonschema.close(schemas[name])
    return schemas


class ParsedDelta(msgspec.Struct):
    """A delta or a whole answer, parsed."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def call_key(reply: ReplyContext) -> str:
    """What the ids of a reply's calls are made from: the request's id, and the prompt's length, which differs between
    the turns of a conversation whose requests have one id."""
    return f"{reply.key}-{reply.usage().prompt_tokens}"


def call_id(key: str, index: int, call_index: int) -> str:
    """The id of a call: nine letters, as Mistral's templates demand, from the `call_key` and the position only."""
    digest = hashlib.sha256(f"{key}-{index}-{call_index}".encode()).digest()
    return "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in digest[:9])


class OutputParser:
    """Parses the choices of one reply.  `key`: that of the ids of calls.  `pieces`: what tokens add to the text."""

    def __init__(self, output_format: OutputFormat, key: str, start: AnswerStart, pieces: Pieces) -> None:
        self._format = output_format
        self._key = key
        self._start = start
        self._pieces = pieces
        self._readers: dict[int, SegmentReader] = {}
        self._parsers: dict[int, Parser] = {}

    def read(self, completion: ChoiceOutput) -> ParsedDelta:
        index = completion.index
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = Parser(self._format, self._start)
            offset = None if self._format.thinking is None else TextOffset(self._pieces)
            self._readers[index] = SegmentReader(parser, offset)
        call_index = parser.num_calls - 1
        texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[tuple[ToolCall, list[str]]] = []
        for kind, text, *_ in self._segments(completion):
            if kind == "call":
                call_index += 1
                name = Function(text)
                new_id = parser.call_ids[call_index] or call_id(self._key, index, call_index)
                calls.append((ToolCall(index=call_index, id=new_id, type="function", function=name), []))
            elif kind == "arguments":
                if not calls:
                    calls.append((ToolCall(index=call_index, function=Function()), []))
                calls[-1][1].append(text)
            else:
                texts[kind].append(text)
        for call, arguments in calls:
            call.function.arguments = "".join(arguments)
        return ParsedDelta("".join(texts["content"]), "".join(texts["reasoning"]), [call for call, _ in calls])

    def _segments(self, completion: ChoiceOutput) -> Iterator[TokenSegment]:
        reader, is_last = self._readers[completion.index], completion.finish_reason is not None
        yield from reader.read(completion.text or "", completion.token_ids, None, final=is_last)
        if is_last:
            yield from reader.finish()

    def reasoning_tokens(self, index: int | None = None) -> int | UnsetType:
        """The tokens of reasoning so far, of a choice or (None) of all; UNSET if reasoning is not told apart."""
        if self._format.thinking is None:
            return UNSET
        readers = self._readers if index is None else {index} & self._readers.keys()
        return sum(self._readers[number].reasoning_tokens for number in readers)

    def finish_reason(self, completion: ChoiceOutput) -> str | None:
        """The finish reason: "tool_calls" if the choice stopped by itself, its calls are complete, and tool_choice did
        not name the function."""
        parser = self._parsers[completion.index]
        calls = completion.finish_reason == "stop" and parser.complete and self._format.chosen is None
        return "tool_calls" if calls else completion.finish_reason
