"""An executor without a model that checks every plan, and a small harness around `EngineCore`.

The next token is a hash of (seed, position, all tokens before), so it cannot depend on scheduling.  The KV
cache is simulated: each (block, offset) holds what was written there (a hash of all tokens up to that
position), and every step compares all that a row would read with what the request's own tokens demand.  A wrong
prefix hit, a stale block, or a write into somebody else's block fails the step.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from tests.outputs import Output, unpack
from tokserve.client.outputs import join_logprobs
from tokserve.config import Config
from tokserve.engine.core import EngineCore
from tokserve.errors import RequestError
from tokserve.kv_spec import KVLayout, KVSpec
from tokserve.messages import (
    Abort,
    Add,
    Call,
    Finish,
    FromEngine,
    Logprobs,
    Reply,
    Stall,
    Step,
    StepStats,
    Submit,
    Verdict,
    decode_from_engine,
    encode,
    pack_ids,
    unpack_ids,
)
from tokserve.params import SamplingParams
from tokserve.plan import DeviceFacts, LogprobRows, NewRow, StepPlan, StepResult

VOCAB = 20
EOS = (1,)
START = hashlib.blake2b(b"start", digest_size=8).digest()


class IllegalPlan(AssertionError):
    """A plan that a device could not, or must not, execute."""


def demand(truth: object, message: str) -> None:
    if not truth:
        raise IllegalPlan(message)


# --- what a request must produce, whatever surrounds it ---


def chain(prefix: bytes, token: int) -> bytes:
    return hashlib.blake2b(prefix + token.to_bytes(4, "little"), digest_size=8).digest()


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


def logprob_width(params: SamplingParams) -> int:
    k = params.logprobs or 0
    return (VOCAB if k < 0 else k) + len(params.logprob_token_ids or ())


def solo(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    context: int,
    eos: Sequence[int] = EOS,
    weights: Callable[[int], str] = lambda index: "",
) -> Solo:
    """An engine in fifteen lines.  `weights`: those that make the output token of that index."""
    prefixes = [START]
    for token in prompt:
        prefixes.append(chain(prefixes[-1], token))
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
    asked = params.logprobs is not None or params.logprob_token_ids
    prompt_logprobs = None
    if params.prompt_logprobs is not None:
        width = VOCAB if params.prompt_logprobs < 0 else params.prompt_logprobs
        start = max(1, params.prompt_logprobs_start)
        scored = [logprob_row(prefixes[j], prompt[j], width) for j in range(start, len(prompt))]
        prompt_logprobs = packed(scored, width)
    return Solo(tokens, detail, packed(rows, logprob_width(params)) if asked else None, prompt_logprobs)


# --- the executor ---


@dataclass
class Slot:
    """What the device knows of one slot."""

    row: NewRow
    tokens: list[int]
    prefixes: list[bytes]  # of tokens[:i]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    entered: int = -1  # step

    def learn(self, token: int) -> None:
        self.tokens.append(token)
        self.prefixes.append(chain(self.prefixes[-1], token))


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
    """Checks and plays plans.  `spoil`: (seed, position) pairs whose logits are NaN; `bar`: those whose parameters
    leave nothing; `fail_at`: a step that raises."""

    def __init__(self, config: Config, num_blocks: int = 64, block_size: int = 4) -> None:
        self.scheduler = config.scheduler
        self.context = min(config.model.max_model_len or 10**9, num_blocks * block_size)
        self.size = block_size
        self.max_loras = config.lora.max_loras
        spec = KVSpec(1, 1, "float32")
        self.facts = DeviceFacts(KVLayout((spec,), num_blocks, block_size), VOCAB, "v1", {"scripted": True})
        self.slots: dict[int, Slot] = {}
        self.kv: dict[tuple[int, int], tuple[bytes, int]] = {}  # (block, offset) -> (content, step that wrote it)
        self.in_flight: deque[int] = deque()
        self.collected = -1
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
        self.staged: str | None = None
        self.adapters: dict[int, str] = {}  # slot -> what was put there
        self.adapter_read: str | None = None
        self.adapter_from_anywhere: bool | None = None
        self.directories: dict[str, tuple[str, str]] = {}  # path -> the weights there, and the stamp of the files
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
        elif method == "abort_update":
            self.staged = None
        elif method == "read_adapter":
            if args["lora_path"].startswith("bad"):
                raise RequestError("no adapter", field="lora_path")
            self.adapter_read = args["lora_path"]
            self.adapter_from_anywhere = args["anywhere"]
        elif method == "is_same_update":
            return self.staged == self.weights
        elif method == "checksums":
            return {"all": str(self.weights)}
        elif method == "checkpoint_checksums":
            return {"checkpoint": {"all": str(self.weights)}, "tied": {}}
        return None

    def interrupt(self) -> None:
        self.interrupted += 1
        self.settle()

    def close(self) -> None:
        self.closed = True

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if plan.step == self.fail_at:
            raise RuntimeError("the device is on fire")
        if self.permits is not None:
            demand(self.permits.acquire(timeout=60), "no permit to step")
        demand(self.weights is not None and self.has_kv, "a step without weights or KV memory")
        demand(plan.step == len(self.plans), "steps are not numbered one after the other")
        demand(len(self.in_flight) < self.scheduler.depth, "too many steps in flight")
        last = self.plans[-1] if self.in_flight else None
        demand(last is None or last.masks is None, "planned before the last tokens were known to their grammars")
        self.plans.append(plan)
        self.in_flight.append(plan.step)
        self._enter(plan)
        self._check_columns(plan)
        ends = plan.num_computed + plan.num_tokens
        for slot, start, end in zip(plan.slots.tolist(), plan.num_computed.tolist(), ends.tolist(), strict=True):
            self._check_cached(plan, self.slots[slot], start)
            self._write(plan.step, self.slots[slot], start, end)
        for slot, end in zip(plan.slots.tolist(), ends.tolist(), strict=True):
            self._check_read(self.slots[slot], end)
        return Deferred(self._result(plan), self._taken)

    def _taken(self, step: int) -> None:
        if self.in_flight and self.in_flight[0] == step:
            self.collected = self.in_flight.popleft()
        demand(self.collected >= step, "results are taken out of order")

    def _enter(self, plan: StepPlan) -> None:
        for slot in plan.done:
            demand(slot in self.slots, f"slot {slot} is done, but nobody was in it")
            del self.slots[slot]
        for row in plan.new:
            demand(row.slot not in self.slots, f"slot {row.slot} is taken")
            demand(row.tokens.dtype == np.int32 and len(row.tokens) >= row.prompt_len > 0, "tokens of a new row")
            demand(0 <= row.slot < self.scheduler.max_num_seqs, "slot out of range")
            made = Slot(row, [], [START], entered=plan.step)
            for token in row.tokens.tolist():
                made.learn(token)
            self.slots[row.slot] = made
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
        demand(plan.total_tokens() <= self.scheduler.max_num_batched_tokens, "over the budget")
        demand(plan.slots.dtype == plan.num_tokens.dtype == plan.num_computed.dtype == np.int32, "column types")
        adapters = [self.slots[number].row.adapter for number in slots]
        demand(len(list(groupby(adapters))) == len(set(adapters)), "rows of one adapter are not neighbours")
        masked = plan.masks.slots.tolist() if plan.masks else []
        demand(set(masked) <= set(plan.slots[plan.samples].tolist()), "a mask for a row that draws nothing")
        for i, number in enumerate(slots):
            slot = self.slots[number]
            start, end = int(plan.num_computed[i]), int(plan.num_computed[i] + plan.num_tokens[i])
            if slot.entered == plan.step:
                slot.computed = start
            demand(start == slot.computed, f"{slot.row.rid}: starts at {start}, computed {slot.computed}")
            demand(end <= len(slot.tokens), f"{slot.row.rid}: computes tokens that nobody has drawn")
            demand(end <= len(slot.blocks) * self.size, f"{slot.row.rid}: no block for position {end - 1}")
            demand(plan.samples[i] == (end == len(slot.tokens)), f"{slot.row.rid}: samples")
            if plan.samples[i]:
                limit = slot.row.prompt_len + (slot.row.params.max_tokens or self.context)
                demand(end < min(limit, self.context), f"{slot.row.rid}: scheduled beyond its length")

    def _check_cached(self, plan: StepPlan, slot: Slot, start: int) -> None:
        """What a new row takes from the cache was computed by steps whose results are known."""
        if slot.entered == plan.step:
            for position in range(start):
                content, step = self.kv.get(self._place(slot, position), (b"", -1))
                demand(content == slot.prefixes[position + 1], f"{slot.row.rid}: a wrong prefix hit at {position}")
                demand(step <= self.collected, f"{slot.row.rid}: a prefix hit on a step in flight")
                weights = self.kv_weights[self._place(slot, position)]
                demand(weights == self._weights(slot), f"{slot.row.rid}: a prefix hit on KV of other weights")

    def _weights(self, slot: Slot) -> str:
        """What computes a row: the weights, and its adapter."""
        adapter = slot.row.adapter
        demand(adapter < 0 or adapter in self.adapters, f"{slot.row.rid}: its adapter's slot is empty")
        return str(self.weights) + ("" if adapter < 0 else f"+{self.adapters[adapter]}")

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.blocks[position // self.size], position % self.size

    def _write(self, step: int, slot: Slot, start: int, end: int) -> None:
        shared = {block for other in self.slots.values() if other is not slot for block in other.blocks}
        for position in range(start, end):
            place, content = self._place(slot, position), slot.prefixes[position + 1]
            old = self.kv.get(place, (b"", -1))
            same = old[0] == content  # the last token after a full hit: written again, to the same bits
            demand(place[0] not in shared or same, f"{slot.row.rid} writes into the shared block {place[0]}")
            self.kv[place] = (content, min(step, old[1]) if same else step)
            self.kv_weights[place] = self._weights(slot)
        slot.computed = end
        self.computed[slot.row.rid] = self.computed.get(slot.row.rid, 0) + end - start

    def _check_read(self, slot: Slot, end: int) -> None:
        for position in range(end):
            found = self.kv.get(self._place(slot, position), (b"", -1))[0]
            demand(found == slot.prefixes[position + 1], f"{slot.row.rid} reads a stale block at {position}")

    def _result(self, plan: StepPlan) -> StepResult:
        tokens, finite, forbidden, rows = [], [], [], []
        prompt_rows = {}
        masks = dict(zip(plan.masks.slots.tolist(), plan.masks.words[:, 0].tolist(), strict=True)) if plan.masks else {}
        for i, number in enumerate(plan.slots.tolist()):
            slot = self.slots[number]
            row, params = slot.row, slot.row.params
            start, end = int(plan.num_computed[i]), int(plan.num_computed[i] + plan.num_tokens[i])
            if params.prompt_logprobs is not None:
                width = VOCAB if params.prompt_logprobs < 0 else params.prompt_logprobs
                asked = range(max(start + 1, params.prompt_logprobs_start), min(end + 1, row.prompt_len))
                scored = [logprob_row(slot.prefixes[j], slot.tokens[j], width) for j in asked]
                if scored:
                    prompt_rows[i] = rows_of(scored, width, padding=2)
            if plan.samples[i]:
                banned = set(row.stop_ids if end - row.prompt_len < params.min_tokens else ())
                demand((number in masks) == (params.structured_outputs is not None), f"{row.rid}: mask")
                banned |= {each for each in range(VOCAB) if not masks.get(number, ~0) >> each & 1}
                token = draw(slot.prefixes[-1], row.seed, end, banned, weights=self._weights(slot))
                width = logprob_width(params)
                rows.append(logprob_row(slot.prefixes[-1], token, width, params.logprob_token_ids or ()))
                tokens.append(token)
                finite.append((row.seed, end) not in self.spoil | self.bar)
                forbidden.append((row.seed, end) in self.bar)
                slot.learn(token)
        widest = max((len(row[2]) for row in rows), default=0)
        logprobs = rows_of(rows, widest, padding=1) if widest or rows else None
        return StepResult(
            plan.step, np.array(tokens, np.int32), np.array(finite, np.bool_), logprobs, prompt_rows,
            forbidden=np.array(forbidden, np.bool_) if any(forbidden) else None,
        )  # fmt: skip


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

    def take(self, output: Output) -> None:
        assert self.finish is None, f"{output.rid}: output after its finish"
        assert output.token_ids or output.finish, f"{output.rid}: an output that says nothing"
        self.outputs.append(output)
        self.tokens += output.token_ids
        if output.cached:
            assert len(self.outputs) == 1, "cached tokens are told with the first output"
            self.cached = output.cached
        if output.logprobs is not None:
            self.logprobs = join_logprobs([*([self.logprobs] if self.logprobs else []), output.logprobs])
        if output.prompt_logprobs is not None:
            assert len(self.outputs) == 1, "prompt logprobs come with the first output"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish = output.finish


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An EngineCore over a ScriptedExecutor, with what it sent sorted by request."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, context: int = 64, **options: Any) -> None:
        options = {"model": "scripted", "max_num_seqs": 8, "max_num_batched_tokens": 32, **options}
        options.setdefault("eos_token_ids", list(EOS))
        self.config = Config.make(max_model_len=context, **options)
        self.executor = ScriptedExecutor(self.config, num_blocks, block_size)
        self.clock = Clock()
        self.wakes: list[None] = []
        self.core = EngineCore(
            self.config, self.executor, self.executor.start(), self._emit, self.clock, lambda: self.wakes.append(None)
        )
        self.received: dict[str, Received] = {}
        self.requests: dict[str, Add] = {}
        self.messages: list[tuple[bytes, FromEngine]] = []
        self.owners: dict[str, bytes] = {}
        self.verdicts: list[Verdict] = []
        self.weights_of = {"v1": ""}  # by version
        self.loads: dict[int, str] = {}  # generation -> path of the adapter

    def _emit(self, identity: bytes, message: FromEngine) -> None:
        message = decode_from_engine(encode(message))
        self.messages.append((identity, message))
        if isinstance(message, Verdict):
            self.verdicts.append(message)
        if isinstance(message, Reply) and isinstance(message.result, dict) and "generation" in message.result:
            self.loads[message.result["generation"]] = message.result["lora_path"]
        if isinstance(message, Step):
            for output in unpack(message):
                assert self.owners[output.rid] == identity, "sent to somebody else"
                self.received.setdefault(output.rid, Received()).take(output)

    def make(self, rid: str, prompt: Sequence[int], *, owner: bytes = b"A", seed: int = 0, **fields: Any) -> Add:
        """A request that is yet to be submitted."""
        names = {f.name for f in msgspec.structs.fields(SamplingParams)}
        params = SamplingParams(**{name: value for name, value in fields.items() if name in names})
        rest = {name: value for name, value in fields.items() if name not in names}
        add = Add(rid, pack_ids(prompt), params, seed, **rest)
        self.requests[rid] = add
        self.owners[rid] = owner
        return add

    def submit(self, key: str, *adds: Add, group: str = "", owner: bytes = b"A", client: str = "") -> Verdict:
        """Submit requests under one key; the engine's word on them."""
        self.core.receive(owner, Submit(7, key, list(adds), group, client))
        return self.verdicts[-1]

    def add(
        self, rid: str, prompt: Sequence[int], *, owner: bytes = b"A", group: str = "", client: str = "", **fields: Any
    ) -> Add:
        """Submit one request, whose id is its key as well; it must be accepted."""
        add = self.make(rid, prompt, owner=owner, **fields)
        assert self.submit(rid, add, group=group, owner=owner, client=client) == Verdict(7)
        return add

    def stall(self, *rids: str, stalled: bool = True, owner: bytes = b"A") -> None:
        """Their client does not read, or reads again."""
        self.core.receive(owner, Stall(list(rids), stalled))

    def add_choices(self, key: str, count: int = 2, *, owner: bytes = b"A", group: str = "") -> None:
        """Submit `count` requests of 40 tokens under one key, with ids "key#0" and so on; they must be accepted."""
        adds = [self.make(f"{key}#{i}", [3, i], owner=owner, max_tokens=40, ignore_eos=True) for i in range(count)]
        assert self.submit(key, *adds, group=group, owner=owner) == Verdict(7)

    def abort(self, *keys: str, reason: str = "abort_user", call_id: int | None = 1, owner: bytes = b"A") -> None:
        """By key and acknowledged; without a call id, as their owner does it."""
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
        add = self.requests[rid]
        eos = self.config.model.eos_token_ids or ()
        spans = self.received[rid].outputs[-1].spans if rid in self.received else []
        made_by = {index: self.weights_behind(label) for label, start, end in spans for index in range(start, end)}
        context = self.core.limits.context
        return solo(
            unpack_ids(add.prompt),
            add.sampling,
            add.seed,
            context,
            eos,
            lambda i: made_by.get(i, self.weights_of["v1"]),
        )

    def weights_behind(self, label: str) -> str:
        """What a span's version stands for."""
        version, plus, adapter = label.partition("+")
        return self.weights_of[version] + (f"+{self.loads[int(adapter.rpartition('@')[2])]}" if plus else "")

    def tokens(self, rid: str) -> list[int]:
        return self.received[rid].tokens

    def check_complete(self, rid: str) -> None:
        """The request ended by itself, with exactly what it gives alone."""
        got, want = self.received[rid], self.solo(rid)
        assert got.finish is not None, f"{rid} has not ended"
        assert (got.tokens, got.finish.detail) == (want.tokens, want.detail)
        assert got.logprobs == want.logprobs
        assert got.prompt_logprobs == want.prompt_logprobs
        self.check_spans(rid)
        if self.requests[rid].hold:
            assert len(got.outputs) == 1

    def check_spans(self, rid: str) -> None:
        """They cover all output tokens without gaps; that the versions are right, `solo` tells."""
        spans, place = self.received[rid].outputs[-1].spans, 0
        for _, start, end in spans:
            assert start == place < end
            place = end
        assert place == len(self.tokens(rid))
        if set(self.weights_of) == {"v1"} and not self.loads:
            assert len(spans) <= 1

    def check_empty(self) -> None:
        """Everything was given back."""
        self.core.cache.check()
        self.core.cache.check_idle()
        assert self.stats.running == self.stats.waiting == self.stats.blocks_held == 0
        assert self.core.scheduler.num_free_slots == self.config.scheduler.max_num_seqs
        assert not self.executor.in_flight
