"""The prompts of a benchmark: made from a seed, or read from a file.

A `Conversation` has what each turn adds to the prompt, and the number of output tokens of each turn.  The caller
prepends the earlier turns with their outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from tokserve.base.errors import StartError
from tokserve.base.structs import UNREADABLE

Prompt = list[int] | str
Kind = Literal["random", "shared-prefix", "jsonl"]
KINDS: tuple[Kind, ...] = ("random", "shared-prefix", "jsonl")
LOWEST_ID = 10  # lower ids are special tokens in many vocabularies
DEFAULT_VOCAB = 256  # every model has that many ids
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "you",
    "that",
    "he",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
    "or",
    "had",
    "by",
    "hot",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to the prompt, and the number of output tokens."""

    prompt: Prompt
    output_len: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; most have one turn."""

    turns: list[Turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """What to make.  Lengths are in tokens, or words with `text`; `range_ratio` r draws them from [l(1-r), l(1+r)]."""

    kind: Kind = "random"
    count: int = 100
    input_len: int = 128
    output_len: int = 64
    turn_len: int | None = None  # of the turns after the first; None: input_len
    turns: int = 1
    shared_prefix_len: int | None = None  # in front of input_len
    group_size: int | None = None  # prompts in a row that share a prefix; None: all do
    range_ratio: float = 0.0
    path: str | None = None
    vocab_size: int = DEFAULT_VOCAB
    seed: int = 0
    text: bool = False

    def facts(self) -> dict[str, Any]:
        """The options for a result, under vLLM's names."""
        same = ("input_len", "output_len", "shared_prefix_len", "group_size", "range_ratio", "seed")
        return {"dataset": self.kind, "num_prompts": self.count} | {name: getattr(self, name) for name in same}

    def check(self) -> None:
        """Raise StartError for values out of range or in conflict."""
        if self.kind not in KINDS:
            raise StartError(f"--dataset must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("count", "input_len", "output_len", "turns", "turn_len", "group_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "num-prompts" if name == "count" else name.replace("_", "-")
                raise StartError(f"--{flag} must be at least 1, got {value}")
        if self.seed < 0:
            raise StartError(f"the seed of prompts must be at least 0, got {self.seed}")
        if not 0.0 <= self.range_ratio < 1.0:
            raise StartError(f"--range-ratio must be in [0, 1), got {self.range_ratio}")
        if self.vocab_size <= LOWEST_ID:
            raise StartError(f"--vocab-size must be above {LOWEST_ID}, got {self.vocab_size}")
        if (self.kind == "jsonl") != (self.path is not None):
            raise StartError("--dataset jsonl and --dataset-path go together")
        if self.kind == "shared-prefix" and not (self.shared_prefix_len and self.shared_prefix_len > 0):
            raise StartError("--dataset shared-prefix needs --shared-prefix-len of at least 1")
        if self.kind != "shared-prefix" and self.shared_prefix_len is not None:
            raise StartError("--shared-prefix-len needs --dataset shared-prefix")
        if self.kind != "shared-prefix" and self.group_size is not None:
            raise StartError("--group-size needs --dataset shared-prefix")
        if self.kind == "jsonl" and self.turns > 1:
            raise StartError("--turns needs a dataset that is made, not read from a file")


def make(spec: DatasetSpec, *, stream: int = 0) -> list[Conversation]:
    """The conversations of `spec`, always the same ones for the same spec.  Another `stream` gives other prompts with
    the same shared prefixes, for the warm-up."""
    spec.check()
    if spec.kind == "jsonl":
        return _read(spec)
    size = spec.group_size or spec.count
    prefixes = [_prefix(group, spec) for group in range(-(-spec.count // size))]
    rng = np.random.default_rng([spec.seed, 1, stream])
    return [_conversation(rng, prefixes[i // size], spec) for i in range(spec.count)]


def _prefix(group: int, spec: DatasetSpec) -> Prompt:
    """What the prompts of a group begin with."""
    seed = [spec.seed, 0, group] if group else [spec.seed, 0]
    return _prompt(np.random.default_rng(seed), spec.shared_prefix_len or 0, spec)


def _conversation(rng: np.random.Generator, prefix: Prompt, spec: DatasetSpec) -> Conversation:
    lengths = [spec.input_len] + [spec.turn_len or spec.input_len] * (spec.turns - 1)
    turns = []
    for number, length in enumerate(lengths):
        new = _prompt(rng, _length(rng, length, spec.range_ratio), spec)
        turns.append(Turn(joined(prefix, new) if number == 0 else new, _length(rng, spec.output_len, spec.range_ratio)))
    return Conversation(turns)


def joined(front: Prompt, back: Prompt) -> Prompt:
    """One prompt from two of the same kind."""
    if isinstance(front, str) and isinstance(back, str):
        return f"{front} {back}" if front else back
    assert not isinstance(front, str) and not isinstance(back, str), "ids and text in one conversation"
    return front + back


def _length(rng: np.random.Generator, middle: int, ratio: float) -> int:
    low, high = round(middle * (1.0 - ratio)), round(middle * (1.0 + ratio))
    return max(1, int(rng.integers(low, high + 1)))


def _prompt(rng: np.random.Generator, length: int, spec: DatasetSpec) -> Prompt:
    if spec.text:
        return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), length))
    return rng.integers(LOWEST_ID, spec.vocab_size, length).tolist()


class DatasetRow(msgspec.Struct):
    """A line of a JSONL dataset; other keys are allowed and ignored."""

    prompt: str | list[int]
    output_len: int | None = None


def _read(spec: DatasetSpec) -> list[Conversation]:
    """The first `count` rows; a shorter file is repeated from its beginning."""
    path = spec.path or ""
    decoder = msgspec.json.Decoder(DatasetRow)
    conversations: list[Conversation] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = decoder.decode(line)
                if not row.prompt or (row.output_len is not None and row.output_len < 1):
                    raise StartError(f"{path}:{number}: the prompt is empty or output_len is below 1")
                if spec.text and not isinstance(row.prompt, str):
                    raise StartError(f"{path}:{number}: this backend needs text prompts, the row has token ids")
                conversations.append(Conversation([Turn(row.prompt, row.output_len or spec.output_len)]))
                if len(conversations) == spec.count:
                    break
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise StartError(f"{path}:{number}: {error}") from None
    if not conversations:
        raise StartError(f"{path} has no rows")
    return [conversations[i % len(conversations)] for i in range(spec.count)]
