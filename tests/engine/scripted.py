"""An executor without a model that checks every plan.

The next token is that of `solo`.  The KV cache is simulated: each (block, offset) holds what was written there (a hash
of all tokens and features up to that position), and every step compares all that a row would read with what the
request's own tokens demand.  A wrong prefix hit, a stale block, or a write into another request's block fails the step.
Drafts are accepted for as long as they are what would have been sampled.  With `states`, each slot has a recurrent
state, the hash of the tokens up to its position, and a step fails whose state is not one to go on from: a wrong
snapshot, or a draft that was rejected.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from tests.engine.scripted_copies import ScriptedCopies
from tests.engine.scripted_states import States, demand
from tests.engine.solo import START, VOCAB, chain, draw, logprob_row, logprob_width, prefixes_of, rows_of, vector
from tokserve.base.errors import RequestError
from tokserve.config import Config
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS, ColumnRows
from tokserve.protocol.images import ImageFormat
from tokserve.protocol.kv_spec import KVLayout, KVSpec, StateLayout, StateSpec
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.plan import (
    DRAWN,
    NO_LEGAL_TOKEN,
    NOT_FINITE,
    OK,
    WITHHELD,
    DeviceFacts,
    DraftPasses,
    GrammarBitmask,
    Int32,
    NewRow,
    StepPlan,
    StepResult,
)


@dataclass
class Slot:
    """What the device knows of one slot.  While a step is not sampled from, `tokens` ends in its drafts."""

    row: NewRow
    tokens: list[int]
    prefixes: list[bytes]  # of tokens[:i]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    entered: int = -1  # step
    planned: int = -1  # the last step with a row of it
    sampled: int = -1  # the last step that sampled
    rejected: dict[int, int] = field(default_factory=dict)  # drafts by step
    state: bytes = START  # of the tokens up to position num_state
    num_state: int = 0

    def learn(self, token: int) -> None:
        self.tokens.append(token)
        self.prefixes.append(chain(self.prefixes[-1], token))

    def truncate(self, length: int) -> None:
        del self.tokens[length:], self.prefixes[length + 1 :]

    def ahead(self, collected: int) -> int:
        """How many positions the host counts too many: drafts rejected by steps that it has not collected."""
        return sum(count for step, count in self.rejected.items() if step > collected)


class Deferred(Future[StepResult]):
    """A future that tells when its result is taken."""

    def __init__(self, value: StepResult, taken: Callable[[int], None]) -> None:
        super().__init__()
        self.set_result(value)
        self._taken = taken

    def result(self, timeout: float | None = None) -> StepResult:
        value = super().result(timeout)
        self._taken(value.step)
        return value


class ScriptedExecutor:
    """Checks and executes plans.  `spoil`: (seed, position) pairs whose logits are NaN; `bar`: those whose parameters
    leave nothing; `fail_at`: a step that raises.  `results`: of all steps."""

    def __init__(
        self,
        config: Config,
        num_blocks: int = 64,
        block_size: int = 4,
        states: StateLayout | None = None,
        images: ImageFormat | None = None,
    ) -> None:
        self.scheduler = config.scheduler
        self.context = min(config.model.max_model_len or 10**9, num_blocks * block_size)
        self.size = block_size
        self.max_loras = config.lora.max_loras
        specs = (KVSpec(1, 1, "float32"), *((StateSpec(2, 1, "float32"),) if states else ()))
        store = {"kv_store_slots": 64, "kv_block_bytes": specs[0].block_bytes(block_size)}
        self.facts = DeviceFacts(
            KVLayout(specs, num_blocks, block_size, states),
            VOCAB,
            "v1",
            {"scripted": True} | ({} if config.kv.store() is None else store),
            {"image": 0},
            images,
        )
        self.states = States(states)
        self.slots: dict[int, Slot] = {}
        self.kv: dict[tuple[int, int], tuple[bytes, int]] = {}  # (block, offset) -> (content, step that wrote it)
        self.in_flight: deque[int] = deque()
        self.unsampled: StepPlan | None = None
        self.collected = -1
        self.accepted = self.rejected = 0  # drafts
        self.drafted: list[int] = []  # of the last plan
        self.behind = False  # whether the draft model has yet to catch up
        self.results: list[StepResult] = []
        self.depths: list[int] = []  # steps in flight after each forward
        self.plans: list[StepPlan] = []
        self.computed: dict[str, int] = {}  # positions by request
        self.spoil: set[tuple[int, int]] = set()
        self.bar: set[tuple[int, int]] = set()
        self.fail_at: int | None = None
        self.start_error: Exception | None = None
        self.permits: threading.Semaphore | None = None  # if set, each step takes one
        self.closed = False
        self.weights: str | None = ""  # None: given back
        self.has_kv = True
        self.kv_weights: dict[tuple[int, int], str] = {}
        self.kv_read: dict[tuple[str, int], list[str]] = {}  # (request, output index) -> what made the KV, by position
        self.only_own_kv = False  # no row may read KV that other weights made
        self.staged: str | None = None
        self.adapters: dict[int, str] = {}  # slot -> what was put there
        self.adapter_read: str | None = None
        self.adapter_from_anywhere: bool | None = None
        self.directories: dict[str, tuple[str, str]] = {}  # path -> the weights there, and the stamp of the files
        self.copies = ScriptedCopies(self)
        self.copy = self.copies.copy
        self.has_room_for_two = True  # whether there is room for two sets of weights
        self.commit_error: Exception | None = None  # raised when the swap has happened
        self.interrupted = 0
        self.slow: deque[tuple[Future[Any], Callable[[], Any]]] | None = None  # if set, what `background` puts off

    def start(self) -> DeviceFacts:
        if self.start_error is not None:
            raise self.start_error
        return self.facts

    def call(self, method: str, args: dict[str, Any]) -> Any:
        demand(not self.in_flight, f"{method} while a step is in flight")
        if method == "release":
            self.has_kv = self.has_kv and "kv_cache" not in args["tags"]
            self.weights = None if "weights" in args["tags"] else self.weights
            if not self.has_kv:
                self.kv.clear()
                self.states.snapshots.clear()
        elif method == "restore":
            demand(args["tags"] == ["kv_cache"] and not self.has_kv, "the KV memory is there")
            self.has_kv = True
        elif method == "commit_update":
            demand(self.staged, "nothing is staged")
            self.weights, self.staged = self.staged, None
            if self.commit_error is not None:
                raise self.commit_error
        elif method == "place_adapter":
            demand(self.adapter_read is not None, "no adapter was read")
            demand(0 <= args["slot"] < self.max_loras, "no such adapter slot")
            self.adapters[args["slot"]], self.adapter_read = str(self.adapter_read), None
        elif method == "collective_rpc":
            return f"{args['method']}{args['args']}{args['kwargs']}"
        elif method == "apply_model":
            return args["function"]
        else:
            raise NotImplementedError(method)

    def background(self, method: str, args: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.slow is None:
            self._finish(future, lambda: self._stage(method, args))
        else:
            self.slow.append((future, lambda: self._stage(method, args)))
        return future

    def settle(self, count: int = 1000) -> None:
        """Let `count` calls of `background` come to their end."""
        while self.slow and count:
            self._finish(*self.slow.popleft())
            count -= 1

    def _finish(self, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            future.set_result(work())
        except RequestError as error:
            future.set_exception(error)

    def _stage(self, method: str, args: dict[str, Any]) -> Any:
        if method == "begin_update":
            demand(self.staged is None, "two updates at once")
            demand(args["have_weights"] == (self.weights is not None), "who has the weights?")
            self.staged = ""
            return self.has_room_for_two or self.weights is None
        if method == "receive_update" and args["source"].get("weight_dir") in self.directories:
            demand(self.staged is not None, "no update is open")
            self.staged, stamp = self.directories[args["source"]["weight_dir"]]
            return stamp
        if method == "receive_update":
            if self.staged is None or "weights" not in args["source"]:
                raise RequestError(str(args["source"].get("fault", "no update is open")))
            self.staged = args["source"]["weights"]
        elif method == "feed_update":
            demand(self.staged is not None, "no update is open")
            if args["broken"]:
                raise RequestError("the sender left")
            self.staged = f"{self.staged}{args['chunk'].decode()}"
        elif method == "finish_update" and not self.staged:
            raise RequestError("no tensor came")
        elif method == "finish_update":
            return {"num_bytes": len(str(self.staged))}
        elif method == "abort_update":
            self.staged = None
        elif method == "read_adapter":
            if "pushed" in args:
                raise RequestError("push it again")
            if args["lora_path"].startswith("bad"):
                raise RequestError("no adapter", field="lora_path")
            self.adapter_read = args["lora_path"]
            self.adapter_from_anywhere = args["anywhere"]
            return self.adapter_read
        elif method == "plan_chain":
            return {"adapter": True} if self.directories.get(args["weight_dir"], ("", ""))[0] == "adapter" else None
        elif method == "kv_identity":
            return {"weights": str(self.weights)}
        elif method == "is_same_update":
            return self.staged == self.weights
        elif method == "checksums":
            return {"all": str(self.weights)}
        elif method == "checkpoint_checksums":
            return {"checkpoint": {"all": str(self.weights)}, "tied": {}}
        elif method == "weights_checksum":
            return f"sum of {self.weights}"
        return None

    def watch(self, wake: Callable[[], object]) -> None:
        """It is never lost."""

    def check(self) -> None:
        """It is never lost."""

    def interrupt(self) -> None:
        self.interrupted += 1
        self.settle()

    def close(self) -> None:
        self.closed = True

    def forward(self, plan: StepPlan) -> None:
        if plan.step == self.fail_at:
            raise RuntimeError("the device is on fire")
        if self.permits is not None:
            demand(self.permits.acquire(timeout=600), "no permit to step")
        demand(self.weights is not None and self.has_kv, "a step without weights or KV memory")
        demand(plan.step == len(self.plans), "steps are not numbered one after the other")
        demand(len(self.in_flight) < self.scheduler.steps_in_flight, "too many steps in flight")
        demand(self.unsampled is None, "a forward pass before the last one was sampled from")
        self.plans.append(plan)
        self.in_flight.append(plan.step)
        self.depths.append(len(self.in_flight))
        self.unsampled = plan
        self._enter(plan)
        self._check_columns(plan)
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            self._check_cached(plan, self.slots[slot], self.slots[slot].computed)
            self._write(plan.step, self.slots[slot], count)
        self.states.advance(plan, self.slots, self._weights)
        for slot in plan.slots.tolist():
            self._check_read(self.slots[slot])

    def sample(self, bitmask: GrammarBitmask | None) -> Future[StepResult]:
        plan, self.unsampled = self.unsampled, None
        assert plan is not None, "nothing to sample from"
        self.results.append(self._result(plan, bitmask))
        return Deferred(self.results[-1], self._taken)

    def _taken(self, step: int) -> None:
        if self.in_flight and self.in_flight[0] == step:
            self.collected = self.in_flight.popleft()
        demand(self.collected >= step, "results are taken out of order")

    def _enter(self, plan: StepPlan) -> None:
        for slot in plan.freed:
            demand(slot in self.slots, f"slot {slot} is freed, but was not in use")
            demand(self.slots[slot].planned <= self.collected, f"slot {slot} is freed while a step in flight has it")
            del self.slots[slot]
        for row in plan.new:
            demand(row.slot not in self.slots, f"slot {row.slot} is taken")
            demand(row.tokens.dtype == np.int32 and len(row.tokens) >= row.prompt_len > 0, "tokens of a new row")
            demand(0 <= row.slot < self.scheduler.rows, "slot out of range")
            tokens = row.tokens.tolist()
            self.slots[row.slot] = slot = Slot(row, tokens, prefixes_of(tokens, row.features), entered=plan.step)
            self.states.restore(slot, self._weights(slot))
        for slot, first, blocks in plan.blocks:
            table = self.slots[slot].blocks
            demand(blocks and first == len(table), f"slot {slot}: {first} is not the end of its block table")
            demand(all(0 <= block < self.facts.layout.num_blocks for block in blocks), "no such block")
            table += blocks
            demand(len(set(table)) == len(table), f"slot {slot} has a block twice")
        for row in plan.new:
            if row.copied_block is not None:
                self._copy_block(self.slots[row.slot], *row.copied_block)

    def _copy_block(self, slot: Slot, source: int, target: int) -> None:
        shared = {block for other in self.slots.values() if other is not slot for block in other.blocks}
        demand(target in slot.blocks and target not in shared, f"{slot.row.request_id}: copies to the block {target}")
        for offset in range(self.size):
            self.kv.pop((target, offset), None)
            if (source, offset) in self.kv:
                self.kv[target, offset] = self.kv[source, offset]
                self.kv_weights[target, offset] = self.kv_weights[source, offset]

    def _check_columns(self, plan: StepPlan) -> None:
        slots = plan.slots.tolist()
        demand(slots, "an empty plan")
        demand(len(set(slots)) == len(slots), "a slot has two rows")
        demand(set(slots) <= self.slots.keys(), "a row for an empty slot")
        demand({row.slot for row in plan.new} <= set(slots), "a new slot has no row")
        demand((plan.num_tokens > 0).all(), "a row without tokens")
        demand(plan.num_tokens.sum() <= self.scheduler.token_budget, "over the budget")
        columns = (plan.slots, plan.num_tokens, plan.num_computed, plan.num_drafts, plan.num_logits)
        demand(all(column.dtype == np.int32 for column in (*columns, plan.draft_token_ids)), "column types")
        demand(len({len(column) for column in columns}) == 1, "columns of different lengths")
        demand(len(plan.draft_token_ids) == plan.num_drafts.sum(), "draft ids")
        adapters = [self.slots[number].row.adapter for number in slots]
        demand(len(list(groupby(adapters))) == len(set(adapters)), "rows of one adapter are not neighbours")
        drafts = iter(plan.draft_token_ids.tolist())
        self.drafted = []
        for number, count, start, num_drafts, num_logits in zip(*(c.tolist() for c in columns), strict=True):
            self._check_row(plan.step, self.slots[number], start, count, num_drafts, num_logits)
            for _ in range(num_drafts):
                self.drafted.append(self._drawn(self.slots[number], next(drafts)))
                self.slots[number].learn(self.drafted[-1])

    def _drawn(self, slot: Slot, token: int) -> int:
        """The draft, or what the draft model draws: two times in three what would be sampled without a grammar."""
        if token != DRAWN:
            return token
        end = len(slot.tokens)
        token = draw(slot.prefixes[-1], slot.row.seed, end, (), weights=self._weights(slot))
        return token if (slot.row.seed + end) % 3 else (token + 1) % VOCAB

    def drafts(self) -> Int32:
        demand(self.unsampled is not None, "drafts of a step that was sampled from")
        return np.array(self.drafted, np.int32)

    def _check_row(self, step: int, slot: Slot, start: int, count: int, num_drafts: int, num_logits: int) -> None:
        name, task = slot.row.request_id, slot.row.task
        slot.planned = step
        if slot.entered == step:
            slot.computed = start
        ahead = slot.ahead(self.collected)
        demand(start - ahead == slot.computed, f"{name}: starts at {start} - {ahead}, computed {slot.computed}")
        demand(start + count <= len(slot.blocks) * self.size, f"{name}: no block for position {start + count - 1}")
        if self.facts.images is not None and self.facts.images.bidirectional:
            cut = [f for f in slot.row.features if f.start < start + count < f.start + f.length]
            demand(not cut, f"{name}: ends in an image, at {start + count}")
        known = slot.computed + count - num_drafts
        demand(known <= len(slot.tokens), f"{name}: computes tokens that were not sampled")
        samples = known == len(slot.tokens) and isinstance(task, SamplingParams) and task.max_tokens != 0
        demand(num_logits == (num_drafts + 1 if samples else 0), f"{name}: num_logits")
        if num_drafts:
            demand(samples, f"{name}: drafts in the middle of a prompt")
        if samples:
            limit = slot.row.prompt_len + (self.context if task.max_tokens is None else task.max_tokens)
            demand(start + count < min(limit, self.context), f"{name}: scheduled beyond its length")

    def _check_cached(self, plan: StepPlan, slot: Slot, start: int) -> None:
        """What a new row takes from the cache was computed by steps whose results are known."""
        if slot.entered == plan.step:
            for position in range(start):
                content, step = self.kv.get(self._place(slot, position), (b"", -1))
                demand(
                    content == slot.prefixes[position + 1], f"{slot.row.request_id}: a wrong prefix hit at {position}"
                )
                demand(step <= self.collected, f"{slot.row.request_id}: a prefix hit on a step in flight")
                weights = self.kv_weights[self._place(slot, position)]
                demand(weights == self._weights(slot), f"{slot.row.request_id}: a prefix hit on KV of other weights")

    def _weights(self, slot: Slot) -> str:
        """What computes a row: the weights, and its adapter."""
        adapter = slot.row.adapter
        demand(adapter < 0 or adapter in self.adapters, f"{slot.row.request_id}: its adapter's slot is empty")
        return str(self.weights) + ("" if adapter < 0 else f"+{self.adapters[adapter]}")

    def _kv_of(self, slot: Slot, end: int) -> list[str]:
        """What made the KV of each of the first `end` positions."""
        return [self.kv_weights[self._place(slot, position)] for position in range(end)]

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.blocks[position // self.size], position % self.size

    def _write(self, step: int, slot: Slot, count: int) -> None:
        start, end = slot.computed, slot.computed + count
        shared = {block for other in self.slots.values() if other is not slot for block in other.blocks}
        for position in range(start, end):
            place, content = self._place(slot, position), slot.prefixes[position + 1]
            old = self.kv.get(place, (b"", -1))
            same = old[0] == content  # the last token after a full hit: written again, to the same bits
            demand(place[0] not in shared or same, f"{slot.row.request_id} writes into the shared block {place[0]}")
            self.kv[place] = (content, min(step, old[1]) if same else step)
            self.kv_weights[place] = self._weights(slot)
        slot.computed = end
        self.computed[slot.row.request_id] = self.computed.get(slot.row.request_id, 0) + end - start

    def _check_read(self, slot: Slot) -> None:
        for position in range(slot.computed):
            actual = self.kv.get(self._place(slot, position), (b"", -1))[0]
            demand(actual == slot.prefixes[position + 1], f"{slot.row.request_id} reads a stale block at {position}")
            if self.only_own_kv:
                made_by = self.kv_weights[self._place(slot, position)]
                demand(made_by == self._weights(slot), f"{slot.row.request_id} reads KV of the weights {made_by!r}")

    def _result(self, plan: StepPlan, bitmask: GrammarBitmask | None) -> StepResult:
        tokens: list[int] = []
        counts, status, rows, prompt_rows, pooled = [], [], [], {}, {}
        masks: dict[int, list[int]] = {}
        withheld: set[int] = set()
        if bitmask is not None:
            demand(bitmask.slots.dtype == bitmask.withheld.dtype == np.int32, "types of a bitmask")
            demand(bitmask.bits.dtype == np.uint32 and len(bitmask.bits) == len(bitmask.slots), "bits")
            for number, row in zip(bitmask.slots.tolist(), bitmask.bits.tolist(), strict=True):
                masks.setdefault(number, []).append(row[0])
            withheld = set(bitmask.withheld.tolist())
        sampling = set(plan.slots[plan.num_logits > 0].tolist())
        demand(masks.keys() | withheld <= sampling and not masks.keys() & withheld, "a mask for a row without logits")
        for i, number in enumerate(plan.slots.tolist()):
            slot, task = self.slots[number], self.slots[number].row.task
            count, start = int(plan.num_tokens[i]), self.slots[number].computed - int(plan.num_tokens[i])
            failed = False
            if isinstance(task, PoolingParams):
                failed = (slot.row.seed, slot.computed) in self.spoil
                if slot.computed == slot.row.prompt_len and not failed:
                    pooled[i] = vector(slot.prefixes[slot.computed])
            elif task.prompt_logprobs is not None:
                width = VOCAB if task.prompt_logprobs < 0 else task.prompt_logprobs
                last = min(start + count + 1, slot.row.prompt_len)
                scored = [
                    logprob_row(
                        slot.prefixes[j], slot.tokens[j], width, weights="|".join(sorted(set(self._kv_of(slot, j))))
                    )
                    for j in range(max(start + 1, task.prompt_logprobs_start), last)
                ]
                if scored:
                    prompt_rows[i] = rows_of(scored, width, padding=2)
            if number in withheld:
                demand(task.structured_outputs is not None, "a row without a grammar is withheld")
                slot.truncate(len(slot.tokens) - int(plan.num_drafts[i]))
                slot.computed -= int(plan.num_logits[i])
                counts.append(0)
                status.append(WITHHELD)
            elif plan.num_logits[i]:
                demand((number in masks) == (task.structured_outputs is not None), f"{slot.row.request_id}: mask")
                num_drafts = int(plan.num_drafts[i])
                row_masks = masks.get(number, [~0] * (num_drafts + 1))
                demand(
                    len(row_masks) == num_drafts + 1,
                    f"{slot.row.request_id}: {len(row_masks)} masks for {num_drafts} drafts",
                )
                sampled, state = self._sampled(slot, plan.step, num_drafts, row_masks, rows)
                tokens += sampled
                counts.append(len(sampled))
                status.append(state)
            else:
                counts.append(0)
                status.append(NOT_FINITE if failed else OK)
        widest = max((len(row[2]) for row in rows), default=0)
        columns = {LOGPROBS: ColumnRows(rows_of(rows, widest, padding=1))} if widest or rows else {}
        return StepResult(
            plan.step,
            np.array(counts, np.int32),
            np.array(tokens, np.int32),
            np.array(status, np.uint8),
            columns,
            {PROMPT_LOGPROBS: prompt_rows, "pooled": pooled},
            draft_passes=self._draft_passes(plan),
            saved=self.states.saved.pop(plan.step, []),
        )

    def _draft_passes(self, plan: StepPlan) -> DraftPasses | None:
        if DRAWN not in plan.draft_token_ids:
            return None
        longest = int(plan.num_drafts.max())
        return DraftPasses(0.5, longest, longest, np.flatnonzero(plan.num_drafts).tolist() if self.behind else [])

    def _sampled(
        self, slot: Slot, step: int, num_drafts: int, masks: list[int], rows: list[tuple[float, int, Any, Any]]
    ) -> tuple[list[int], int]:
        """A row's new tokens, and its status; the drafts that are not what would have been sampled are dropped."""
        row, task = slot.row, slot.row.task
        assert isinstance(task, SamplingParams)
        known = len(slot.tokens) - num_drafts
        drafts = slot.tokens[known:]
        slot.truncate(known)
        slot.sampled = step
        tokens: list[int] = []
        for draft, mask in zip([*drafts, -1], masks, strict=True):
            end = len(slot.tokens)
            if not mask % (1 << VOCAB) and tokens:  # nothing may come after the draft before
                self._reject(slot, step, num_drafts + 1 - len(tokens))
                return tokens, OK
            for positions, failed in ((self.bar, NO_LEGAL_TOKEN), (self.spoil, NOT_FINITE)):
                if (row.seed, end) in positions:
                    if tokens:  # the next step finds out
                        self._reject(slot, step, num_drafts + 1 - len(tokens))
                        return tokens, OK
                    slot.learn(0)  # for a surplus row that is in flight already
                    self._reject(slot, step, num_drafts)
                    return [], failed
            banned = set(row.stop_ids if end - row.prompt_len < task.min_tokens else ())
            banned |= {token for token in range(VOCAB) if not mask >> token & 1}
            token = draw(slot.prefixes[-1], row.seed, end, banned, weights=self._weights(slot))
            self.kv_read[row.request_id, end - row.prompt_len] = self._kv_of(slot, end)
            rows.append(logprob_row(slot.prefixes[-1], token, logprob_width(task), task.logprob_token_ids or ()))
            slot.learn(token)
            tokens.append(token)
            if token != draft:
                break
        self._reject(slot, step, num_drafts + 1 - len(tokens))
        self.accepted += len(tokens) - 1
        self.rejected += num_drafts + 1 - len(tokens)
        return tokens, OK

    def _reject(self, slot: Slot, step: int, count: int) -> None:
        slot.computed -= count
        slot.rejected[step] = count
