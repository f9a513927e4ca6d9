"""An executor without a model that checks every plan, and a small harness around `EngineCore`.

The next token is a hash of (seed, position, all tokens before), so it cannot depend on scheduling.  The KV
cache is simulated: each (block, offset) holds what was written there (a hash of all tokens and features up to that
position), and every step compares all that a row would read with what the request's own tokens demand.  A wrong
prefix hit, a stale block, or a write into another request's block fails the step.  Drafts are accepted for as long as
they are what would have been sampled.  With `states`, each slot has a recurrent state, the hash of the tokens up to its
position, and a step fails whose state is not one to go on from: a wrong snapshot, or a draft that was rejected.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from tests.engine.scripted_copies import ScriptedCopies
from tests.engine.scripted_states import States, demand
from tests.outputs import Output, unpack
from tokserve.config import Config, SpeculationPlan
from tokserve.engine.core import EngineCore
from tokserve.engine.request import Request
from tokserve.engine.speculation.drafter import Drafter, TextDrafter
from tokserve.errors import RequestError
from tokserve.kv_spec import KVLayout, KVSpec, StateLayout, StateSpec
from tokserve.messages import (
    Abort,
    Call,
    EngineRequest,
    Finish,
    FromEngine,
    Logprobs,
    Reply,
    Stall,
    StepOutput,
    StepStats,
    Submit,
    SubmitReply,
    decode_from_engine,
    encode,
)
from tokserve.params import PoolingParams, RequestOptions, SamplingParams
from tokserve.plan import (
    DRAWN,
    NO_LEGAL_TOKEN,
    NOT_FINITE,
    OK,
    WITHHELD,
    DeviceFacts,
    DraftPasses,
    Float32,
    GrammarBitmask,
    Int32,
    LogprobRows,
    NewRow,
    StepPlan,
    StepResult,
)
from tokserve.prompt import Feature, TokenPrompt, pack_ids, unpack_ids
from tokserve.vision import ImageFormat

VOCAB = 20
EOS = (1,)
START = hashlib.blake2b(b"start", digest_size=8).digest()


def engine_request(
    request_id: str, prompt: Sequence[int] | bytes, task: SamplingParams | PoolingParams | None = None,
    seed: int = 0, *,
    arrival: float = 0.0, features: tuple[Feature, ...] = (), **options: Any,
) -> EngineRequest:  # fmt: skip
    """A request that streams, unless told otherwise."""
    packed = prompt if isinstance(prompt, bytes) else pack_ids(prompt)
    options = {"stream": True} | {name: value for name, value in options.items() if value not in ("", None)}
    task = SamplingParams() if task is None else task
    return EngineRequest(request_id, TokenPrompt(packed, features), task, RequestOptions(**options), seed, arrival)


# --- what a request must produce, whatever surrounds it ---


def chain(prefix: bytes, token: int) -> bytes:
    return hashlib.blake2b(prefix + token.to_bytes(4, "little"), digest_size=8).digest()


def prefixes_of(tokens: Sequence[int], features: Sequence[Feature] = ()) -> list[bytes]:
    """Hashes of tokens[:0], tokens[:1], ...; a feature counts at each of its positions."""
    inside = {f.start + i: f"{f.kind},{i}".encode() + f.hash for f in features for i in range(f.length)}
    prefixes = [START]
    for position, token in enumerate(tokens):
        prefixes.append(chain(prefixes[-1] + inside.get(position, b""), token))
    return prefixes


def vector(prefix: bytes) -> Float32:
    """What pooling brings for the tokens hashed in `prefix`."""
    return np.frombuffer(hashlib.blake2b(prefix + b"pooled", digest_size=16).digest(), np.uint8).astype(np.float32)


def draw(
    prefix: bytes, seed: int, position: int, banned: Iterable[int] = (), vocab: int = VOCAB, weights: str = ""
) -> int:
    """The token at `position` after the tokens hashed in `prefix`."""
    digest = hashlib.blake2b(prefix + f"{seed},{position}{weights}".encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % vocab
    while token in set(banned):
        token = (token + 1) % vocab
    return token


def logprob_row(prefix: bytes, token: int, width: int, named: Sequence[int] = ()) -> tuple[float, int, Any, Any]:
    """Logprob, rank, top ids and top logprobs of `token` after `prefix`: any function of the two will do."""
    digest = hashlib.blake2b(prefix + b"lp", digest_size=8).digest()
    number = int.from_bytes(digest[:4], "little") / 2**32
    ids = [(digest[4] + i) % VOCAB for i in range(width - len(named))] + list(named)
    return -number - token, 1 + digest[5], ids, [-number - i for i in range(width)]


def rows_of(rows: Sequence[tuple[float, int, Any, Any]], width: int, padding: int = 0) -> LogprobRows:
    count = len(rows)
    ids = np.full((count, width + padding), -7, np.int32)
    values = np.full((count, width + padding), np.nan, np.float32)
    for i, (_, _, top_ids, top_values) in enumerate(rows):
        ids[i, : len(top_ids)], values[i, : len(top_ids)] = top_ids, top_values
    token_logprobs = np.array([row[0] for row in rows], np.float32)
    return LogprobRows(token_logprobs, np.array([row[1] for row in rows], np.int32), ids, values)


def packed(rows: Sequence[tuple[float, int, Any, Any]], width: int, mode: str = "raw") -> Logprobs:
    made = rows_of(rows, width)
    return Logprobs(
        made.token_logprobs.tobytes(), made.ranks.tobytes(), made.top_ids.tobytes(), made.top_logprobs.tobytes(),
        width, mode,
    )  # fmt: skip


@dataclass
class Solo:
    """The request run alone: all its tokens, and why it ends."""

    tokens: list[int]
    detail: str
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    pooled: bytes = b""


def logprob_width(params: SamplingParams) -> int:
    k = params.logprobs or 0
    return (VOCAB if k < 0 else k) + len(params.logprob_token_ids or ())


def solo(
    prompt: Sequence[int],
    params: SamplingParams | PoolingParams,
    seed: int,
    context: int,
    eos: Sequence[int] = EOS,
    weights: Callable[[int], str] = lambda index: "",
    features: Sequence[Feature] = (),
) -> Solo:
    """An engine in fifteen lines.  `weights`: those that make the output token of that index."""
    prefixes = prefixes_of(prompt, features)
    if isinstance(params, PoolingParams):
        return Solo([], "pooled", None, None, vector(prefixes[-1]).tobytes())
    forbidden = {*params.stop_token_ids, *eos}  # EOS below min_tokens, though it be ignored
    tokens: list[int] = []
    rows = []
    detail = ""
    while not detail:
        banned = forbidden if len(tokens) < params.min_tokens else ()
        token = draw(prefixes[-1], seed, len(prompt) + len(tokens), banned, weights=weights(len(tokens)))
        rows.append(logprob_row(prefixes[-1], token, logprob_width(params), params.logprob_token_ids or ()))
        tokens.append(token)
        prefixes.append(chain(prefixes[-1], token))
        if len(tokens) >= params.min_tokens:
            if token in eos and not params.ignore_eos:
                detail = "eos"
            elif token in params.stop_token_ids:
                detail = "stop_token"
            elif any(tokens[-len(s) :] == s for s in params.stop_token_sequences):
                detail = "stop_sequence"
        if not detail and len(tokens) == params.max_tokens:
            detail = "max_tokens"
        if not detail and len(prompt) + len(tokens) == context:
            detail = "context"
    requested = params.logprobs is not None or params.logprob_token_ids
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        width = VOCAB if params.prompt_logprobs < 0 else params.prompt_logprobs
        start = max(1, params.prompt_logprobs_start)
        scored = [logprob_row(prefixes[j], prompt[j], width) for j in range(start, len(prompt))]
        prompt_logprobs = packed(scored, width)
    return Solo(tokens, detail, packed(rows, logprob_width(params)) if requested else None, prompt_logprobs)


# --- the executor ---


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
        self, config: Config, num_blocks: int = 64, block_size: int = 4, states: StateLayout | None = None,
        images: ImageFormat | None = None,
    ) -> None:  # fmt: skip
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
        self.only_own_kv = False  # no row may read KV that other weights made
        self.staged: str | None = None
        self.adapters: dict[int, str] = {}  # slot -> what was put there
        self.adapter_read: str | None = None
        self.adapter_from_anywhere: bool | None = None
        self.directories: dict[str, tuple[str, str]] = {}  # path -> the weights there, and the stamp of the files
        self.copies = ScriptedCopies(self)
        self.copy = self.copies.copy
        self.beside = True  # whether there is room for two sets of weights
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
            return self.beside or self.weights is None
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
            if args["lora_path"].startswith("bad"):
                raise RequestError("no adapter", field="lora_path")
            self.adapter_read = args["lora_path"]
            self.adapter_from_anywhere = args["anywhere"]
            return self.adapter_read
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
            demand(self.permits.acquire(timeout=60), "no permit to step")
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
        samples = known == len(slot.tokens) and isinstance(task, SamplingParams)
        demand(num_logits == (num_drafts + 1 if samples else 0), f"{name}: num_logits")
        if num_drafts:
            demand(samples, f"{name}: drafts in the middle of a prompt")
        if samples:
            limit = slot.row.prompt_len + (task.max_tokens or self.context)
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
                    logprob_row(slot.prefixes[j], slot.tokens[j], width)
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
                own = masks.get(number, [~0] * (num_drafts + 1))
                demand(len(own) == num_drafts + 1, f"{slot.row.request_id}: {len(own)} masks for {num_drafts} drafts")
                sampled, state = self._sampled(slot, plan.step, num_drafts, own, rows)
                tokens += sampled
                counts.append(len(sampled))
                status.append(state)
            else:
                counts.append(0)
                status.append(NOT_FINITE if failed else OK)
        widest = max((len(row[2]) for row in rows), default=0)
        logprobs = rows_of(rows, widest, padding=1) if widest or rows else None
        return StepResult(
            plan.step, np.array(counts, np.int32), np.array(tokens, np.int32), np.array(status, np.uint8), logprobs,
            prompt_rows, pooled, draft_passes=self._draft_passes(plan), saved=self.states.saved.pop(plan.step, []),
        )  # fmt: skip

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


# --- drafts ---


class OneByOne:
    """A drafter that looks at one request at a time."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[list[int]]:
        return [self.propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def propose_one(self, request: Request, limit: int) -> list[int]:
        raise NotImplementedError

    def on_step(self, rows: int, num_tokens: int, seconds: float) -> None:
        pass

    def on_drawn(self, draft_passes: DraftPasses, rows: int) -> None:
        pass

    def on_verified(self, request: Request, proposed: int, accepted: int) -> None:
        pass

    def on_end(self, request: Request) -> None:
        pass


def text_drafter(method: str = "suffix") -> TextDrafter:
    """The one that serves, with little memory."""
    return TextDrafter(SpeculationPlan(method, 8, 1 << 14), VOCAB)


class RandomDrafter(OneByOne):
    """Proposes what would be sampled, something else, or the one and then the other."""

    def __init__(self, executor: ScriptedExecutor, seed: int, right: float = 0.5, longest: int = 5) -> None:
        self._executor = executor
        self._rng = random.Random(seed)
        self._right = right
        self._longest = longest
        self.proposed = 0

    def propose_one(self, request: Request, limit: int) -> list[int]:
        if request.num_in_flight:
            return []
        count = min(self._rng.randint(0, self._longest), limit)
        right = count if self._rng.random() < self._right else self._rng.randint(0, count)
        drafts = self._continuation(request, right)
        drafts += [self._rng.randrange(VOCAB) for _ in range(count - len(drafts))]
        self.proposed += len(drafts)
        return drafts

    def _continuation(self, request: Request, count: int) -> list[int]:
        assert isinstance(request.task, SamplingParams)
        weights = str(self._executor.weights)
        if request.adapter is not None:
            weights += f"+{self._executor.adapters[request.adapter.slot]}"
        tokens = request.tokens.tolist()
        prefix = prefixes_of(tokens, request.features)[-1]
        for _ in range(count):
            banned = request.stop_ids if len(tokens) - request.prompt_len < request.task.min_tokens else ()
            tokens.append(draw(prefix, request.seed, len(tokens), banned, weights=weights))
            prefix = chain(prefix, tokens[-1])
        return tokens[len(request.tokens) :]


# --- the harness ---


@dataclass
class Received:
    """All that one request's owner was sent about it."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish: Finish | None = None
    cached: int = 0
    pooled: bytes = b""

    def take(self, output: Output) -> None:
        assert self.finish is None, f"{output.rid}: output after its finish"
        assert output.token_ids or output.finish, f"{output.rid}: an output that says nothing"
        self.outputs.append(output)
        self.tokens += output.token_ids
        if output.cached:
            assert len(self.outputs) == 1, "cached tokens are told with the first output"
            self.cached = output.cached
        if output.logprobs is not None:
            self.logprobs = output.logprobs if self.logprobs is None else joined(self.logprobs, output.logprobs)
        if output.prompt_logprobs is not None:
            assert len(self.outputs) == 1, "prompt logprobs come with the first output"
            self.prompt_logprobs = output.prompt_logprobs
        self.pooled += output.pooled
        self.finish = output.finish


def joined(one: Logprobs, other: Logprobs) -> Logprobs:
    """The rows of one, then those of the other."""
    assert (one.width, one.mode) == (other.width, other.mode)
    return Logprobs(
        one.token_logprobs + other.token_logprobs, one.ranks + other.ranks, one.top_ids + other.top_ids,
        one.top_logprobs + other.top_logprobs, one.width, one.mode,
    )  # fmt: skip


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An EngineCore over a ScriptedExecutor, with what it sent sorted by request."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, context: int = 64, drafter: Drafter | None = None,
        snapshots: int | None = None, interval: int = 8, images: ImageFormat | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """`snapshots`: of a model with recurrent states, taken every `interval` tokens.  `images`: of one with a
        tower."""
        options = {
            "model": "scripted",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "spec_method": "none",
            **options,
        }
        options.setdefault("eos_token_ids", list(EOS))
        self.config = Config.make(max_model_len=context, **options)
        slots = self.config.scheduler.max_num_seqs
        states = None if snapshots is None else StateLayout(slots, snapshots, interval, spare_inputs=9)
        self.executor = ScriptedExecutor(self.config, num_blocks, block_size, states, images)
        self.clock = Clock()
        self.wakes: list[None] = []
        self.core = EngineCore(
            self.config, self.executor, self.executor.start(), self._emit, self.clock,
            lambda: self.wakes.append(None), drafter,
        )  # fmt: skip
        self.received: dict[str, Received] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.messages: list[tuple[bytes, FromEngine]] = []
        self.owners: dict[str, bytes] = {}
        self.submit_replies: list[SubmitReply] = []
        self.weights_of = {"v1": ""}  # by version
        self.loads: dict[int, str] = {}  # generation -> path of the adapter

    def _emit(self, identity: bytes, message: FromEngine) -> None:
        message = decode_from_engine(encode(message))
        self.messages.append((identity, message))
        if isinstance(message, SubmitReply):
            self.submit_replies.append(message)
        if isinstance(message, Reply) and isinstance(message.result, dict) and "generation" in message.result:
            self.loads[message.result["generation"]] = message.result["lora_path"]
        if isinstance(message, StepOutput):
            for output in unpack(message):
                assert self.owners[output.rid] == identity, "sent to another front end"
                self.received.setdefault(output.rid, Received()).take(output)

    def make(
        self, rid: str, prompt: Sequence[int], *, owner: bytes = b"A", seed: int = 0,
        task: PoolingParams | None = None, **fields: Any,
    ) -> EngineRequest:  # fmt: skip
        """A request that is yet to be submitted; `fields` of SamplingParams and RequestOptions."""
        names = {f.name for f in msgspec.structs.fields(SamplingParams)}
        params = SamplingParams(**{name: value for name, value in fields.items() if name in names})
        options = {name: value for name, value in fields.items() if name not in names}
        self.requests[rid] = request = engine_request(rid, prompt, params if task is None else task, seed, **options)
        self.owners[rid] = owner
        return request

    def submit(self, key: str, *requests: EngineRequest, owner: bytes = b"A", client: str = "") -> SubmitReply:
        """Submit requests under one id; the engine's reply."""
        self.core.receive(owner, Submit(7, key, list(requests), client))
        return self.submit_replies[-1]

    def add(
        self, rid: str, prompt: Sequence[int], *, owner: bytes = b"A", client: str = "", **fields: Any
    ) -> EngineRequest:
        """Submit one request, whose id is that of its submission as well; it must be accepted."""
        request = self.make(rid, prompt, owner=owner, **fields)
        assert self.submit(rid, request, owner=owner, client=client) == SubmitReply(7)
        return request

    def stall(self, *rids: str, stalled: bool = True, owner: bytes = b"A") -> None:
        """Their client does not read, or reads again."""
        self.core.receive(owner, Stall(list(rids), stalled))

    def add_choices(self, key: str, count: int = 2, *, owner: bytes = b"A", **options: Any) -> None:
        """Submit `count` requests of 40 tokens under one id, with ids "key#0" and so on; they must be accepted."""
        requests = [
            self.make(f"{key}#{i}", [3, i], owner=owner, max_tokens=40, ignore_eos=True, **options)
            for i in range(count)
        ]
        assert self.submit(key, *requests, owner=owner) == SubmitReply(7)

    def abort(self, *keys: str, reason: str = "abort_user", call_id: int | None = 1, owner: bytes = b"A") -> None:
        """Abort requests by key, with an acknowledgement; without a call id, as their owner aborts them."""
        if call_id is None:
            self.core.receive(owner, Abort(list(keys), reason))
        else:
            self.call("abort", keys=list(keys), reason=reason, call_id=call_id, owner=owner)

    def call(self, method: str, /, *, call_id: int = 1, owner: bytes = b"A", **args: Any) -> None:
        self.core.receive(owner, Call(call_id, method, args))

    def step(self) -> bool:
        busy = self.core.step()
        self.core.cache.check()
        return busy

    def run(self, limit: int = 2000) -> None:
        """Until idle."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the engine does not come to rest")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def replies(self) -> list[Reply]:
        return [message for _, message in self.messages if isinstance(message, Reply)]

    @property
    def stats(self) -> StepStats:
        return self.core.scheduler.stats()

    def solo(self, rid: str) -> Solo:
        """What the request gives alone, with the weights that its spans name, or else the first."""
        request = self.requests[rid]
        eos = self.config.model.eos_token_ids or ()
        spans = self.received[rid].outputs[-1].spans if rid in self.received else []
        made_by = {index: self.weights_behind(label) for label, start, end in spans for index in range(start, end)}
        return solo(
            unpack_ids(request.prompt.ids), request.task, request.seed, self.core.limits.context, eos,
            lambda i: made_by.get(i, self.weights_of["v1"]), request.prompt.features,
        )  # fmt: skip

    def weights_behind(self, label: str) -> str:
        """What a span's version stands for."""
        version, plus, adapter = label.partition("+")
        return self.weights_of[version] + (f"+{self.loads[int(adapter.rpartition('@')[2])]}" if plus else "")

    def tokens(self, rid: str) -> list[int]:
        return self.received[rid].tokens

    def check_complete(self, rid: str) -> None:
        """The request ended by itself, with exactly what it gives alone."""
        received, want = self.received[rid], self.solo(rid)
        assert received.finish is not None, f"{rid} has not ended"
        assert (received.tokens, received.finish.detail) == (want.tokens, want.detail)
        assert received.logprobs == want.logprobs
        assert received.prompt_logprobs == want.prompt_logprobs
        self.check_spans(rid)
        assert received.pooled == want.pooled
        if not self.requests[rid].options.stream:
            assert len(received.outputs) == 1

    def check_spans(self, rid: str) -> None:
        """They cover all output tokens without gaps, or say what made the vector; that the versions are right, `solo`
        tells."""
        spans, place = self.received[rid].outputs[-1].spans, 0
        assert len(spans) == 1 or not self.received[rid].pooled
        for _, start, end in spans:
            assert start == place and (place < end or self.received[rid].pooled)
            place = end
        assert place == len(self.tokens(rid))
        if set(self.weights_of) == {"v1"} and not self.loads:
            assert len(spans) <= 1

    def check_empty(self) -> None:
        """Everything was given back."""
        self.core.cache.check()
        self.core.cache.check_idle()
        assert self.stats.running == self.stats.waiting == self.stats.blocks_held == 0
        assert len(self.core.scheduler._free_slots) == self.config.scheduler.rows
        assert not self.executor.in_flight and not self.core.scheduler.in_flight
