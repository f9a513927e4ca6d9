"""Structured outputs: a grammar is compiled, and an output follows it token by token.

llguidance does both: it reads the model's tokenizer.json and says, as a bit per vocabulary id, which tokens keep the
text on a path to a sentence.  It is loaded, with the tokenizer, when the first grammar comes.  `LIMITS` bound what the
library spends on a token and how many states a grammar may have.  What compiling costs is not bounded here: a few
hundred bytes of grammar can need all the memory there is, so `trials` compiles each in another process first.  Knows no
requests, no steps and no logits.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokserve.errors import RequestError
from tokserve.params import WHITE, StructuredOutputs
from tokserve.plan import UInt32

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NICENESS = 10  # of threads and processes that compile or compute slow masks: steps go first
NO_TOKENIZER = "structured_outputs needs a tokenizer (tokenizer.json), and there is none"
PAGE = os.sysconf("SC_PAGE_SIZE")
STACK = 256 << 20  # bytes of address space; the library descends a frame per rule that another names
SHOWN = 300  # characters of the library's complaint
STATE_BYTES = 2048  # of a lexer state, the upper end of the library's own estimate; 400 were measured
WALKS, WALK_TOKENS, WALK_SECONDS = 3, 8, 0.2  # of the texts that a trial writes
LIMITS: dict[str, Any] = {  # what one grammar may cost, in the library's units
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,  # 10 ms, 50 for the worst known
    "step_max_items": 20_000,  # some ms
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,  # `STATE_BYTES` each
    "max_grammar_size": 100_000,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a compiled grammar costs.  `size`: bytes; `per_token`: bytes it grows by with a token that follows it;
    `seconds`: to compile it."""

    size: int = 0
    per_token: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Grammar:
    """What outputs of one form begin from, and sets of ids, a bit for each.

    `sentinels`: the library's EOS tokens, of the tokenizer's vocabulary.  Of the model's: `eos`, its own, and `barred`,
    ids that no text has (the sentinels, and bits past the last id).  `cost`: as measured in a trial; `followed`: tokens
    of outputs that have followed it.
    """

    machine: LLMatcher
    sentinels: UInt32
    barred: UInt32
    eos: UInt32
    cost: Cost = Cost()
    followed: int = 0

    @property
    def size(self) -> int:
        """Bytes of memory, estimated: the size that the trial measured, and since then growth at the trial's pace, up
        to the limit of lexer states.  The library does not report its memory."""
        growth = min(self.cost.per_token * self.followed, STATE_BYTES * LIMITS["max_lexer_states"])
        return self.cost.size + int(growth)


class Matcher:
    """A grammar on its way through one output.  `ends`: the model's EOS tokens end it.

    `words`: what may come next, a bit per vocabulary id, uint32[ceil(V / 32)]; EOS where the text is a sentence, and
    only if it `ends`.  `complete`: nothing but EOS may come.  Raises RequestError if there is no way to a sentence.
    """

    words: UInt32
    complete: bool

    def __init__(self, grammar: Grammar, *, ends: bool) -> None:
        self._machine = grammar.machine.deep_copy()
        self._grammar = grammar
        self._ends = ends
        self._look()

    def advance(self, token: int) -> None:
        """The token has come.  Raises RequestError if it may not, or if a limit is reached."""
        self._machine.consume_token(token)
        self._look()

    def _look(self) -> None:
        grammar = self._grammar
        words = np.zeros(len(grammar.eos), np.uint32)
        sentence = False
        if not self._machine.is_error():
            mask = np.frombuffer(self._machine.compute_bitmask(), np.uint32)  # as wide as the tokenizer, or wider
            words[:] = mask[: len(words)]
            sentence = bool((mask[: len(grammar.sentinels)] & grammar.sentinels).any())
            words &= ~grammar.barred
        if self._machine.is_error():
            raise RequestError(_shortened(self._machine.get_error()))
        self.complete = not words.any()
        if sentence and self._ends:
            words |= grammar.eos
        self.words = words


class Follower:
    """A matcher whose work is done elsewhere: `push` here, then `look` in one other thread, and until that returns
    nothing else.  It is `due` from its making, and from every `push`, until whoever has had it look is `done`."""

    def __init__(self, grammar: Grammar, *, ends: bool) -> None:
        self.due = True
        self.slow = False  # the last `look` took long
        self.error: str | None = None  # why it cannot go on
        self.limited = False  # because the grammar has come to a limit
        self.grammar = grammar
        self._ends = ends
        self._matcher: Matcher | None = None
        self._token = -1

    def push(self, token: int) -> None:
        """The token has come."""
        self._token = token
        self.grammar.followed += 1
        self.due = True

    def look(self) -> None:
        """What may come next."""
        self.error = "its mask could not be computed"  # unless one of the next lines says otherwise
        try:
            if self._matcher is None:
                self._matcher = Matcher(self.grammar, ends=self._ends)
            else:
                self._matcher.advance(self._token)
            self.error = None
        except RequestError as error:
            self.error = error.message
            self.limited = True

    def done(self) -> None:
        """In the thread that pushes: what `look` has found may be used."""
        self.due = False

    @property
    def begun(self) -> bool:
        """There has been a mask."""
        return self._matcher is not None

    @property
    def words(self) -> UInt32:
        """As of a matcher."""
        assert self._matcher is not None and not self.due
        return self._matcher.words

    @property
    def complete(self) -> bool:
        """As of a matcher."""
        assert self._matcher is not None and not self.due
        return self._matcher.complete


class Compiler:
    """For one model.  `tokenizer`: the directory of its tokenizer.json, None: it has none."""

    def __init__(self, tokenizer: str | None, vocab_size: int, eos: Sequence[int]) -> None:
        self._directory = tokenizer
        self._vocab_size = vocab_size
        self._eos = _words(eos, vocab_size)
        self._tokenizer: LLTokenizer | None = None

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """Raises RequestError that names the field."""
        from llguidance import LLMatcher, LLParserLimits

        field = f"structured_outputs.{asked.kind}"
        tokenizer = self.load()
        try:
            source = _source(asked)
        except ValueError as error:
            raise unusable(field, str(error)) from None
        machine = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False, **LIMITS))
        sentinels = tokenizer.eos_tokens
        room = 32 * len(self._eos)
        barred = _words([*sentinels, *range(self._vocab_size, room)], room)
        grammar = Grammar(machine, _words(sentinels, tokenizer.vocab_size), barred, self._eos)
        try:
            Matcher(grammar, ends=True)  # what can be known to be wrong before the first token is known now
        except RequestError as error:
            raise unusable(field, error.message) from None
        return grammar

    def try_out(self, asked: StructuredOutputs) -> Cost:
        """Compile, and write the beginnings of a few random texts: some grammars compile, but come to a limit with
        their second token.  Measures the memory as growth of this process, which must do nothing else meanwhile.
        Raises RequestError that names the field."""
        before, began = resident(), time.monotonic()
        grammar = self.compile(asked)
        compiled, seconds = resident(), time.monotonic() - began
        chance, tokens = random.Random(0), 0
        try:
            for _ in range(WALKS):
                matcher = Matcher(grammar, ends=False)
                for _ in range(WALK_TOKENS):
                    if matcher.complete or time.monotonic() - began > seconds + WALK_SECONDS:
                        break
                    allowed = np.flatnonzero(np.unpackbits(matcher.words.view(np.uint8), bitorder="little"))
                    matcher.advance(int(chance.choice(allowed)))
                    tokens += 1
        except RequestError as error:
            why = f"its texts come to a limit of grammars within {WALK_TOKENS} tokens: {error.message}"
            raise unusable(f"structured_outputs.{asked.kind}", why) from None
        now = resident()
        return Cost(max(0, now - before), max(0, now - compiled) / max(1, tokens), seconds)

    def load(self) -> LLTokenizer:
        """The tokenizer, at least as wide as the model's logits.  Raises RequestError."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            path = None if self._directory is None else Path(self._directory) / "tokenizer.json"
            if path is None or not path.is_file():
                raise RequestError(NO_TOKENIZER, field="structured_outputs")
            text = path.read_text(encoding="utf-8")
            try:
                width = LLTokenizer(text, slices=[]).vocab_size
                self._tokenizer = LLTokenizer(text, n_vocab=max(width, self._vocab_size))
            except ValueError as error:
                raise unusable("structured_outputs", f"of this model's tokenizer: {error}") from None
        return self._tokenizer


def resident() -> int:
    """Bytes of anonymous memory of this process, without what was freed."""
    give_back()
    with open("/proc/self/statm", "rb") as file:
        _, total, shared, *_ = map(int, file.read().split())
    return (total - shared) * PAGE


def give_back() -> None:
    """Return freed memory to the system, where the C library can: a few milliseconds."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def unusable(field: str, why: str) -> RequestError:
    """The library's complaint as a client's error."""
    return RequestError(f"{field} cannot be used: {_shortened(why)}", field=field)


def _source(asked: StructuredOutputs) -> str:
    """The grammar in the form that the library compiles."""
    from llguidance import LLMatcher

    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, asked.choice)))
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(asked.grammar)
    schema = asked.json if isinstance(asked.json, str) else '{"type":"object"}'
    if asked.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    white = WHITE if asked.whitespace_pattern is None else asked.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": white})


def _literal(text: str) -> str:
    """A regex for nothing but this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _words(ids: Sequence[int], vocab_size: int) -> UInt32:
    """The set of those ids that the vocabulary has, a bit for each: uint32[ceil(vocab_size / 32)]."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in ids:
        if 0 <= token < vocab_size:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words


def _shortened(complaint: str) -> str:
    """The library's words without its state and its picture of the place."""
    line = " ".join(complaint.partition("\n<")[0].split())
    if line == "NoExtensionBias":
        return "no text has this form"
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."
