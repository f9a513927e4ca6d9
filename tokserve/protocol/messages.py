"""The messages between the front end and the engine process: msgpack over ZeroMQ.

To the engine: `Submit`, `Abort`, `Stall`, `Call`, `Announce`, `EndAnnouncement`.  From it: `SubmitReply`, `StepOutput`,
`Reply`, `Ready`, `Status`, `Dead`.  Arrays travel as packed little-endian bytes (ids int32, logprobs float32): 32k
prompt ids decode in microseconds, and deltas are joined by joining bytes.  A step's output is a few columns, however
many requests it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tokserve.protocol.columns import Column, RowColumn
from tokserve.protocol.params import PoolingParams, RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, unpack_ids

STEP_TOKENS = (1, 8, *(16 << i for i in range(11)))  # upper bounds of the buckets of `tokens_by_step`, up to 16384
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)  # likewise, of `preemptions_by_request`
AGES = 5  # 0, 1, 2, 3, and 4 or more changes of the weights


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One choice of a checked request.  `request_id`: the client's id, `#` and the choice's index.

    Of several choices of a prompt in a submission, only the first has the data of the prompt's features.

    `task`: without the fields that are for the front end.  `options.stream` is True as well if the front end searches
    the text for stop strings.  `arrival`: seconds, the front end's monotonic clock; for order only.  `drafts`:
    `options.draft_token_ids` as packed int32, in their place.
    """

    request_id: str
    prompt: TokenPrompt
    task: SamplingParams | PoolingParams
    options: RequestOptions
    seed: int
    arrival: float = 0.0
    drafts: bytes = b""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A submission: all of `requests` are accepted or none, and a `SubmitReply` says which before any output.

    `request_id` is the client's id, in use by no other submission until all its requests have ended.  They have one
    `options.group_id`.  `client`: who is served in turns with other clients, "" if there is only one.  `announced`: the
    number of its `Announce`, 0 if there was none.
    """

    call_id: int
    request_id: str
    requests: list[EngineRequest]
    client: str = ""
    announced: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """End these requests of the sender at the next step boundary; those that have ended are skipped.  The command
    `abort` is for requests of any sender: it goes by the client's id or the group, and is acknowledged."""

    request_ids: list[str]
    reason: str = "abort_user"


class Stall(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The client of these requests does not read what it has been sent (`stalled`), or reads again.  A stalled request
    gets no tokens."""

    request_ids: list[str]
    stalled: bool


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The sender prepares a request with this id of its client, which is to come in one submission or in several in
    turn: the commands that abort find it, and what is submitted afterwards ends at once."""

    number: int
    request_id: str
    group_id: str | None


class EndAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The sender submits no more for its `Announce` of this number."""

    number: int


class Call(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An admin command by name; always answered with a `Reply`."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class DraftCounts(NamedTuple):
    """Counts of one request: steps that had drafts, drafts, and accepted ones; and `predicted`, the output tokens that
    its prediction foresaw, which does not depend on what was drafted.

    Only if the request wants them reported: `by_source`, drafts and accepted ones, and `per_step`, two bytes for each
    step that had drafts: how many, and how many of them were accepted.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    predicted: int = 0
    by_source: dict[str, tuple[int, int]] = {}
    per_step: bytes = b""


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request ended.

    reason: stop | length | repetition | abort | deadline | error.  detail: eos | stop_token | stop_sequence | grammar |
    pooled | max_tokens | context | repetition | abort_user | abort_disconnect | abort_stop_string | abort_pause |
    abort_quarantine | deadline | queue_timeout | shutdown | nan | forbidden |
    grammar_limit | error.  `stop`: the token id or sequence
    that matched.  Times are seconds since arrival: admitted to a slot, first token, end (0.0 where it never came to
    that).
    """

    reason: str
    detail: str
    stop: int | list[int] | None = None
    message: str | None = None
    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


class RareFields(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What few rows of a step have.

    With a request's first output: `cached_tokens`, its prompt tokens found in the cache, and the value
    "prompt_logprobs" (rows for prompt tokens start, start + 1, ...; the very first token of a prompt has none).  With
    its last: `finish`, `weight_versions`, (weight version, start, end) of output positions, the version with the
    adapter's label (an empty span is of weights that computed KV on which later tokens depend, and no token),
    `prompt_weight_versions`, likewise of prompt positions, by what computed their KV, and all other `values`, by the
    names of their `ValueSpec`s.
    """

    row: int
    finish: Finish | None = None
    cached_tokens: int = 0
    weight_versions: list[tuple[str, int, int]] = []
    values: dict[str, Any] = {}
    prompt_weight_versions: list[tuple[str, int, int]] = []


# request id, new tokens, their columns by name, and the rest
OutputRow = tuple[str, list[int], dict[str, Column], RareFields | None]


class StepStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Gauges, then counters since the engine's start (tokens unless said otherwise).

    `tokens_by_age`: tokens of ended requests, by how many times the weights had changed since they were made.
    `deferred`: a gauge; those of the `waiting` that could have run and were passed over in the last step, because the
    prompt tokens they share with another request are being computed, or their grammar is being compiled; and those
    whose client does not read.  `stalled`: a gauge of the requests whose client does not read; `displaced`: a counter,
    the part of `preemptions` that made room for another client.
    `tokens_by_step`: numbers of steps by the tokens that they computed, with buckets up to `STEP_TOKENS` and beyond,
    then all these tokens; `preemptions_by_request`: of ended requests by how often they were preempted, likewise.
    `rooms`: what rooms report by name, numbers or lists or mappings of them; their `EngineMetric`s say what it is.
    """

    running: int = 0
    waiting: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    nan_requests: int = 0
    tokens_by_age: list[int] = []
    deferred: int = 0
    stalled: int = 0
    displaced: int = 0
    tokens_by_step: list[int] = []
    preemptions_by_request: list[int] = []
    rooms: dict[str, Any] = {}


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """All new output of one step for one front end, in columns: row i belongs to the request `request_ids[i]`.

    `token_ids`: the rows' new tokens one after the other; `counts`: int32, how many each row has, empty if
    every row has one.  A row is in at most one of the `columns` of a name, and has at most one of `rare`, which are in
    order.
    """

    stats: StepStats
    request_ids: list[str] = []
    token_ids: bytes = b""
    counts: bytes = b""
    columns: list[RowColumn] = []
    rare: list[RareFields] = []

    def rows(self) -> Iterator[OutputRow]:
        ids = unpack_ids(self.token_ids)
        if not (self.counts or self.columns or self.rare):
            for request_id, token in zip(self.request_ids, ids, strict=True):
                yield request_id, [token], {}, None
            return
        counts = unpack_ids(self.counts) if self.counts else [1] * len(self.request_ids)
        columns: list[dict[str, Column]] = [{}] * len(counts)
        for column in self.columns:
            column.scatter(counts, columns)
        rare: list[RareFields | None] = [None] * len(counts)
        for fields in self.rare:
            rare[fields.row] = fields
        end = 0
        for index, request_id in enumerate(self.request_ids):
            start, end = end, end + counts[index]
            yield request_id, ids[start:end], columns[index], rare[index]


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The answer to a `Call`; `error` is a message for the caller, `status` its kind (one of `errors.BY_STATUS`),
    `field` the argument it is about, `code` the error's."""

    call_id: int
    result: Any = None
    error: str | None = None
    status: int = 500
    field: str | None = None
    code: str | None = None


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that requests may name.  `generation` rises with every load of any adapter.  `digest`: of its
    weights.  `anywhere`: the operator has named its directory.  `path` "": it was pushed, as `version`, with the
    `checksum` of what was sent."""

    name: str
    path: str
    generation: int
    digest: str = ""
    anywhere: bool = False
    version: str = ""
    checksum: str = ""


class Status(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Told to every front end when it changes, and before the reply of the call that changed it.

    state: running | pausing | paused | updating | sleeping | quarantined.  `quarantine`: why nothing can be served
    until a weight update succeeds.  `failure`: why the last update failed.  `adapters`: in the order of their names.

    The rest is for an engine that takes the place of this one (`Control.take_over`).  `source`: the directory that the
    weights came from since the start, if it was one, and `stamp` the state of its files.  `pushed`: they came in a way
    that cannot be gone again; `lost`: and that has happened, so others are in memory.  `asleep`: what sleeps, of
    `control.TAGS`; `dropped`: there are no weights.  `num_loads`: of adapters, so far.  `checksum`: of the weights, if
    it is known.  `pause_lease`: seconds; 0: the pause does not expire.
    """

    state: str = "running"
    weight_version: str = "0"
    epoch: int = 0
    paused: bool = False
    sleeping: bool = False
    quarantine: str | None = None
    failure: str | None = None
    adapters: list[LoadedAdapter] = []
    source: str | None = None
    stamp: str | None = None
    pushed: bool = False
    lost: bool = False
    asleep: list[str] = []
    dropped: bool = False
    num_loads: int = 0
    checksum: str | None = None
    pause_lease: float = 0.0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The engine serves; `weight_version`: that of the start.  `facts` are for people: bound ops, seconds per
    start-up phase, memory."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    weight_version: str
    facts: dict[str, Any] = {}
    status: Status = Status()


class Dead(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The engine cannot go on (or could not start).  `expected`: a configuration error, no traceback."""

    reason: str
    expected: bool = False


class SubmitReply(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The answer to a `Submit`: accepted, unless `refusal` is one of `errors.REFUSALS`.  `retry_after`: seconds after
    which the same may be accepted.  `field`: the sampling parameter at fault, the option whose limit is reached, or
    ""."""

    call_id: int
    refusal: str = ""
    message: str = ""
    retry_after: int = 1
    field: str = ""


ToEngine = Submit | Abort | Stall | Call | Announce | EndAnnouncement
FromEngine = SubmitReply | StepOutput | Reply | Ready | Status | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
