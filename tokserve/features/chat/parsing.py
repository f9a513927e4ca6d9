"""Parses an answer's text into content, reasoning and tool calls while it arrives.

Streams and whole answers use the same parser: it reads forward and waits for more text where it needs it, so its output
does not depend on how the text was split into pushes.  Text that may be a marker, or the head of a call, is held until
that is decided; a call is reported as soon as its name is known and its arguments begin.  Text that only resembled a
call becomes content.  White space next to a marker belongs to the marker: templates insert it.  A `ToolFormat` says how
a model writes calls, and `calls` reads them.
"""

from __future__ import annotations

from dataclasses import replace

from tokserve.features.chat.calls import CallReader
from tokserve.features.chat.cursor import Cursor, Markers, Steps
from tokserve.features.chat.output_format import (
    AT_CONTENT,
    AnswerStart,
    Kind,
    OutputFormat,
    Segment,
    Thinking,
    ToolFormat,
)
from tokserve.features.chat.readers.channels import ChannelReader
from tokserve.features.chat.readers.sink import CallStatus

ONLY_ARGUMENTS = ToolFormat("arguments")  # an answer that is the arguments of one function


class Parser:
    """Parses one answer.

    `start`: where it begins.  `whole_calls`: a call is reported when it is complete, and its text is content if it
    never is; else it is reported while it arrives, and `is_whole` says of each whether it is complete.  `call_ids`: the
    ids that the model gives its calls, "" if it gives none.
    """

    def __init__(
        self, output_format: OutputFormat, start: AnswerStart = AT_CONTENT, *, whole_calls: bool = False
    ) -> None:
        self.num_begun = 0  # calls
        self.num_calls = 0  # without those that became content
        self.is_whole: list[bool] = []  # of each of them: all of its arguments have been reported, and they are JSON
        self.call_ids: list[str] = []  # of the same calls
        self.num_thoughts = 0  # that have ended
        self._format = output_format
        self._inside, self._continued = start
        self._whole_calls = whole_calls
        self._text = Cursor()
        self._out: list[Segment] = []
        self._held: list[Segment] = []  # of a call that is to be reported when it is complete
        self._spoiled = False  # the last call is not JSON
        self._cut = False
        self._trim = False  # white space that follows belongs to a marker
        self._has_content = False
        self._calls = CallReader(self._text, output_format, output_format.tools or ONLY_ARGUMENTS, self)
        self._steps = self._answer()

    @property
    def opens(self) -> str:
        """The marker before a thought; "" if none is looked for."""
        return self._format.thinking.opens if self._format.thinking else ""

    @property
    def complete(self) -> bool:
        """Whether there are calls, and all that were reported are complete."""
        reported = self.is_whole[: self._format.max_calls]
        return bool(reported) and all(reported)

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Segment]:
        """The segments that are decided now.  `final`: this is the end of the answer; `cut`: because it was too long,
        so a call that has begun is reported with the arguments so far."""
        self._cut = cut
        self._text.push(text, final)
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    # output

    def _emit_text(self, kind: Kind, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        self._has_content |= kind == "content"
        self._out.append(Segment(kind, text))

    def _emit_of_call(self, kind: Kind, text: str) -> None:
        max_calls = self._format.max_calls
        if max_calls is None or self.num_calls <= max_calls:
            (self._held if self._whole_calls else self._out).append(Segment(kind, text))

    def _content(self, text: str) -> None:
        self._emit_text("content", text)

    def _reasoning(self, text: str) -> None:
        self._emit_text("reasoning", text)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call begins."""
        self.num_begun += 1
        self.num_calls += 1
        self.is_whole.append(False)
        self.call_ids.append(call_id)
        self._spoiled = False
        self._emit_of_call("call", name)

    def add_arguments(self, text: str) -> None:
        """More JSON of its arguments."""
        if text:
            self._emit_of_call("arguments", text)

    def spoil_call(self) -> None:
        """Its arguments are not JSON."""
        self._spoiled = True

    def end_call(self) -> None:
        """Its arguments are complete, unless it is spoiled."""
        if not self._spoiled:
            self.is_whole[-1] = True
            self._report_held()

    def between_calls(self) -> bool:
        """Another call may begin here.  Returns whether the text up to here became content."""
        became_content = self._resolve_held("")
        self._keep(self._text.at)
        return became_content

    def _report_held(self) -> None:
        self._out += self._held
        self._held = []

    def _resolve_held(self, gap: str) -> bool:
        """Decide about a call that was held and is not complete, up to here: whether it becomes content.  `gap`: white
        space before it."""
        if not self._whole_calls or not self.num_calls or self.is_whole[-1]:
            return False
        if self._cut and self._text.at_end and not self._spoiled:
            self._report_held()
            return False
        self._held = []
        self.num_calls -= 1
        self.is_whole.pop()
        self.call_ids.pop()
        self._content(gap + self._text.kept())
        return True

    # the answer

    def _answer(self) -> Steps[None]:
        output_format, form = self._format, self._format.tools
        if output_format.channels:
            yield from ChannelReader(self._text, output_format, self).messages(inside=self._inside)
            return
        yield from self._thoughts()
        if output_format.named is not None:
            yield from self._only_arguments(output_format.named)
        elif form is not None and form.bare:
            yield from self._bare_calls(form)
        end = yield from self._answer_begin()
        frames = () if form is None else form.frames
        markers = Markers(*output_format.openers(), *frames, *filter(None, [end]))
        while (marker := (yield from self._text.until(markers, self._content))) is not None:
            if marker == end:
                yield from self._answer_end(end)
            elif form is None or marker in frames:
                yield from self._after_marker()
                if form is not None and form.bare:
                    yield from self._bare_calls(form)
            elif not (yield from self._marked_calls(form, marker)):
                continue
            if self.num_calls:
                yield from self._thoughts()

    def _answer_begin(self) -> Steps[str]:
        """What begins the answer after the reasoning, if it is there; returns what then ends it."""
        begin, end = self._format.thinking.answer if self._format.thinking else ("", "")
        start = self._text.at
        if not begin:
            return ""
        yield from self._text.peek()
        if (yield from self._text.literal(begin)) is None:
            self._text.at = start
            return ""
        self._trim = True
        return end

    def _answer_end(self, end: str) -> Steps[None]:
        """What ends the answer: content unless the text ends there, or calls follow."""
        gap, behind = self._text.gap, self._text.at
        openers = self._format.openers()
        ends = not (yield from self._text.peek())
        ends = ends or (bool(openers) and (yield from self._text.literal(*openers)) is not None)
        self._text.at = behind
        self._trim = ends
        if not ends:
            self._content(gap + end)

    def _thoughts(self) -> Steps[None]:
        """The reasoning that comes next, if any does."""
        thinking = self._format.thinking
        while thinking is not None:
            start = self._text.at
            yield from self._text.peek()
            opened = (yield from self._text.literal(thinking.opens)) is not None
            if not opened:
                self._text.at = start
                if not self._inside:
                    return
            self._trim = opened or not self._continued
            self._inside = False
            yield from self._thought(thinking)
            self.num_thoughts += 1
            self._trim = True

    def _thought(self, thinking: Thinking) -> Steps[None]:
        """One thought.  If it does not end, calls at its end are none of its parts."""
        markers = Markers(thinking.closes, *self._format.openers())
        trial: _Trial | None = None

        def add(text: str) -> None:
            nonlocal trial
            if trial is not None and not trial.add(text):
                text, trial = trial.text, None
            if trial is None:
                self._reasoning(text)

        while (mark := (yield from self._text.until(markers, add))) not in (None, thinking.closes):
            if trial is None:
                trial = _Trial(self._format)
            add(self._text.gap + (mark or ""))
        if trial is None:
            return
        calls = trial.calls() if mark is None else None
        if calls is None:
            self._reasoning(trial.text)
            return
        for kind, text in calls:
            if kind == "call":
                self.begin_call(text)
            else:
                self.add_arguments(text)
                self.is_whole[-1] = True
        self._report_held()

    # messages

    def add_content(self, text: str) -> None:
        """More content."""
        self._content(text)

    def add_reasoning(self, text: str) -> None:
        """More of a thought."""
        self._reasoning(text)

    def end_thought(self) -> None:
        """A thought is complete."""
        self.num_thoughts += 1

    def keep(self, start: int) -> None:
        """A message begins here, which may turn out to be a call that cannot be read."""
        self._keep(start)

    def message_call(self, name: str) -> Steps[bool]:
        """The arguments of a call of this function, which come next; returns whether there are any."""
        if (yield from self._text.peek()) != "{":
            return False
        yield from self._calls.only_arguments(name)
        self._end_of_calls()
        return True

    def _only_arguments(self, name: str) -> Steps[None]:
        start = self._text.at
        if (yield from self._text.peek()) != "{":
            self._text.at = start
            return
        self._keep(start)
        yield from self._calls.only_arguments(name)
        self._end_of_calls()
        yield from self._after_marker()

    def _bare_calls(self, form: ToolFormat) -> Steps[None]:
        """The calls that come next without a marker, or between the markers around all calls, if any do."""
        while True:
            start = self._text.at
            first = yield from self._text.peek()
            while form.frames and (yield from self._text.literal(*form.frames)) is not None:
                start = self._text.at
                first = yield from self._text.peek()
            if not first and self.num_calls:
                return
            if first not in ("{", "[") and not (form.body == "named" and first):
                self._text.at = start
                return
            self._keep(start)
            if (yield from self._calls.calls()) is CallStatus.NONE:
                self._content(self._text.since(start))
                return
            self._end_of_calls()
            self._trim = not self._has_content

    def _marked_calls(self, form: ToolFormat, marker: str) -> Steps[bool]:
        """The calls after a marker; returns whether there are any."""
        gap, known = self._text.gap, marker == form.begins
        start = self._text.at - len(marker)
        self._text.at = start if known else self._text.at
        self._keep(start)
        status = yield from self._calls.calls(known=known)
        if status is CallStatus.NONE:
            self._text.at = max(self._text.at, start + len(marker))
            self._content(gap + self._text.since(start))
            return False
        if form.closes and status is CallStatus.BROKEN:  # skip the invalid rest
            marker_found = yield from self._text.until(Markers(form.closes, *form.opens), lambda text: None)
            if marker_found in form.opens:
                self._text.at -= len(marker_found)
        elif form.closes:
            behind = self._text.at
            yield from self._text.peek()
            if (yield from self._text.literal(form.closes)) is None and not self._text.is_cut(form.closes):
                self._text.at = behind
        self._end_of_calls(gap)
        yield from self._after_marker()
        return True

    def _keep(self, start: int) -> None:
        if self._whole_calls:
            self._text.keep(start)

    def _end_of_calls(self, gap: str = "") -> None:
        self._resolve_held(gap)
        self._text.keep_no_more()

    def _after_marker(self) -> Steps[None]:
        """After a marker: white space that ends the answer, or begins its content, is not part of the content."""
        self._trim = not self._has_content
        start = self._text.at
        if (yield from self._text.peek()):
            self._text.at = start


class _Trial:
    """The text of a thought from the marker of a call on, read as calls."""

    def __init__(self, output_format: OutputFormat) -> None:
        calls_only = replace(output_format, thinking=None, max_calls=None)
        self._parser = Parser(calls_only, whole_calls=True)
        self._texts: list[str] = []
        self._calls: list[Segment] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str, final: bool = False) -> bool:
        """More text; returns whether it may still be calls and nothing else."""
        self._texts.append(text)
        segments = self._parser.push(text, final)
        self._calls += segments
        return all(kind != "content" for kind, _ in segments)

    def calls(self) -> list[Segment] | None:
        """The calls, if the text consists of calls."""
        return self._calls if self.add("", True) and self._parser.complete else None
