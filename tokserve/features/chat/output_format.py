"""How answers are written: the markers of tool calls and of reasoning, and what an answer is parsed into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["content", "reasoning", "call", "arguments"]


class Segment(NamedTuple):
    """A piece of an answer.  "call": the beginning of a call, by name; "arguments": more JSON of the last call."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a call whose arguments are elements, one per parameter.

    `function`: what begins a call, up to its name, which may be in quotes; "" if the name comes first; `function_end`:
    what ends it, "" if the marker after the call does.  `parameter`, `key_end`: the texts before and after a
    parameter's name; `value`: a tag before its value, "" if there is none; `parameter_end`: what ends the value.
    `padded`: a line break after the first tag and one before the last belong to the tags.  `typed`: the first tag says
    whether the value is a string.  `grouped`: several calls stand between one pair of markers.
    """

    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    key_end: str = ">"
    value: str = ""
    parameter_end: str = "</parameter>"
    padded: bool = True
    typed: bool = False
    grouped: bool = False


MARK_BEGINS = ("<", "[")  # of special tokens; other texts of a format are plain ones
Body = Literal["json", "named", "elements", "pythonic", "quoted", "channels"]
QWEN = Tags()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    `opens`: the markers before a call, or before a list of calls.  `closes`: the marker after it, "" if there is none.
    `body`: "json" is an object with name and arguments under these `keys`, or a list of them (`listed`: always a list);
    "named" is a name, an optional `call_id` before an id, an optional `separator`, and the arguments as an object;
    "elements" is a call in `tags`; "pythonic" is a call in Python's notation with keywords, or a list of them; "quoted"
    is a name and `{KEY:VALUE,...}` with strings between two markers `quote`; "channels" is a message of gpt-oss.
    `before`, `after`: what stands, if at all, between the marker and the name, and after the arguments.  `bare`: calls
    may also come first without a marker, with ";" or nothing between them.  `frames`: the markers before and after all
    calls, which are skipped.  `begins`: what a call of a known function begins with if the model forgets the marker
    before it.  `has_ids`: the name is the call's id, `functions.NAME:NUMBER`.  `signs`: texts of a chat template that
    shows tools, but no earlier calls, to a model with this format.  `reader`: makes what reads one call instead
    of `body`, of the arguments of `readers.quoted.QuotedReader`.
    """

    name: str
    opens: tuple[str, ...] = ()
    closes: str = ""
    body: Body = "json"
    keys: tuple[str, str] = ("name", "arguments")
    listed: bool = False
    before: tuple[str, ...] = ()
    separator: str = ""
    after: str = ""
    call_id: str = ""
    tags: Tags = QWEN
    quote: str = ""
    bare: bool = False
    frames: tuple[str, ...] = ()
    begins: str = ""
    has_ids: bool = False
    signs: tuple[str, ...] = ()
    reader: Callable[..., Any] | None = None

    @property
    def is_json(self) -> bool:
        """Whether a call is a JSON object with its name and arguments, without a list around it."""
        return self.body == "json" and not self.listed and not self.before

    @property
    def grouped(self) -> bool:
        """Whether all calls stand between one pair of markers."""
        return self.listed or self.body == "pythonic" or (self.body == "elements" and self.tags.grouped)

    def markers(self) -> tuple[str, ...]:
        """The texts that a tokenizer may have as special tokens."""
        parts = (*self.opens, self.closes, self.call_id, self.separator, self.quote, *self.frames, *self.before)
        return tuple(dict.fromkeys(mark for mark in parts if mark[:1] in MARK_BEGINS))


class AnswerStart(NamedTuple):
    """Where an answer begins.  `inside`: in the reasoning; `continued`: of which the prompt has some."""

    inside: bool = False
    continued: bool = False


AT_CONTENT = AnswerStart()


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning, which comes first, after another thought, or after calls.  `assumed`: an answer
    begins with it even if nothing opens it.  `answer`: the texts around an answer after reasoning, or two times "".
    `channels`: the reasoning is a message of gpt-oss.  `signs`: texts of the chat templates of these models; none: the
    two markers."""

    name: str
    opens: str
    closes: str
    assumed: bool = False
    answer: tuple[str, str] = ("", "")
    channels: bool = False
    signs: tuple[str, ...] = ()

    def start_after(self, turn: str) -> AnswerStart:
        """Where the answer begins that continues this open turn of the assistant."""
        opened, closed = turn.rfind(self.opens), turn.rfind(self.closes)
        if opened == closed:  # it has neither
            return AnswerStart(self.assumed and not turn.strip())
        thought = turn[opened + len(self.opens) :]
        return AnswerStart(True, bool(thought.strip())) if opened > closed else AnswerStart()

    def start_after_tail(self, prompt: str) -> AnswerStart:
        """The same for a prompt with this end in which no turn of the assistant can be told."""
        tail = prompt.rstrip()
        return AnswerStart(tail.endswith(self.opens) or (self.assumed and not tail.endswith(self.closes)))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How answers to one request are parsed.  `functions`: the JSON schemas of the arguments by name.  `named`: the
    answer is only this function's arguments. `max_calls`: further calls are dropped.  `exact`: a grammar has made the
    calls, so slips of a free model are not looked for.  `chosen`: the function that the request
    names, whose call is the answer, in whichever form."""

    tools: ToolFormat | None = None
    thinking: Thinking | None = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    named: str | None = None
    max_calls: int | None = None
    exact: bool = False
    chosen: str | None = None

    def openers(self) -> tuple[str, ...]:
        """What a call in the model's format may begin with, where there are others than `bare` ones."""
        form = self.tools
        return () if form is None else (*form.opens, *([form.begins] if form.begins and not self.exact else []))

    def markers(self) -> tuple[str, ...]:
        """All markers that an answer may contain."""
        thinking: tuple[str, ...] = ()
        if self.thinking is not None:
            thinking = tuple(filter(None, (self.thinking.opens, self.thinking.closes, *self.thinking.answer)))
        return (*(self.tools.markers() if self.tools else ()), *thinking)

    @property
    def channels(self) -> bool:
        """Whether an answer consists of messages of gpt-oss."""
        forms = (self.tools is not None and self.tools.body == "channels", self.thinking and self.thinking.channels)
        return any(forms)
