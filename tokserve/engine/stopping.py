"""When an output stops: EOS, stop tokens and sequences, limits, and repetition, in this order.

Repetition is detected with one number per pattern size: how many of the latest ids equal the id one pattern earlier.
`min_count` patterns in a row are (min_count - 1) * size such ids, so a token costs a comparison per size, however long
the output is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from tokserve.protocol.params import RepetitionDetection, SamplingParams

NO_IDS: frozenset[int] = frozenset()  # one for all: each empty set has 216 bytes


class Stop(NamedTuple):
    """Why an output stops, in the words of `Finish`."""

    reason: str
    detail: str
    stop: int | list[int] | None = None


class StopChecker:
    """The stop conditions of one output.  `limit`: tokens of prompt and output together.  A new token can stop the
    output only if it is one of the `candidates`, reaches the `limit`, or if all tokens must be checked (`always`).
    `ids`: EOS, ignored or not, and stop tokens."""

    __slots__ = (
        "_max_tokens",
        "_min_tokens",
        "_prompt_len",
        "_repetition",
        "_sequences",
        "_stop_ids",
        "always",
        "candidates",
        "eos",
        "ids",
        "limit",
    )

    def __init__(self, params: SamplingParams, eos: Sequence[int], prompt_len: int, limit: int) -> None:
        self.ids = tuple(sorted({*params.stop_token_ids, *eos}))
        self.eos = NO_IDS if params.ignore_eos else frozenset(eos)
        self._stop_ids = frozenset(params.stop_token_ids) if params.stop_token_ids else NO_IDS
        self._sequences: dict[int, list[array[int]]] = {}  # by last id
        for sequence in params.stop_token_sequences:
            self._sequences.setdefault(sequence[-1], []).append(array("i", sequence))
        has_stops = self._stop_ids or self._sequences
        self.candidates = self.eos | self._stop_ids | self._sequences.keys() if has_stops else self.eos
        detection = params.repetition_detection
        self._repetition = _Repetition(detection) if detection is not None and detection.max_pattern_size else None
        self.always = self._repetition is not None
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens
        self._prompt_len, self.limit = prompt_len, limit

    def check(self, tokens: array[int]) -> Stop | None:
        """Whether the last of `tokens`, prompt and output, ends the output; call it for every new token that can.  The
        order of these lines is the order of the stop conditions."""
        token, count = tokens[-1], len(tokens) - self._prompt_len
        pattern = 0 if self._repetition is None else self._repetition.append(tokens, count)
        if count >= self._min_tokens:
            if token in self.eos:
                return Stop("stop", "eos")
            if token in self._stop_ids:
                return Stop("stop", "stop_token", token)
            for sequence in self._sequences.get(token, ()):
                size = len(sequence)
                if size <= count and tokens[-size:] == sequence:
                    return Stop("stop", "stop_sequence", sequence.tolist())
        if count == self._max_tokens:
            return Stop("length", "max_tokens")
        if len(tokens) >= self.limit:
            return Stop("length", "context")
        if pattern and count >= self._min_tokens:
            return Stop("repetition", "repetition", tokens[-pattern:].tolist())
        return None


class _Repetition:
    """The repetitions of one output."""

    def __init__(self, detection: RepetitionDetection) -> None:
        repeats = detection.min_count - 1
        sizes = range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1)
        self._sizes = [(size, size * repeats) for size in sizes]
        self._equal = [0] * len(self._sizes)

    def append(self, tokens: array[int], count: int) -> int:
        """The last of `tokens` is new, the last `count` are output: the smallest pattern it completes, or 0."""
        token = tokens[-1]
        pattern = 0
        for index, (size, needed) in enumerate(self._sizes):
            if size >= count:
                break
            equal = self._equal[index] = self._equal[index] + 1 if tokens[-1 - size] == token else 0
            if equal >= needed and not pattern:
                pattern = size
        return pattern
