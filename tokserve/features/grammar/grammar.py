"""Structured outputs: a grammar is compiled, and an output follows it token by token.

llguidance does both: it reads the model's tokenizer.json and computes, as a bit per vocabulary id, which tokens keep
the text on a path to a sentence.  It is loaded, with the tokenizer, when the first grammar comes.  `LIMITS` bound what
the library spends on a token and how many states a grammar may have.  What compiling costs is not bounded here: a few
hundred bytes of grammar can need all the memory there is, so `trials` compiles each in another process first.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokserve.base.errors import RequestError
from tokserve.base.memory import give_back
from tokserve.protocol.params import WHITE, StructuredOutputs
from tokserve.protocol.plan import UInt32

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NICENESS = 10  # of threads that compile or compute slow masks: steps go first
NO_TOKENIZER = "structured_outputs needs a tokenizer (tokenizer.json), and there is none"
PAGE = os.sysconf("SC_PAGE_SIZE")
STACK = 256 << 20  # bytes of address space; the library descends a frame per rule that another names
EXCERPT = re.compile(r"\s*(\d+ \||\^)")  # a line of the grammar in a message, with its number, or a mark below one
SHOWN = 300  # characters of the library's complaint
DRAFT_SECONDS = 0.002  # that the masks of one request's drafts may take
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
    """A compiled grammar that the states of outputs are copied from, and sets of ids, a bit for each.

    `sentinels`: the library's EOS tokens, of the tokenizer's vocabulary.  Of the model's: `eos`, its own, and `barred`,
    ids that no text has (the sentinels, and bits past the last id).  `cost`: as measured in a trial; `num_accepted`:
    tokens that all its states have accepted, drafts included.
    """

    machine: LLMatcher
    sentinels: UInt32
    barred: UInt32
    eos: UInt32
    cost: Cost = Cost()
    num_accepted: int = 0

    @property
    def size(self) -> int:
        """Bytes of memory, estimated: the size that the trial measured, and since then growth at the trial's pace, up
        to the limit of lexer states.  The library does not report its memory."""
        growth = min(self.cost.per_token * self.num_accepted, STATE_BYTES * LIMITS["max_lexer_states"])
        return self.cost.size + int(growth)


class GrammarState:
    """How far one output has come in its grammar.  `ends`: the model's EOS tokens may end it.

    It is `pending` from its making, and from every `accept`, until `commit`.  Meanwhile `compute_bitmask` runs once, in
    any one thread, and nothing else is used.  `is_slow`: the last mask took long.  `error`: why the output cannot go
    on; `limited`: because the grammar has reached a limit.
    """

    def __init__(self, grammar: Grammar, *, ends: bool) -> None:
        self.grammar = grammar
        self.pending = True
        self.is_slow = False
        self.error: str | None = None
        self.limited = False
        self._ends = ends
        self._machine: LLMatcher | None = None
        self._tokens: list[int] = []  # accepted, not yet consumed by the machine
        self._bits: UInt32 | None = None
        self._complete = False

    def accept(self, token: int) -> None:
        """The output has a new token."""
        self._tokens.append(token)
        self.grammar.num_accepted += 1
        self.pending = True

    def compute_bitmask(self) -> None:
        """Compute which tokens may come next."""
        self.error = "its mask could not be computed"  # if one of the next lines raises
        if self._machine is None:
            self._machine = self.grammar.machine.deep_copy()
        for token in self._tokens:
            self._machine.consume_token(token)
        self._tokens.clear()
        self._bits, self._complete = self._next_ids(self._machine)
        self.limited = self._machine.is_error()
        self.error = _shortened(self._machine.get_error()) if self.limited else None

    def bits_along(self, drafts: Sequence[int]) -> list[UInt32]:
        """`bits`, and what may come after each of these drafts if it is sampled, by a copy of the machine.

        After a draft that may not come, and once this has taken `DRAFT_SECONDS`, nothing may: drafts from there on are
        rejected, and computed again as tokens.
        """
        assert self._machine is not None
        masks, machine = [self.bits], self._machine.deep_copy()
        until = time.monotonic() + DRAFT_SECONDS
        for draft in drafts:
            if not masks[-1][draft // 32] >> np.uint32(draft % 32) & 1 or time.monotonic() > until:
                break
            if self.grammar.eos[draft // 32] >> np.uint32(draft % 32) & 1:  # the end: nothing comes after it
                break
            machine.consume_token(draft)
            self.grammar.num_accepted += 1
            masks.append(self._next_ids(machine)[0])
        nothing = np.zeros_like(masks[0])
        return masks + [nothing] * (1 + len(drafts) - len(masks))

    def _next_ids(self, machine: LLMatcher) -> tuple[UInt32, bool]:
        """The bits, and whether the text is complete."""
        grammar = self.grammar
        bits = np.zeros(len(grammar.eos), np.uint32)
        is_sentence = False
        if not machine.is_error():
            mask = np.frombuffer(machine.compute_bitmask(), np.uint32)  # as wide as the tokenizer, or wider
            bits[:] = mask[: len(bits)]
            is_sentence = bool((mask[: len(grammar.sentinels)] & grammar.sentinels).any())
            bits &= ~grammar.barred
        complete = not bits.any()
        if is_sentence and self._ends:
            bits |= grammar.eos
        return bits, complete

    def commit(self) -> None:
        """Say, in the thread that accepts tokens, that the result of `compute_bitmask` may be used."""
        self.pending = False

    @property
    def has_bitmask(self) -> bool:
        """Whether a mask was computed before."""
        return self._bits is not None

    @property
    def bits(self) -> UInt32:
        """Which ids may come next, uint32[ceil(V / 32)]: EOS where the text is a sentence, and only if it `ends`."""
        assert self._bits is not None and not self.pending
        return self._bits

    @property
    def complete(self) -> bool:
        """Whether nothing but EOS may come."""
        assert not self.pending
        return self._complete


class Compiler:
    """Compiles the grammars of one model.  `tokenizer`: the directory of its tokenizer.json, None: it has none."""

    def __init__(self, tokenizer: str | None, vocab_size: int, eos: Sequence[int]) -> None:
        self._directory = tokenizer
        self._vocab_size = vocab_size
        self._eos = _bits(eos, vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._special_texts: list[str] = []

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Raises RequestError that names the field."""
        from llguidance import LLMatcher, LLParserLimits

        field = f"structured_outputs.{outputs.kind}"
        tokenizer = self.load()
        try:
            source = _source(outputs)
        except ValueError as error:
            raise unusable(field, str(error)) from None
        named = _plain_text(outputs)
        if any(text in named for text in self._special_texts):
            source = _unforced(source)
        machine = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False, **LIMITS))
        sentinels = tokenizer.eos_tokens
        room = 32 * len(self._eos)
        barred = _bits([*sentinels, *range(self._vocab_size, room)], room)
        grammar = Grammar(machine, _bits(sentinels, tokenizer.vocab_size), barred, self._eos)
        state = GrammarState(grammar, ends=True)
        state.compute_bitmask()  # finds what is wrong before the first token
        if state.error is not None:
            raise unusable(field, state.error)
        return grammar

    def try_out(self, outputs: StructuredOutputs) -> Cost:
        """Compile, and write the beginnings of a few random texts: some grammars compile, but come to a limit with
        their second token.  Measures the memory as growth of this process, which must do nothing else meanwhile.
        Raises RequestError that names the field."""
        before, began = resident(), time.monotonic()
        grammar = self.compile(outputs)
        compiled, seconds = resident(), time.monotonic() - began
        chance = random.Random(0)
        try:
            tokens = sum(_walk(grammar, chance, until=began + seconds + WALK_SECONDS) for _ in range(WALKS))
        except RequestError as error:
            reason = f"its texts come to a limit of grammars within {WALK_TOKENS} tokens: {error.message}"
            raise unusable(f"structured_outputs.{outputs.kind}", reason) from None
        now = resident()
        return Cost(max(0, now - before), max(0, now - compiled) / max(1, tokens), seconds)

    def load(self) -> LLTokenizer:
        """The tokenizer, at least as wide as the model's logits.  Raises RequestError."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            path = None if self._directory is None else Path(self._directory) / "tokenizer.json"
            if path is None or not path.is_file():
                raise RequestError(NO_TOKENIZER, field="structured_outputs")
            text = _without_prefix(path.read_text(encoding="utf-8"))
            try:
                file = msgspec.json.decode(text, type=_TokenizerFile)
                self._tokenizer = LLTokenizer(text, n_vocab=max(file.width, self._vocab_size))
            except (ValueError, msgspec.DecodeError) as error:
                raise unusable("structured_outputs", f"of this model's tokenizer: {error}") from None
            self._special_texts = [
                token.content for token in file.added_tokens if self._tokenizer.is_special_token(token.id)
            ]
        return self._tokenizer


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}  # a list: of tokens by id, with their scores


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that may put a space before a text, and that name tokens."""

    pre_tokenizer: Any = None
    model: _Vocabulary = msgspec.field(default_factory=_Vocabulary)
    added_tokens: list[_AddedToken] = []

    @property
    def width(self) -> int:
        """One more than the largest id."""
        vocab = self.model.vocab
        last = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
        return 1 + max([last, *(token.id for token in self.added_tokens)])


def _without_prefix(text: str) -> str:
    """tokenizer.json without the space that a byte-level tokenizer may put before a text: an output continues one."""

    def may_put_space(step: Any) -> bool:
        if isinstance(step, dict) and step.get("type") == "Sequence":
            return any(map(may_put_space, step.get("pretokenizers", ())))
        return isinstance(step, dict) and step.get("type") == "ByteLevel" and bool(step.get("add_prefix_space"))

    def without(step: dict[str, Any]) -> dict[str, Any]:
        if step["type"] == "Sequence":
            return step | {"pretokenizers": [without(inner) for inner in step["pretokenizers"]]}
        return step | {"add_prefix_space": False} if may_put_space(step) else step

    with suppress(msgspec.DecodeError):  # the library says what is wrong
        if may_put_space(msgspec.json.decode(text, type=_TokenizerFile).pre_tokenizer):
            described = json.loads(text)
            return json.dumps(described | {"pre_tokenizer": without(described["pre_tokenizer"])})
    return text


def _walk(grammar: Grammar, chance: random.Random, until: float) -> int:
    """Write the beginning of a random text; returns its tokens.  Raises RequestError where there is no way on."""
    state = GrammarState(grammar, ends=False)
    tokens = 0
    while True:
        state.compute_bitmask()
        state.commit()
        if state.error is not None:
            raise RequestError(state.error)
        if tokens == WALK_TOKENS or state.complete or time.monotonic() > until:
            return tokens
        allowed = np.flatnonzero(np.unpackbits(state.bits.view(np.uint8), bitorder="little"))
        state.accept(int(chance.choice(allowed)))
        tokens += 1


def resident() -> int:
    """Bytes of anonymous memory of this process, without what was freed."""
    give_back()
    with open("/proc/self/statm", "rb") as file:
        _, total, shared, *_ = map(int, file.read().split())
    return (total - shared) * PAGE


def lower_priority() -> None:
    """Let the threads of steps go before the calling thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def unusable(field: str, reason: str) -> RequestError:
    """The library's complaint as a client's error."""
    return RequestError(f"{field} cannot be used: {_shortened(reason)}", field=field)


def _source(outputs: StructuredOutputs) -> str:
    """The grammar in the form that the library compiles."""
    from llguidance import LLMatcher

    if outputs.regex is not None:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, outputs.choice)))
    if outputs.grammar is not None:
        return LLMatcher.grammar_from_lark(outputs.grammar)
    schema = outputs.json if isinstance(outputs.json, str) else '{"type":"object"}'
    if outputs.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    white = WHITE if outputs.whitespace_pattern is None else outputs.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": white})


def _plain_text(outputs: StructuredOutputs) -> str:
    """The texts that the grammar names, one after the other, without escapes."""
    if outputs.choice is not None:
        return "\n".join(outputs.choice)
    written = outputs.regex or outputs.grammar
    if written is None:
        try:
            written = json.dumps(
                json.loads(outputs.json if isinstance(outputs.json, str) else "{}"), ensure_ascii=False
            )
        except (ValueError, RecursionError):  # the library says what is wrong
            return ""
    return written.replace("\\", "")


def _unforced(source: str) -> str:
    """The grammar with texts that have only one way on written by any of their tokens.  Otherwise the library tokenizes
    such a text, and takes the text of a special token in it for that token, which the grammar does not allow."""
    if source.startswith('{"grammars"'):
        (grammar,) = json.loads(source)["grammars"]
        source = grammar["lark_grammar"] or f"start: %json {json.dumps(grammar['json_schema'])}"
    return '%llguidance {"no_forcing": true}\n' + source


def _literal(text: str) -> str:
    """A regex for nothing but this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _bits(ids: Sequence[int], vocab_size: int) -> UInt32:
    """The set of those ids that the vocabulary has, a bit for each: uint32[ceil(vocab_size / 32)]."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in ids:
        if 0 <= token < vocab_size:
            bits[token // 32] |= np.uint32(1 << token % 32)
    return bits


def _shortened(message: str) -> str:
    """The library's message without its state and its picture of the grammar."""
    lines = [line for line in message.partition("\n<")[0].splitlines() if not EXCERPT.match(line)]
    line = " ".join(" ".join(lines).split())
    if line == "NoExtensionBias":
        return "no text has this form"
    if "coerce_one_of" in line:
        return "a value may match several branches of a oneOf, and that cannot be excluded: use anyOf"
    if "Default retriever" in line:
        return "only references within the schema (#/...) are followed"
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."
