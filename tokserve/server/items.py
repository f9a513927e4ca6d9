"""The items of the Responses API: those of an input as chat messages, and an answer as those of an output.

An answer becomes items while it arrives, by the same steps whether it is streamed or whole: each step is told by its
event, and who wants no events does not listen.  Items stand in the order in which they were written, one after the
other.  Nothing here knows of bodies, templates or how an answer is forced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tokserve.errors import RequestError
from tokserve.server import errors, tools
from tokserve.server.logprobs import Entry, Place
from tokserve.text.chat import part_text
from tokserve.text.parsing import Parser

KINDS = ("message", "reasoning", "function_call", "function_call_output")
ROLES = ("user", "assistant", "system", "developer")
Tell = Callable[[str, dict[str, Any]], None]  # an event: its name without "response.", and its fields


class Conversation:
    """An input as messages.  `places`: what in the body each comes from.

    What an assistant said in one turn is one message, as chat has it: reasoning, then text, then calls.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._turn: dict[str, Any] | None = None  # the assistant's, while it may go on

    def say(self, where: str, message: dict[str, Any]) -> None:
        """A message of its own."""
        self.messages.append(message)
        self.places.append(where)
        self._turn = None

    def add(self, where: str, item: Any) -> None:
        """The next item.  Raises RequestError naming `where`, or what is wrong in it."""
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", field=where)
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(where, item)
        elif kind == "reasoning":
            self._reasoning(where, item)
        elif kind == "function_call":
            function = {"name": _string(where, item, "name"), "arguments": _string(where, item, "arguments")}
            call = {"id": _string(where, item, "call_id"), "type": "function", "function": function}
            self._assistant(where, calls=True).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(f"{where}.output", item.get("output"))
            self.say(where, {"role": "tool", "tool_call_id": _string(where, item, "call_id"), "content": content})
        elif kind is None:
            raise RequestError(f"{where}.type is required", field=f"{where}.type")
        else:
            reason = "nothing is stored" if kind == "item_reference" else f"it takes {', '.join(KINDS)}"
            errors.refuse_unsupported(f"{where}.type", kind, reason=reason)

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", field=f"{where}.role")
        content = _content(f"{where}.content", item.get("content"))
        if role != "assistant":
            self.say(where, {"role": role, "content": content})
            return
        turn = self._assistant(where)
        turn["content"] = _parts(turn["content"]) + _parts(content) if "content" in turn else content

    def _reasoning(self, where: str, item: dict[str, Any]) -> None:
        """Its text, or else its summary; one that is only encrypted says nothing here."""
        name = "content" if item.get("content") else "summary"
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise RequestError(f"{where}.{name} must be a list of parts", field=f"{where}.{name}")
        texts = [_string(f"{where}.{name}[{i}]", part, "text") for i, part in enumerate(parts)]
        if any(texts):
            turn = self._assistant(where)
            turn["reasoning"] = "\n".join(([turn["reasoning"]] if "reasoning" in turn else []) + texts)

    def _assistant(self, where: str, *, calls: bool = False) -> dict[str, Any]:
        """The assistant's turn.  One that has come to its text goes on with calls, and with what follows these."""
        turn = self._turn
        if turn is None or ("content" in turn and "tool_calls" not in turn and not calls):
            turn = {"role": "assistant"}
            self.say(where, turn)
            self._turn = turn
        return turn


def _string(where: str, item: Any, name: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", field=f"{where}.{name}")
    return value


def _content(where: str, content: Any) -> str | list[dict[str, str]]:
    """As chat has it.  A list of one part is its text, as which most templates take it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", field=where)
    texts = [part_text(f"{where}[{i}]", part) for i, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The one part of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Entry] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The one part of a reasoning."""

    text: str = ""


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """What the assistant says."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What it thought before."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call, with JSON text as arguments."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


Item = Message | Reasoning | FunctionCall


class Token(NamedTuple):
    """A token of an answer: how many characters it completes, and its logprobs if they are asked for."""

    length: int
    entry: Entry | None


class _Cuts:
    """An answer's text, cut where its tokens end, so that each is known by what the reading made of it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._due: deque[tuple[int, Token]] = deque()  # where a token ends, of those whose text is not there yet
        self._text = ""  # the rest, whose text is not complete
        self._at = 0  # where that begins

    def push(
        self, text: str, token_ids: Sequence[int], entries: Sequence[Entry] | None, final: bool
    ) -> Iterator[tuple[str, list[Token]]]:
        """The pieces that are complete now; `final`: all there are, with all the tokens."""
        text, at = self._text + text, self._at
        for i, token_id in enumerate(token_ids):
            before = self._place.offset
            self._place.add(token_id)
            self._due.append((self._place.offset, Token(self._place.offset - before, entries[i] if entries else None)))
        begin = 0
        while self._due and self._due[0][0] - at <= len(text):
            end, token = self._due.popleft()
            yield text[begin : end - at], [token]
            begin = end - at
        if final or not self._due:
            yield text[begin:], [token for _, token in self._due]
            begin = len(text)
            self._due.clear()
        self._text, self._at = text[begin:], at + begin


class _Growing:
    """The item that is being written, and its events."""

    def __init__(self, kind: str, item: Item, place: int, tell: Tell) -> None:
        self.kind = kind
        self.item = item
        self._texts: list[str] = []
        self._place: dict[str, Any] = {"item_id": item.id, "output_index": place}
        self._tell = tell
        tell("output_item.added", {"output_index": place, "item": item})
        if isinstance(item, FunctionCall):
            self._name = "function_call_arguments"
            return
        self._place["content_index"] = 0
        if isinstance(item, Message):
            self._name, item.content = "output_text", [OutputText()]
        else:
            self._name, item.content = "reasoning_text", [ReasoningText()]
        tell("content_part.added", self._place | {"part": item.content[0]})

    def add(self, text: str, tokens: Sequence[Token]) -> None:
        """More text, and tokens; only a message shows their logprobs."""
        entries: list[Entry] = []
        fields = {**self._place, "delta": text}
        if isinstance(self.item, Message):
            entries = [token.entry for token in tokens if token.entry is not None]
            self.item.content[0].logprobs += entries
            fields["logprobs"] = entries
        if text or entries:
            self._texts.append(text)
            self._tell(f"{self._name}.delta", fields)

    def close(self, status: str) -> None:
        """It is written."""
        item, text = self.item, "".join(self._texts)
        if isinstance(item, FunctionCall):
            item.arguments = text
            self._tell(f"{self._name}.done", self._place | {"name": item.name, "arguments": text})
        else:
            part = item.content[0]
            part.text = text
            more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            self._tell(f"{self._name}.done", self._place | {"text": text} | more)
            self._tell("content_part.done", self._place | {"part": part})
        item.status = status
        self._tell("output_item.done", {"output_index": self._place["output_index"], "item": item})


class Output:
    """The items of one answer.  `key`: of the request, which they are named after.

    `place`: to tell tokens apart by; None: nobody asks whose they are.

    A token is of the item that its text is of: the marker that ends one is still its own, and what is around the name
    and the arguments of a call is the call's.
    """

    def __init__(self, key: str, parser: Parser, place: Place | None, tell: Tell) -> None:
        self.items: list[Item] = []
        self.reasoning_tokens = 0
        self._key = key
        self._parser = parser
        self._cuts = None if place is None else _Cuts(place)
        self._tell = tell
        self._held: list[Token] = []  # whose text is not settled
        self._open: _Growing | None = None
        self._num_calls = 0

    def push(self, text: str, token_ids: Sequence[int], entries: Sequence[Entry] | None, *, final: bool) -> None:
        """More of the answer.  `entries`: the tokens' logprobs, if they are shown."""
        if self._cuts is None:
            self._read(text, False)
            return
        for piece, tokens in self._cuts.push(text, token_ids, entries, final):
            self._held += tokens
            self._read(piece, False)

    def end(self, *, complete: bool) -> None:
        """There is no more.  `complete`: it ended by itself.  An answer without anything is an empty message."""
        self._read("", True)
        growing = self._open or self._begin("content")
        self._grow(growing, "", self._held)
        if growing.kind == "call":
            complete = complete and self._parser.complete
        growing.close("completed" if complete else "incomplete")

    def _read(self, text: str, final: bool) -> None:
        for kind, said in self._parser.push(text, final):
            tokens, growing = self._own(kind, said), self._open
            if kind == "call":
                self._grow(self._begin(kind, name=said), "", tokens)
                continue
            if growing is None or kind not in (growing.kind, "arguments"):
                growing = self._begin(kind)
            self._grow(growing, said, tokens)

    def _own(self, kind: str, text: str) -> list[Token]:
        """Those of the held tokens that a segment is made of.  Those before a new text belong to what was before."""
        held, self._held = self._held, []
        if self._open is None or kind in (self._open.kind, "call", "arguments"):
            return held
        first, missing = len(held), len(text)
        while first and (missing > 0 or not held[first - 1].length):
            first -= 1
            missing -= held[first].length
        self._grow(self._open, "", held[:first])
        return held[first:]

    def _begin(self, kind: str, *, name: str = "") -> _Growing:
        if self._open is not None:
            self._open.close("completed")
        place = len(self.items)
        item: Item
        if kind == "call":
            call_id = tools.call_id(self._key, 0, self._num_calls)
            self._num_calls += 1
            item = FunctionCall(id=f"fc_{self._key}-{place}", call_id=call_id, name=name)
        elif kind == "reasoning":
            item = Reasoning(id=f"rs_{self._key}-{place}")
        else:
            item = Message(id=f"msg_{self._key}-{place}")
        self.items.append(item)
        self._open = _Growing(kind, item, place, self._tell)
        return self._open

    def _grow(self, growing: _Growing, text: str, tokens: Sequence[Token]) -> None:
        growing.add(text, tokens)
        if growing.kind == "reasoning":
            self.reasoning_tokens += len(tokens)
