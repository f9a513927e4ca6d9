"""What a chat body's tools, its tool_choice and the server's options come to: how an answer is forced, and how read.

How formats look is `text.formats`' business, what a forced call looks like `text.forced`'s, and what the engine can
force `engine.grammar`'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokserve import jsonschema
from tokserve.client.outputs import ChoiceOutput
from tokserve.errors import RequestError
from tokserve.params import StructuredOutputs
from tokserve.server import errors
from tokserve.text import tool_grammars as forcing
from tokserve.text.parsing import OutputFormat, Parser, Thinking, ToolFormat
from tokserve.text.tokenizer import Tokenizer
from tokserve.text.tool_formats import FORCED, TOOL_FORMATS
from tokserve.text.tool_grammars import Functions

ANY: dict[str, Any] = {"additionalProperties": True}  # the arguments of a function that is not strict
MODES = ("none", "auto", "required")
DEFAULT_CALLS = 16  # most calls of an output that a grammar makes consist of calls: a weak model does not end the list
MAX_CALLS = 128
TAIL = 16  # tokens of a prompt that a marker at its end is sought in
ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
NO_FORMAT = (
    "this server does not know how this model writes tool calls: start it with --chat-template FILE, a template that "
    f"shows tools and calls as one of these formats does: {', '.join(form.name for form in TOOL_FORMATS)} (or, if the "
    "model's own template shows tools, name the format with --tool-call-parser); or force a call with tool_choice "
    '"required" or a named function'
)
SWITCHED_OFF = (
    "this server does not read tool calls out of answers (--no-enable-auto-tool-choice); force a call with tool_choice "
    '"required" or a named function'
)


class Function(msgspec.Struct):
    """What is called; in a delta, a piece of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a message; with `index` of a delta, of which only a call's first says `id`, `type` and the name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ResponseFormat(NamedTuple):
    """The form that a body asks of the answer's text, and the field that says so."""

    form: StructuredOutputs
    field: str

    @property
    def source(self) -> str | None:
        """What errors about it are to name, None: the part of structured_outputs that they do."""
        return None if self.field == "structured_outputs" else self.field


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`reading` None: the text is the content.  `form`: what the output must be; `source`: the field that errors about
    it name, None: the part of structured_outputs that they do."""

    reading: OutputFormat | None = None
    form: StructuredOutputs | None = None
    source: str | None = None

    def params(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The sampling parameters that follow; special tokens are in the text if markers are some."""
        ids = map(tokenizer.id_of, self.reading.markers() if self.reading else ())
        visible = {} if tokenizer.special_ids.isdisjoint(ids) else {"skip_special_tokens": False}
        return {"structured_outputs": self.form} | visible

    def inside(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Whether the answer to a prompt begins inside the reasoning."""
        thinking = self.reading.thinking if self.reading else None
        return thinking is not None and thinking.begun(tokenizer.decode(prompt[-TAIL:], False))


PLAIN_TEXT = ToolPlan()


def check(tools: list[dict[str, Any]] | None, choice: Any) -> None:
    """Refuse tools and a tool_choice that no server could follow.  `choice`: the body's tool_choice."""
    check_shape(tools or [])
    mode, name = _chosen(choice)
    if not tools and (mode == "required" or name is not None):
        raise RequestError("tool_choice: there are no tools to choose from", field="tool_choice")
    names = [tool["function"]["name"] for tool in tools or []]
    if name is not None and name not in names:
        raise RequestError(f"tool_choice: {name[: errors.SHOWN]!r} is none of the tools", field="tool_choice")


def check_shape(tools: list[dict[str, Any]]) -> None:
    """Refuse what is no function with a name of its own, or has parameters that are no schema of an object."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise RequestError(f"tools[{i}].type must be 'function'", field=f"tools[{i}].type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{i}].function.name must be a string", field=f"tools[{i}].function.name")
        if function["name"] in names:
            field = f"tools[{i}].function.name"
            raise RequestError(f"{field}: there are two tools {function['name']!r}", field=field)
        names.add(function["name"])
        parameters, field = function.get("parameters"), f"tools[{i}].function.parameters"
        if not isinstance(parameters, dict | None):
            raise RequestError(f"{field} must be a JSON schema, an object", field=field)
        if parameters is not None and parameters.get("type", "object") != "object":
            raise RequestError(f"{field}.type must be 'object': arguments have names", field=f"{field}.type")


def _chosen(choice: Any) -> tuple[str, str | None]:
    """The mode, and the function if one is named."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in MODES:
            raise RequestError(f"tool_choice must be one of {', '.join(MODES)} or name a function", field="tool_choice")
        return choice, None
    if not isinstance(choice, dict):
        raise RequestError("tool_choice must be a string or an object", field="tool_choice")
    if choice.get("type") != "function":
        errors.refuse_unsupported("tool_choice", choice, ())
    function = choice.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("tool_choice.function.name must be a string", field="tool_choice.function.name")
    return "named", function["name"]


def is_forced(choice: Any) -> bool:
    """Whether calls are forced, so that the model need not see the tools to make them."""
    return _chosen(choice)[0] in ("required", "named")


def make_plan(
    tools: list[dict[str, Any]] | None, choice: Any, *, parallel: bool, max_calls: int | None = None, shape: ResponseFormat | None,
    form: ToolFormat | None, no_form: str = NO_FORMAT, thinking: Thinking | None, tokenizer: Tokenizer,
) -> ToolPlan:  # fmt: skip
    """How a body that has passed `check` is served.

    `most`: calls in an answer, None: any number, or the default where a grammar makes them; one if they are not
    `parallel`.  `shape`: of an answer that is no call; with one, or if calls are forced, there is no reasoning.
    `form`, `thinking` and `tokenizer`: the server's; `no_form`: why there is no `form`, if so.  Raises RequestError.
    """
    if max_calls is not None and not 1 <= max_calls <= MAX_CALLS:
        raise RequestError(f"max_tool_calls must be from 1 to {MAX_CALLS}, got {max_calls}", field="max_tool_calls")
    max_calls = max_calls if parallel else 1
    mode, name = _chosen(choice)
    if not tools or mode == "none":
        if shape is not None:
            return ToolPlan(form=shape.form, source=shape.source)
        return PLAIN_TEXT if thinking is None else ToolPlan(OutputFormat(thinking=thinking))
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    try:
        if name is not None:
            chosen = _closed({name: functions[name]}, strict)
            return ToolPlan(OutputFormat(named=name, functions=functions), forcing.arguments(chosen[name]), "tools")
        if mode == "required":
            calls = forcing.list_of_calls(_closed(functions, strict), max_calls=max_calls or DEFAULT_CALLS)
            return ToolPlan(OutputFormat(FORCED, functions=functions, max_calls=max_calls), calls, "tools")
        if form is None:
            field = "tools" if choice is None else "tool_choice"
            raise RequestError(f"{field}: {no_form}", field=field, code="unsupported")
        reading = OutputFormat(form, thinking if shape is None else None, functions, max_calls=max_calls)
        kept = _kept(shape, form, functions, strict, tokenizer, max_calls)
        return ToolPlan(reading, kept, "tools" if shape is None else shape.field)
    except RecursionError:
        raise RequestError("tools are nested too deeply", field="tools") from None


def _kept(
    shape: ResponseFormat | None, form: ToolFormat, functions: Functions, strict: Collection[str],
    tokenizer: Tokenizer, max_calls: int | None,
) -> StructuredOutputs | None:  # fmt: skip
    """What an output must keep to in which the model may call.  `strict`: the functions that are."""
    try:
        if shape is not None:
            functions = _closed(functions, strict)
            return forcing.answer_or_calls(shape.form, form, functions, tokenizer, max_calls=max_calls or DEFAULT_CALLS)
        if not strict or form.bare:  # of bare calls nobody could tell which text begins one
            return None
        schemas = {name: schema if name in strict else ANY for name, schema in _closed(functions, strict).items()}
        return forcing.text_or_calls(form, schemas, tokenizer, parallel=max_calls != 1)
    except forcing.NotExpressible as error:
        field = "tools" if shape is None else shape.field
        what = "tools: strict functions" if shape is None else f"{field} and tools"
        words = f"{what} cannot be put in a grammar, as {form.name} writes calls: {error}"
        raise RequestError(words, field=field, code="unsupported") from None


def _closed(functions: Functions, strict: Collection[str]) -> Functions:
    """The schemas of arguments, those of strict functions with closed objects."""
    closed = dict(functions)
    for name in strict:
        if name in closed:
            closed[name] = json.loads(json.dumps(closed[name]))
            jsonschema.close(closed[name])
    return closed


class ParsedDelta(msgspec.Struct):
    """What a delta or a whole answer says."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def call_id(key: str, index: int, call_index: int) -> str:
    """Of a call of a choice: nine letters, as Mistral's templates demand, and the same whoever reads the answer."""
    digest = hashlib.sha256(f"{key}-{index}-{call_index}".encode()).digest()
    return "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in digest[:9])


class OutputParser:
    """The choices of one reply.  `key`: of the request, which calls are named after."""

    def __init__(self, reading: OutputFormat, key: str, *, inside: bool) -> None:
        self._reading = reading
        self._key = key
        self._inside = inside
        self._parsers: dict[int, Parser] = {}

    def read(self, completion: ChoiceOutput) -> ParsedDelta:
        """The next part of its choice."""
        index = completion.index
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = Parser(self._reading, inside=self._inside)
        call_index = parser.num_calls - 1
        texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[tuple[ToolCall, list[str]]] = []
        for kind, text in parser.push(completion.text or "", completion.finish_reason is not None):
            if kind == "call":
                call_index += 1
                name = Function(text)
                new_id = call_id(self._key, index, call_index)
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

    def finish_reason(self, completion: ChoiceOutput) -> str | None:
        """Why a choice ended: it is "tool_calls" if it came to its own end with calls that are whole, and the model
        was free to say which."""
        parser = self._parsers[completion.index]
        calls = completion.finish_reason == "stop" and parser.complete and self._reading.named is None
        return "tool_calls" if calls else completion.finish_reason
