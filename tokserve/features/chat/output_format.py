"""How answers are written: the markers of tool calls and of reasoning, and what an answer is parsed into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["content", "reasoning", "call", "arguments"]


class Segment(NamedTuple):
    """A piece of an answer.  "call": the beginning of a call, by name; "arguments": more JSON of the last call."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    `opens`: the markers before a call, or before a list of calls.  `closes`: the marker after it, "" if there is none.
    `body`: "json" is an object with name and arguments, or a list of them; "named" is a name, an optional `call_id`
    before an id, an optional `separator`, and the arguments as an object; "xml" is `<function=NAME>` around
    `<parameter=KEY>` elements.  `bare`: calls may also come first without a marker, with ";" or nothing between them.
    `frames`: the markers before and after all calls, which are skipped.  `begins`: what a call of a known function
    begins with if the model forgets the marker before it.
    """

    name: str
    opens: tuple[str, ...] = ()
    closes: str = ""
    body: Literal["json", "named", "xml"] = "json"
    separator: str = ""
    call_id: str = ""
    bare: bool = False
    frames: tuple[str, ...] = ()
    begins: str = ""

    def markers(self) -> tuple[str, ...]:
        return tuple(mark for mark in (*self.opens, self.closes, self.call_id, self.separator, *self.frames) if mark)


class AnswerStart(NamedTuple):
    """Where an answer begins.  `inside`: in the reasoning; `continued`: of which the prompt has some."""

    inside: bool = False
    continued: bool = False


AT_CONTENT = AnswerStart()


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning, which comes first, after another thought, or after calls.  `assumed`: an answer
    begins with it even if nothing opens it."""

    name: str
    opens: str
    closes: str
    assumed: bool = False

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
    calls, so slips of a free model are not looked for."""

    tools: ToolFormat | None = None
    thinking: Thinking | None = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    named: str | None = None
    max_calls: int | None = None
    exact: bool = False

    def openers(self) -> tuple[str, ...]:
        """What a call in the model's format may begin with, where there are others than `bare` ones."""
        form = self.tools
        return () if form is None else (*form.opens, *([form.begins] if form.begins and not self.exact else []))

    def markers(self) -> tuple[str, ...]:
        """All markers that an answer may contain."""
        thinking = (self.thinking.opens, self.thinking.closes) if self.thinking else ()
        return (*(self.tools.markers() if self.tools else ()), *thinking)
