"""Reads the messages of gpt-oss: each has a header with a channel and perhaps a recipient, and a body.

The channel `analysis` is reasoning, a message to a function is a call, and everything else is content.  A message is
`<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>BODY` and a marker that ends it; the
recipient may also stand before the channel, and the first message has no start, which the prompt ends with.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Protocol

from tokserve.features.chat.cursor import Cursor, Markers, Steps
from tokserve.features.chat.output_format import OutputFormat

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
BEGINS = (START, CHANNEL)
ENDS = ("<|end|>", "<|return|>", "<|call|>")
TO = "to="
FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class MessageSink(Protocol):
    """Takes what is read of messages."""

    def add_content(self, text: str) -> None:
        """More content."""

    def add_reasoning(self, text: str) -> None:
        """More of a thought."""

    def end_thought(self) -> None:
        """The thought is complete."""

    def keep(self, start: int) -> None:
        """A message begins here, which may turn out to be a call that cannot be read."""

    def message_call(self, name: str) -> Steps[bool]:
        """Read the arguments of a call of this function; returns whether there are any."""


class ChannelReader:
    """Reads the messages at the `cursor`.  Where `output_format` has no tools, or no reasoning, these are content."""

    def __init__(self, cursor: Cursor, output_format: OutputFormat, sink: MessageSink) -> None:
        self._text = cursor
        self._sink = sink
        self._has_tools = output_format.tools is not None
        self._functions: Collection[str] = output_format.functions
        self._has_thoughts = output_format.thinking is not None
        self._header_ends = Markers(MESSAGE, *ENDS)
        self._body_ends = Markers(*BEGINS, *ENDS)

    def messages(self, *, inside: bool) -> Steps[None]:
        """All messages.  `inside`: the answer begins within a thought."""
        if inside:
            yield from self._thought()
        while True:
            start = self._text.at
            self._sink.keep(start)
            if not (yield from self._text.peek()):
                return
            header = yield from self._header(start)
            if not header:
                yield from self._body()
                continue
            recipient = _RECIPIENT.search(header)
            name = recipient[1] if recipient else ""
            if self._has_tools and (name.startswith(FUNCTIONS) or name in self._functions):
                if (yield from self._sink.message_call(name.removeprefix(FUNCTIONS))):
                    yield from self._rest()
                    continue
                self._sink.add_content(header)
                yield from self._body()
            elif (channel := _CHANNEL.search(header)) is not None and channel[1] == "analysis":
                if self._has_thoughts:
                    yield from self._thought()
                else:
                    self._sink.add_content(header)
                    yield from self._body(keep_end=True)
            else:
                if name:  # another tool than those of the request
                    self._sink.add_content(header)
                yield from self._body()

    def _header(self, start: int) -> Steps[str]:
        """The header of a message; "" if there is none: then text without a header begins at `start`, or the header is
        cut off, which says nothing."""
        mark = yield from self._text.literal(*BEGINS, TO, *ENDS)
        if mark in ENDS:
            return ""
        parts = [mark or ""]
        if mark == TO:
            parts.append((yield from self._text.word()))
            yield from self._text.peek()
            mark = (yield from self._text.literal(CHANNEL, MESSAGE)) if parts[1] else None
            parts.append(mark or "")
        if mark is None:
            self._text.at = start
            return ""
        if mark == MESSAGE:
            return "".join(parts)
        end = yield from self._text.until(self._header_ends, parts.append, exact=True)
        return "".join(parts) + MESSAGE if end == MESSAGE else ""

    def _thought(self) -> Steps[None]:
        end = yield from self._text.until(self._body_ends, self._sink.add_reasoning)
        if end is not None:
            self._put_back(end)
            self._sink.end_thought()

    def _body(self, *, keep_end: bool = False) -> Steps[None]:
        end = yield from self._text.until(self._body_ends, self._sink.add_content)
        if end in ENDS and keep_end:
            self._sink.add_content(end)
        elif end is not None:
            self._put_back(end)

    def _rest(self) -> Steps[None]:
        """What is left of a message after the arguments of its call, which is nothing."""
        end = yield from self._text.until(self._body_ends, lambda text: None)
        if end is not None:
            self._put_back(end)

    def _put_back(self, end: str) -> None:
        """A message that has no end ends where the next one begins."""
        if end in BEGINS:
            self._text.at -= len(end)
