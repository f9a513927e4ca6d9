"""Structured outputs: grammars are compiled beside the loop, and followed token by token.

llguidance does both: it reads the model's tokenizer.json and says, as a bit per vocabulary id, which tokens keep the
text on a path to a sentence.  It is loaded, with the tokenizer, when the first grammar comes.  A few hundred bytes of
grammar can ask for all the memory there is, so each is tried in a process of its own before the engine compiles it;
what the library spends on a token is bounded by `LIMITS`.  Knows no requests, no steps and no logits.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokserve.config import Config
from tokserve.errors import RequestError
from tokserve.params import WHITE, StructuredOutputs
from tokserve.plan import UInt32

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 128  # compiled grammars
SECONDS = 10.0  # to compile one
START_SECONDS = 60.0  # of the process for trials
MEMORY = 2 << 30  # bytes of its address space
NICENESS = 10  # of the compiling thread and process: steps go first
NO_TOKENIZER = "structured_outputs needs a tokenizer (tokenizer.json), and there is none"
STACK = 256 << 20  # bytes of address space; the library descends a frame per rule that another names
SHOWN = 300  # characters of the library's complaint
LIMITS: dict[str, Any] = {  # what one grammar may cost, in the library's units
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,  # 10 ms, 50 for the worst known
    "step_max_items": 20_000,  # some ms
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # some 2 kB each
    "max_grammar_size": 100_000,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What outputs of one form begin from, and sets of ids, a bit for each.

    `sentinels`: the library's EOS tokens, of the tokenizer's vocabulary.  Of the model's: `eos`, its own, and `barred`,
    ids that no text has (the sentinels, and bits past the last id).
    """

    machine: LLMatcher
    sentinels: UInt32
    barred: UInt32
    eos: UInt32


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
        self.grammar = grammar
        self._ends = ends
        self._matcher: Matcher | None = None
        self._token = -1

    def push(self, token: int) -> None:
        """The token has come."""
        self._token = token
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


class Grammars:
    """Compiles beside the loop, in one thread, and keeps what it has compiled."""

    def __init__(self, config: Config, vocab_size: int, eos: Sequence[int]) -> None:
        tokenizer = None if config.server.tokens_only else config.model.tokenizer or config.model.model
        self._compiler = Compiler(tokenizer, vocab_size, eos)
        self._trial = Trial(tokenizer, vocab_size)
        self._kept: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "grammar", _yield_to_steps)  # starts its thread with the first grammar

    def compile(self, asked: StructuredOutputs) -> Future[Grammar]:
        """The grammar; it may be there already.  The future's exception is a RequestError that names the field."""
        key = msgspec.msgpack.encode(asked)
        known = self._kept.get(key)
        if known is not None and not (known.done() and known.exception() is not None):
            self._kept.move_to_end(key)
            return known
        usual = threading.stack_size(STACK)  # for the thread that the pool may start now
        try:
            future = self._kept[key] = self._pool.submit(self._compile, asked)
        finally:
            threading.stack_size(usual)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return future

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew for the next request: outputs share what the library has found out about a grammar, and its
        limits with it, so one that has come to a limit would fail others at once."""
        for key, known in list(self._kept.items()):
            if known.done() and known.exception() is None and known.result() is grammar:
                del self._kept[key]

    def close(self) -> None:
        """End the thread and its process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._trial.interrupt()
        self._pool.shutdown()
        self._trial.close()

    def _compile(self, asked: StructuredOutputs) -> Grammar:
        self._trial.run(asked)
        return self._compiler.compile(asked)


class Trial:
    """A process in which every grammar is compiled once before it is in the engine's own: what takes too long, or all
    the memory there is, or crashes the library, does it there."""

    def __init__(self, tokenizer: str | None, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", __name__, json.dumps([tokenizer, vocab_size])]
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, asked: StructuredOutputs) -> None:
        """Raises RequestError that names the field."""
        field = f"structured_outputs.{asked.kind}"
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it has ended between two trials: for want of memory elsewhere, say
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            if self._answer(START_SECONDS) is None:
                raise unusable(field, "the process that tries grammars does not start")
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # no answer comes then
            stdin.write(msgspec.json.encode(asked) + b"\n")
            stdin.flush()
        answer = self._answer(SECONDS)
        if answer is None:
            raise unusable(field, f"compiling it takes more than {SECONDS:g} s or {MEMORY >> 30} GiB")
        wrong = msgspec.json.decode(answer, type=list[str])
        if wrong:
            raise RequestError(wrong[1], field=wrong[0])

    def _answer(self, seconds: float) -> bytes | None:
        """A line; None if none comes, and then the process is gone."""
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        if line:
            return line
        self.close()
        return None

    def interrupt(self) -> None:
        """From any thread: make a trial that runs fail."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


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


def _yield_to_steps() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def main() -> None:
    """The other process: a line of JSON for a grammar, and as its answer [] or [field, message]."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer, vocab_size = json.loads(sys.argv[1])
    compiler = Compiler(tokenizer, vocab_size, eos=())

    def serve() -> None:
        with suppress(RequestError):  # it is told to every client
            compiler.load()
        print("[]", flush=True)
        for line in sys.stdin.buffer:
            wrong: list[str] = []
            end = int(time.process_time() + 2 * SECONDS)  # for the case that nobody is left to end this process
            resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
            try:
                compiler.compile(msgspec.json.decode(line, type=StructuredOutputs))
            except RequestError as error:
                wrong = [error.field or "", error.message]
            print(json.dumps(wrong), flush=True)

    threading.stack_size(STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
