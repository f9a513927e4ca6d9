"""`ScriptedModel`: an executor whose tokens and logprobs come from a script, at the times that the script names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tokserve.protocol.candidates import NO_CANDIDATE, candidate_rows
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS, ColumnRows, Int32
from tokserve.protocol.kv_spec import KVLayout, KVSpec
from tokserve.protocol.logprobs import logprob_records
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.plan import (
    NO_LEGAL_TOKEN,
    NOT_FINITE,
    OK,
    WITHHELD,
    DeviceFacts,
    GrammarBitmask,
    NewRow,
    StepPlan,
    StepResult,
    UInt32,
)
from tokserve.testing.script import ScriptedReply

logger = logging.getLogger(__name__)

DEFAULT_LOGPROB = -1.0
IDLE_SECONDS = 0.002  # between two steps in which all rows wait
NUM_BLOCKS = 1 << 16


@dataclass(slots=True)
class ScriptedChoice:
    """The reply of one choice, and how far its faults have come."""

    reply: ScriptedReply
    ready_at: dict[int, float] = field(default_factory=dict)  # by token index, once its delay has begun
    requested: set[tuple[str, int]] = field(default_factory=set)  # faults that were requested

    def holds(self, index: int, request_id: str, faults: Faults | None) -> bool:
        """Whether the token of this index must wait; requests what is to happen before it."""
        reply = self.reply
        if index in reply.delays and time.monotonic() < self.ready_at.setdefault(
            index, time.monotonic() + reply.delays[index]
        ):
            return True
        if index not in (reply.abort_at, reply.disconnect_at, *reply.versions):
            return False
        assert faults is not None
        if index == reply.abort_at:
            self._once("abort", index, lambda: faults.abort(request_id))
            return True
        if index == reply.disconnect_at:
            self._once("disconnect", index, lambda: faults.disconnect(request_id))
            return True
        if index in reply.versions and not faults.has_version(reply.versions[index]):
            self._once("version", index, lambda: faults.set_version(reply.versions[index]))
            return True
        return False

    def _once(self, fault: str, index: int, request: Callable[[], None]) -> None:
        if (fault, index) not in self.requested:
            self.requested.add((fault, index))
            request()


@dataclass(frozen=True)
class Faults:
    """How a script's faults are brought about."""

    abort: Callable[[str], None]
    disconnect: Callable[[str], None]
    set_version: Callable[[str], None]
    has_version: Callable[[str], bool]


@dataclass(slots=True)
class ScriptedSlot:
    """A request in a slot, and how many output tokens it has."""

    row: NewRow
    choice: ScriptedChoice
    num_output: int


class Row(NamedTuple):
    """The logprob and rank of a token, and its alternatives."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def _masks(bitmask: GrammarBitmask | None) -> tuple[dict[int, UInt32], set[int]]:
    """The mask of each slot's next token, and the slots that must not sample.  A slot's other masks are those of
    drafts, none of which a script accepts."""
    if bitmask is None:
        return {}, set()
    in_order = zip(bitmask.slots.tolist(), bitmask.bits, strict=True)
    return dict(reversed(list(in_order))), set(bitmask.withheld.tolist())


def _records(rows: Sequence[Row]) -> Int32:
    width = max((len(row.top_ids) for row in rows), default=0)
    ids, values = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        ids[index, : len(row.top_ids)] = row.top_ids
        values[index, : len(row.top_ids)] = row.top_logprobs
    return logprob_records(
        np.array([row.logprob for row in rows], np.float32), np.array([row.rank for row in rows], np.int32), ids, values
    )


def _candidates(task: SamplingParams, first: int, count: int) -> list[list[int]]:
    """The ids that are scored beside the prompt tokens from `first` on: the candidates, and -1 for all others."""
    if task.prompt_logprob_token_ids is None:
        return [[]] * count
    rows, at = candidate_rows(task.prompt_logprob_token_ids), first - task.prompt_logprobs_start
    of_each = [rows] * count if rows.ndim == 1 else rows[at : at + count]
    return [[*row.tolist(), NO_CANDIDATE] for row in of_each]


class ScriptedModel:
    """The executor of a scripted model, for one step in flight at a time.  `choices`: by request id; added before the
    request is submitted.  Weight updates and adapters are accepted, and change nothing."""

    def __init__(self, vocab_size: int, eos: int, block_size: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.choices: dict[str, ScriptedChoice] = {}
        self.faults: Faults | None = None
        self._vocab_size, self._eos = vocab_size, eos
        self._layout = KVLayout((KVSpec(1, 1, "float32"),), num_blocks, block_size)
        self._slots: dict[int, ScriptedSlot] = {}
        self._plan: StepPlan | None = None

    def start(self) -> DeviceFacts:
        """Does not load anything."""
        return DeviceFacts(self._layout, self._vocab_size, "0", {"scripted": True})

    def forward(self, plan: StepPlan) -> None:
        """Take note of the plan's requests."""
        for slot in plan.freed:
            del self._slots[slot]
        for row in plan.new:
            choice = self.choices[row.request_id]
            self._slots[row.slot] = ScriptedSlot(row, choice, len(row.tokens) - row.prompt_len)
        self._plan = plan

    def sample(self, bitmask: GrammarBitmask | None) -> Future[StepResult]:
        """The script's tokens.  A grammar does not change them: one that it does not allow ends the choice with an
        error, also the EOS token after the script's last."""
        plan, self._plan = self._plan, None
        assert plan is not None
        rows = list(zip(plan.slots.tolist(), plan.num_logits.tolist(), strict=True))
        status = np.full(len(rows), OK, np.uint8)
        counts = np.zeros(len(rows), np.int32)
        token_ids: list[int] = []
        logprobs: list[Row] = []
        masks, withheld = _masks(bitmask)
        for index, (slot_number, num_logits) in enumerate(rows):
            slot = self._slots[slot_number]
            if not num_logits:
                continue
            if slot_number in withheld or slot.choice.holds(slot.num_output, slot.row.request_id, self.faults):
                status[index] = WITHHELD
                continue
            if slot.num_output == slot.choice.reply.fail_at:
                status[index] = NOT_FINITE
                continue
            token, logprob = self._token(slot)
            if slot_number in masks and not masks[slot_number][token // 32] >> np.uint32(token % 32) & 1:
                logger.error(
                    "the script's token %d, number %d of request %s, is none that structured_outputs allows",
                    token,
                    slot.num_output,
                    slot.row.request_id,
                )
                status[index] = NO_LEGAL_TOKEN
                continue
            token_ids.append(token)
            logprobs.append(self._row(token, logprob, slot.row.task))
            counts[index] = 1
            slot.num_output += 1
        if (status == WITHHELD).all():
            time.sleep(IDLE_SECONDS)
        prompts = self._prompt_records(plan, [slot for slot, _ in rows])
        result: Future[StepResult] = Future()
        result.set_result(
            StepResult(
                plan.step,
                counts,
                np.array(token_ids, np.int32),
                status,
                {LOGPROBS: ColumnRows(_records(logprobs))},
                {PROMPT_LOGPROBS: prompts},
            )
        )
        return result

    def _prompt_records(self, plan: StepPlan, slots: list[int]) -> dict[int, Int32]:
        """The records of the prompt tokens that the plan's rows predict, by row."""
        records = {}
        for index, slot in enumerate(slots):
            row, start = self._slots[slot].row, int(plan.num_computed[index])
            task = row.task
            if not isinstance(task, SamplingParams) or task.prompt_logprobs is None:
                continue
            first = max(start + 1, task.prompt_logprobs_start)
            following = row.tokens[first : min(start + int(plan.num_tokens[index]) + 1, row.prompt_len)].tolist()
            if following:
                width = self._width(task.prompt_logprobs)
                pairs = zip(following, _candidates(task, first, len(following)), strict=True)
                records[index] = _records([self.logprobs(token, DEFAULT_LOGPROB, width, ids) for token, ids in pairs])
        return records

    def _token(self, slot: ScriptedSlot) -> tuple[int, float]:
        """The next token's id and logprob."""
        reply, index = slot.choice.reply, slot.num_output
        if index >= len(reply.token_ids):
            return self._eos, DEFAULT_LOGPROB
        return reply.token_ids[index], DEFAULT_LOGPROB if reply.logprobs is None else reply.logprobs[index]

    def _row(self, token: int, logprob: float, task: SamplingParams | PoolingParams) -> Row:
        """The logprobs of an output token, as wide as its request wants them."""
        if not isinstance(task, SamplingParams):
            return Row(logprob, 1, [], [])
        return self.logprobs(token, logprob, self._width(task.logprobs or 0), task.logprob_token_ids or ())

    def logprobs(self, token: int, logprob: float, top: int, ids: Sequence[int]) -> Row:
        """Made-up logprobs of a token, of `top` alternatives, and of `ids`: the token is the most probable, and each
        id that follows it is less probable by 1."""
        ids = [(token + rank) % self._vocab_size for rank in range(top)] + list(ids)
        return Row(logprob, 1, ids, [logprob - (other - token) % self._vocab_size for other in ids])

    def _width(self, count: int) -> int:
        return self._vocab_size if count < 0 else count

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Admin methods have no effect."""
        return [] if method in ("collective_rpc", "apply_model") else None

    def background(self, method: str, args: Mapping[str, Any]) -> Future[Any]:
        """Weight updates are received and dropped; there are no checksums."""
        empty = {"begin_update": True, "checksums": {}, "checkpoint_checksums": {"checkpoint": {}, "tied": {}}}
        done: Future[Any] = Future()
        done.set_result(empty.get(method))
        return done

    def watch(self, wake: Callable[[], object]) -> None:
        """Does nothing: the device is never lost."""

    def check(self) -> None:
        """Does nothing: the device is never lost."""

    def interrupt(self) -> None:
        """Does nothing: nothing waits."""

    def close(self) -> None:
        """Does nothing: nothing is held."""
