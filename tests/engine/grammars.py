"""Grammars without the library: a machine that accepts three tokens and EOS, and slow compilers and masks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np

from tests.engine.solo import EOS
from tokserve.base.errors import RequestError
from tokserve.features.grammar.followed import FollowedGrammar
from tokserve.features.grammar.grammar import Grammar, GrammarState
from tokserve.protocol.params import StructuredOutputs

STEPS = [{3, 13}, {5}, {6, 16}]  # what may come, place by place


class Machine:
    """The library's part: a text of three tokens, then EOS.  After token 16 it fails."""

    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        self.tokens = tokens

    def deep_copy(self) -> Machine:
        return type(self)(self.tokens)

    def consume_token(self, token: int) -> None:
        self.tokens += (token,)

    def is_error(self) -> bool:
        return 16 in self.tokens

    def get_error(self) -> str:
        return "too complex"

    def compute_bitmask(self) -> bytes:
        place = len(self.tokens)
        return np.array([sum(1 << token for token in (STEPS[place] if place < 3 else EOS))], np.uint32).tobytes()


def compiled(machine: Machine) -> Grammar:
    """The grammar of such a machine."""
    eos = np.array([1 << EOS[0]], np.uint32)
    return Grammar(cast(Any, machine), eos, eos, eos)


class Matcher:
    """A grammar state whose masks are computed at once, and whose errors are raised."""

    def __init__(self, grammar: Grammar, *, ends: bool) -> None:
        self._state = GrammarState(grammar, ends=ends)
        self._compute()

    def advance(self, token: int) -> None:
        self._state.accept(token)
        self._compute()

    def _compute(self) -> None:
        self._state.compute_bitmask()
        self._state.commit()
        if self._state.error is not None:
            raise RequestError(self._state.error)
        self.bits, self.complete = self._state.bits, self._state.complete


class LateGrammars:
    """Takes the place of `Grammars`: a random generator decides when each is compiled, or fails to compile."""

    num_bytes = num_compiling = num_refused = 0

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._due: list[Future[Grammar]] = []

    def compile(self, outputs: StructuredOutputs, client: str = "") -> Future[Grammar]:
        self._due.append(Future())
        return self._due[-1]

    def finish(self, share: float) -> None:
        """Finish a random share of the grammars that are due."""
        for future in list(self._due):
            if self._rng.random() < share:
                self._due.remove(future)
                if not future.set_running_or_notify_cancel():
                    continue
                if self._rng.random() < 0.2:
                    future.set_exception(RequestError("cannot be used", field="structured_outputs.regex"))
                else:
                    future.set_result(compiled(Machine()))

    def forget(self, grammar: Grammar) -> None:
        pass


class LateMasks:
    """Takes the place of `MaskWorker`, without threads: a random generator decides in which turn a mask is computed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending: list[FollowedGrammar] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def submit(self, grammars: Iterable[FollowedGrammar]) -> None:
        for followed in grammars:
            if followed.state is not None and followed.state.pending and followed not in self._pending:
                self._pending.append(followed)

    def poll(self) -> list[FollowedGrammar]:
        computed = [followed for followed in self._pending if self._rng.random() < 0.6]
        for followed in computed:
            assert followed.state is not None
            followed.state.compute_bitmask()
            followed.state.commit()
            self._pending.remove(followed)
        return computed
