"""`AsyncClient`: a trainer's client.  Rollouts as numpy arrays, control, weights over HTTP or a process group.

Many rollouts are in flight at once.  Uses the routes of docs/rl.md and docs/token-api.md, and none of the server's
code.  torch is imported by the first call that handles tensors.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from .connection import Connection
from .errors import PromptsFailed, ServerError, TorchMissing
from .plain import integers, plain
from .pools import NOT_SENT
from .rollouts import (
    CandidateScores,
    Floats,
    Ids,
    Rollout,
    RolloutDelta,
    aborted_delta,
    aborted_rollout,
    candidate_ids,
    floats,
    pack_npy,
    prompt_ids,
    read_candidates,
    read_delta,
    read_rollout,
    sticky_seeds,
)
from .sessions import SessionTree, read_tree
from .turns import PromptAborted, PromptTurn, PromptTurns
from .weight_routes import WeightRoutes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .adapter_push import Adapter, AdapterPusher, AdapterPushResult
    from .cuda_ipc import CudaIpc, IpcPusher
    from .group_channel import GroupChannel
    from .push import PushResult
    from .pusher import Pusher
    from .weight_pairs import Weights

__all__ = ["AsyncClient", "Rollout", "RolloutDelta", "TokserveClient", "sticky_seeds"]

T = TypeVar("T")
GENERATE = "/inference/v1/generate"
MSGPACK = "application/msgpack"
CONFLICT = 409
PAUSE_LEASE = 600.0  # seconds
PATIENCE = 600.0  # seconds
SESSION_WAIT, SESSION_LEASE = 30.0, 600.0  # seconds
LEFT_IDS = 4096  # of streams that are remembered
EXTENSIONS = 4  # of a pause, for each of its lease


class AsyncClient:
    """A client of one server, for one event loop; use as an async context manager, or `await close()`.

    `api_key`: an admin key where the server has one.  `connections`: limit of prompts in flight; other calls have
    connections of their own.  `take_over`: the first update and the first pause take the place of what a trainer that
    has gone left open; false: they are refused (409) until its lease expires.  `patience`: seconds for which a request
    is sent again that the server refuses with Retry-After (429, 503).  `trust_env`: use the environment's proxies,
    except for this machine.

    Methods raise ServerError for an error response, httpx.TransportError where a connection fails, and TypeError with
    the name of a field whose value cannot be sent.  `Client` has the same ones, blocking.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connections: int = 256,
        take_over: bool = True,
        patience: float = PATIENCE,
        trust_env: bool = True,
    ) -> None:
        self._connection = Connection(
            url, api_key, connections, take_over=take_over, patience=patience, trust_env=trust_env
        )
        self._turns = PromptTurns(connections)  # of what the rollouts' pool sends
        self._left: deque[str] = deque(maxlen=LEFT_IDS)  # ids of streams that were left
        self._routes = WeightRoutes(self._connection)
        self._pauses = 0  # blocks of `paused`
        self._is_paused = False  # by one of them
        self._resuming: set[asyncio.Task[None]] = set()
        self._over: dict[str | CudaIpc, IpcPusher] = {}  # pushes by transport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections and this end of a process group.  A pause that is being ended is ended first."""
        if self._resuming:
            await asyncio.wait(self._resuming)
        if "_channel" in vars(self):
            self._channel.close()
        await self._connection.close()

    # --- generation ---

    async def wait_ready(self, seconds: float = 600.0) -> None:
        """Wait until the server serves.  Raises TimeoutError, which says what it answered last."""
        await self._connection.wait_ready(seconds)

    async def generate(
        self,
        /,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        seeds: Sequence[int] | None = None,
        cache_salt: str | None = None,
        group_id: str | None = None,
        draft_group: str | None = None,
        model: str | None = None,
        priority: int = 0,
        deadline_ms: int | None = None,
        speculate: bool = True,
        **sampling: Any,
    ) -> list[Rollout]:
        """`n` rollouts for each prompt (token ids), by prompt and index; `sampling`: the route's sampling_params.

        `model`: the name of an adapter; default: the model itself.  Logprobs are always returned.  Without `seeds` (one
        per prompt; choice i adds i) the server draws them.  `group_id`: for `abort`.  `draft_group`: earlier rollouts
        of this group are drafts, as those of the same prompt are without it.  `deadline_ms`: of each prompt's rollouts,
        after which they end with what they have.  `speculate`: whether drafts may be made, which changes no token.

        If the server refuses some prompts, the others are computed, and PromptsFailed has both; if all, the first one's
        ServerError is raised.
        """
        numbers = None if seeds is None else integers(seeds, "seeds")
        if numbers is not None and len(numbers) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(numbers)} seeds")
        checked = [prompt_ids(number, prompt) for number, prompt in enumerate(prompts)]
        options = {
            "cache_salt": cache_salt,
            "group_id": group_id,
            "draft_group": draft_group,
            "model": model,
            "priority": priority,
            "deadline_ms": deadline_ms,
            "speculate": speculate,
        }
        calls = []
        for number, ids in enumerate(checked):
            params = {"logprobs": 0, **sampling, "n": n} | ({} if numbers is None else {"seed": numbers[number]})
            calls.append(self._rollouts(number, ids, params, options))
        computed, failures = await _together(calls)
        rollouts = [rollout for of_prompt in computed if of_prompt is not None for rollout in of_prompt]
        _check_all(rollouts, failures, len(prompts))
        return rollouts

    async def _rollouts(self, number: int, ids: Ids, params: dict[str, Any], options: dict[str, Any]) -> list[Rollout]:
        try:
            reply = await self._generated(ids, params, options)
        except PromptAborted:
            masks = bool(params.get("return_sampling_mask"))
            return [aborted_rollout(number, index, ids, masks=masks) for index in range(params["n"])]
        return [read_rollout(number, ids, choice) for choice in reply["choices"]]

    async def _generated(self, ids: Ids, params: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        body = {
            "token_ids": ids.tobytes(),
            "sampling_params": params,
            "logprobs_format": "arrays",
            "request_id": secrets.token_hex(12),
        } | options
        headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
        content = msgspec.msgpack.encode(plain(body))
        async with self._turns.turn(options.get("group_id")) as turn:
            response = await self._connection.rollout(GENERATE, turn, content=content, headers=headers)
        return msgspec.msgpack.decode(response.content)

    async def stream(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        request_id: str | None = None,
        cache_salt: str | None = None,
        group_id: str | None = None,
        model: str | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[RolloutDelta, None]:
        """The tokens of one prompt's rollouts as they are generated; the joined deltas are what `generate` returns.

        Leaving the iteration aborts the rest: close the iterator (`contextlib.aclosing`), or let it be collected.
        `request_id`: for `abort`; default: a random one.  That of a stream that was left may be used again at once.
        The other arguments are those of `generate`.
        """
        ids = prompt_ids(0, prompt)
        body = {
            "token_ids": ids.tolist(),
            "sampling_params": {"logprobs": 0, **sampling, "n": n},
            "stream": True,
            "logprobs_format": "base64",
            "request_id": request_id or secrets.token_hex(12),
            "cache_salt": cache_salt,
            "group_id": group_id,
            "model": model,
        }
        try:
            async with (
                self._turns.turn(group_id, request_id) as turn,
                aclosing(self._stream_events(body, turn, request_id)) as events,
            ):
                async for event in events:
                    for choice in event["choices"]:
                        yield read_delta(choice)
        except PromptAborted:
            for index in range(n):
                yield aborted_delta(index, masks=bool(sampling.get("return_sampling_mask")))

    async def _stream_events(
        self, body: dict[str, Any], turn: PromptTurn, request_id: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream.  Remembers the id of one that is left."""
        was_left, complete = request_id in self._left, False
        async with aclosing(self._connection.events(GENERATE, body, turn, id_was_left=was_left)) as events:
            try:
                async for event in events:
                    yield event
                complete = True
            finally:
                if request_id is not None and not complete:
                    self._left.append(request_id)

    async def score(
        self,
        /,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
        *,
        model: str | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> list[Floats]:
        """Logprobs of the tokens of each sequence from position `starts[i]` on (default and least: 1), float32.

        `sampling`: what they depend on, as `logprobs_mode` and `temperature`.  A generated token's is the same number
        as in its rollout, to the bit.  A sequence may fill the context.  Raises PromptsFailed as `generate`
        does.
        """
        checked, firsts = _to_score(sequences, starts)
        options = {"model": model, "cache_salt": cache_salt}
        calls = [self._scores(ids, first, sampling, options) for ids, first in zip(checked, firsts, strict=True)]
        scores, failures = await _together(calls)
        _check_all(scores, failures, len(sequences))
        return [row for row in scores if row is not None]

    async def _scores(self, ids: Ids, first: int, sampling: dict[str, Any], options: dict[str, Any]) -> Floats:
        if first == len(ids):
            return floats(b"")
        params = {**sampling, "max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_start": first}
        reply = await self._generated(ids, params, options)
        return floats(reply["prompt_logprobs"]["token_logprobs"])

    async def score_candidates(
        self,
        /,
        sequences: Sequence[Sequence[int]],
        candidates: Sequence[Any],
        starts: Sequence[int] | None = None,
        *,
        model: str | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> list[CandidateScores]:
        """A teacher's logprobs of other ids in the place of each token of a sequence from position `starts[i]` on.

        `candidates[i]`: for each of these tokens the ids: an array [len(sequence) - start, K], or lists of ids.
        Otherwise as `score`.
        """
        checked, firsts = _to_score(sequences, starts)
        if len(candidates) != len(sequences):
            raise ValueError(f"there are {len(sequences)} sequences and candidates for {len(candidates)}")
        sets = [
            candidate_ids(number, rows, len(ids) - first)
            for number, (rows, ids, first) in enumerate(zip(candidates, checked, firsts, strict=True))
        ]
        options = {"model": model, "cache_salt": cache_salt}
        calls = [
            self._candidate_scores(ids, first, rows, sampling, options)
            for ids, first, rows in zip(checked, firsts, sets, strict=True)
        ]
        scores, failures = await _together(calls)
        _check_all(scores, failures, len(sequences))
        return [row for row in scores if row is not None]

    async def _candidate_scores(
        self, ids: Ids, first: int, rows: Ids, sampling: dict[str, Any], options: dict[str, Any]
    ) -> CandidateScores:
        if first == len(ids):
            none = floats(b"")
            return CandidateScores(rows, none.reshape(rows.shape), none, none)
        named = {"prompt_logprob_token_ids": pack_npy(rows), "prompt_logprob_start": first - 1}
        reply = await self._generated(ids, {**sampling, "max_tokens": 0, **named}, options)
        return read_candidates(rows, reply)

    async def abort(self, group_id: str | None = None, *, request_ids: Sequence[str] | None = None) -> int:
        """Abort the requests of a group, or those with these ids; returns how many there were.  Their callers get the
        tokens so far, with finish_reason "abort": none for a prompt of this client that waits for a connection, or to
        be sent again.  Returns when the engine has freed them."""
        if (group_id is None) == (request_ids is None):
            raise ValueError("abort takes a group_id or request_ids")
        if request_ids is not None and not request_ids:
            return 0  # the route would abort all requests
        body = {"group_id": group_id} if request_ids is None else {"request_ids": list(request_ids)}
        queued = self._turns.abort(group_id, request_ids or ())
        return queued + int((await self._connection.post("/abort_requests", body))["aborted"])

    # --- control ---

    async def state(self) -> dict[str, Any]:
        """GET /inference/v1/state: {"state", "weight_version", "epoch", "running", "waiting", "reason", ...}."""
        return await self._connection.get("/inference/v1/state")

    async def config(self) -> dict[str, Any]:
        """GET /server_info: the server's resolved options, by section."""
        return (await self._connection.get("/server_info?config_format=json"))["config"]

    async def models(self) -> list[str]:
        """The names that `model` may have: the model's, and those of loaded adapters."""
        return [card["id"] for card in (await self._connection.get("/v1/models"))["data"]]

    async def pause(self, mode: str = "abort", clear_cache: bool = False, *, lease: float | None = None) -> None:
        """Stop generating; returns when generation has stopped.

        `mode`: what is in flight ends ("abort"), runs to its end ("wait"), freezes ("keep"), or freezes without its
        KV ("retract").  `lease`: seconds without `extend_pause` after which the server goes on by itself; default:
        never.
        """
        body = {"mode": mode, "clear_cache": clear_cache} | ({} if lease is None else {"lease": lease})
        await self._connection.open("pause", "/pause", body, again=True)

    async def extend_pause(self) -> None:
        """Extend the lease of the pause.  Raises ServerError (409) if generation is not paused any more."""
        await self._connection.post("/extend_pause", again=True)

    async def resume(self) -> None:
        """Go on after a pause, whose ever it was; does nothing without one."""
        await self._connection.post("/resume", again=True)

    @asynccontextmanager
    async def paused(self, mode: str = "keep", *, lease: float = PAUSE_LEASE) -> AsyncIterator[None]:
        """Pause for the length of the block; resumes even if it raises or is cancelled, also while it is pausing.  Of
        several blocks of this client, nested or at once, the last one that ends resumes.

        The pause is extended while the event loop runs; if it does not for `lease` seconds (0: for ever), because this
        process has ended, say, the server goes on by itself.
        """
        extending: asyncio.Task[None] | None = None
        refused = False
        self._pauses += 1
        try:
            try:
                await self.pause(mode, lease=lease)
            except (ServerError, *NOT_SENT):
                refused = True
                raise
            finally:
                self._is_paused |= not refused
            if lease:
                extending = asyncio.create_task(self._keep_paused(lease))
            yield
        finally:
            if extending is not None:
                extending.cancel()
            self._pauses -= 1
            if self._is_paused and not self._pauses:
                self._is_paused = False
                task = asyncio.create_task(self.resume())  # goes on if this is cancelled once more
                self._resuming.add(task)
                task.add_done_callback(self._resuming.discard)
                await asyncio.shield(task)

    async def _keep_paused(self, lease: float) -> None:
        """Extend the pause until it has been ended."""
        while True:
            await asyncio.sleep(lease / EXTENSIONS)
            try:
                async with asyncio.timeout(lease / EXTENSIONS):
                    await self.extend_pause()
            except ServerError as error:
                if error.status == CONFLICT:
                    return
            except (httpx.TransportError, TimeoutError):
                pass  # the next attempt is soon enough

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Have the server release memory: level 0 none, 1 the KV cache's, 2 the weights' as well."""
        await self._connection.post("/sleep", {"level": level, "mode": mode}, again=True)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`, or the parts in `tags`: weights, kv_cache, scheduling."""
        await self._connection.post("/wake_up", {} if tags is None else {"tags": list(tags)}, again=True)

    async def is_sleeping(self) -> bool:
        """Whether any part is asleep."""
        return bool((await self._connection.get("/is_sleeping"))["is_sleeping"])

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; never needed for correctness."""
        await self._connection.post("/reset_prefix_cache", again=True)

    async def control(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply of a POST, for routes that have no method here."""
        return await self._connection.post(path, body)

    async def get(self, path: str) -> Any:
        """The reply of a GET, for routes that have no method here."""
        return await self._connection.get(path)

    async def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of the server's worker extension, with plain values: a result per worker."""
        body = {"method": method, "args": list(args), "kwargs": dict(kwargs or {})}
        return (await self._connection.post("/collective_rpc", body))["results"]

    # --- sessions of agents ---

    async def sessions(
        self, *, wait: float = SESSION_WAIT, lease: float = SESSION_LEASE
    ) -> AsyncGenerator[SessionTree, None]:
        """Sessions that were closed, the oldest first, without an end: waits for the next one.

        A session belongs to this loop for `lease` seconds, and is deleted when the loop goes on.  The one in hand when
        the loop is left, or its process dies, is given out again after its lease.  `wait`: seconds of one request.
        """
        path = f"/sessions/next?wait={wait:g}&lease={lease:g}&format=base64"
        while True:
            reply = await self._packed(path)
            if reply["session_id"] is not None:
                yield read_tree(reply["tree"], reply["lease_end"])
                await self._connection.send("DELETE", f"/sessions/{quote(reply['session_id'], safe='')}")

    async def session_tree(self, session_id: str) -> SessionTree:
        """The turns of a session so far."""
        return read_tree(await self._packed(f"/sessions/{quote(session_id, safe='')}/tree?format=base64"))

    async def add_session_metadata(
        self, session_id: str, metadata: Mapping[str, Any], *, turn_id: str | None = None
    ) -> None:
        """Add names, such as a reward, to the metadata of a session or of one of its turns."""
        body = {"metadata": dict(metadata)} | ({} if turn_id is None else {"turn_id": turn_id})
        await self._connection.post(f"/sessions/{quote(session_id, safe='')}/metadata", body)

    async def close_session(self, session_id: str) -> None:
        """Say that no request of the session is expected any more."""
        await self._connection.post(f"/sessions/{quote(session_id, safe='')}/close")

    async def _packed(self, path: str) -> Any:
        response = await self._connection.send("GET", path, again=True, headers={"accept": MSGPACK})
        return msgspec.msgpack.decode(response.content)

    # --- adapters ---

    async def load_lora_adapter(self, name: str, path: str | Path) -> int:
        """Load a PEFT directory of the server's machine, replacing an adapter of this name; returns its generation."""
        body = {"lora_name": name, "lora_path": str(path)}
        return int((await self._connection.post("/v1/load_lora_adapter", body))["generation"])

    async def push_adapter(
        self,
        adapter: Adapter,
        name: str | None = None,
        version: str | None = None,
        *,
        delta: bool = False,
        dtype: torch.dtype | None = None,
        recompute_kv: bool = False,
    ) -> AdapterPushResult:
        """Send an adapter's tensors, over the group if there is one, else over HTTP, in place of what has its name.

        `adapter`: peft's module (its active adapter), a `PolicyModel`, or (adapter_config.json, tensors by PEFT's
        names).  `name` None: the model's own, so that requests for the model are for the adapter.  `version`: of these
        weights, for those who ask what serves.  `delta`: send only the elements that changed since the last push with
        it.  `dtype`: round to the server's first, so that no more bytes go than it keeps.  `recompute_kv`: requests in
        flight go on with KV of the new weights.  If it fails, the server keeps the adapter that it has.
        """
        return await self._adapter_pusher.push(
            adapter, name, version, delta=delta, dtype=dtype, recompute_kv=recompute_kv
        )

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter; returns when its last request has ended."""
        await self._connection.post("/v1/unload_lora_adapter", {"lora_name": name})

    # --- weights ---

    @cached_property
    def _channel(self) -> GroupChannel:
        return _torch_module("group_channel").GroupChannel(self._connection)

    @cached_property
    def _adapter_pusher(self) -> AdapterPusher:
        return _torch_module("adapter_push").AdapterPusher(self._channel)

    @cached_property
    def _pusher(self) -> Pusher:
        return _torch_module("pusher").Pusher(self._channel)

    def _pusher_over(self, transport: str | CudaIpc | None) -> Pusher | IpcPusher:
        if transport is None:
            return self._pusher
        if transport not in self._over:
            self._over[transport] = _torch_module("cuda_ipc").make_pusher(self._connection, transport)
        return self._over[transport]

    async def join(
        self,
        backend: str,
        address: str,
        port: int,
        *,
        rank_offset: int = 1,
        world_size: int = 2,
        timeout: float = 300.0,
    ) -> None:
        """Form a process group (gloo or nccl) with the server, this process as rank 0; later updates use it.

        `address`, `port`: where this process listens, as the server sees it.  `timeout`: seconds until the server must
        have come.  Raises WeightsError for a backend that is not there, TransferError if the group cannot be formed.
        """
        options = {"rank_offset": rank_offset, "world_size": world_size, "timeout": timeout}
        await self._channel.join(backend, address, plain(port, "port"), **plain(options))

    async def leave(self) -> None:
        """Close the process group at both ends; later updates go over HTTP.  Does nothing without one."""
        await self._channel.leave()

    async def update_weights(
        self,
        tensors: Weights,
        version: str | None = None,
        *,
        recompute_kv: bool = False,
        transport: str | CudaIpc | None = None,
    ) -> dict[str, Any]:
        """Replace all weights, over the group if there is one, else over HTTP: {"weight_version", "epoch"}.

        `tensors`: a module, a state_dict, or pairs of (name, tensor), by names of the checkpoint, as
        `model.named_parameters()` of a transformers model gives them.  They are sent as they are; `push` rounds them as
        the server would first, and so sends less.  `recompute_kv`, `transport`: as of `push`.  If it fails, the server
        keeps its old weights.
        """
        return await self._pusher_over(transport).update(tensors, version, recompute_kv=recompute_kv)

    async def push(
        self,
        weights: Weights,
        version: str | None = None,
        *,
        delta: bool = False,
        directory: str | Path | None = None,
        anchor_every: int = 10,
        recompute_kv: bool = False,
        transport: str | CudaIpc | None = None,
    ) -> PushResult:
        """Replace all weights by those of a module (a `PolicyModel`, say), a state_dict, or pairs of (name, tensor).

        Each is rounded here as the server rounds it, so that no more bytes go than the server keeps.  `delta`: send
        only the elements that changed since the last push with it, which must still be what serves; else, and the
        first time, everything is pushed, and the result says why.  For that a rounded copy of all weights is kept.
        `directory`: write files there, which this server and others (`load_weights`) read, a delta a version and all
        weights with every `anchor_every`-th.  `recompute_kv`: requests in flight go on with KV of the new weights, so
        each token after the commit has the logprob that they give it.  `transport`: "cuda_ipc", or a `CudaIpc`: through
        memory of a GPU on which the server is too (deltas go over HTTP all the same).  If it fails, the server keeps
        its old weights.
        """
        return await self._pusher_over(transport).push(
            weights, version, delta=delta, directory=directory, anchor_every=anchor_every, recompute_kv=recompute_kv
        )

    async def load_weights(
        self, directory: str | Path, version: str | None = None, *, recompute_kv: bool = False
    ) -> dict[str, Any]:
        """Have the server read a checkpoint directory, or the files of a version (default: the newest) that `push`
        wrote: {"weight_version", "epoch"}."""
        body: dict[str, Any] = {"weight_dir": str(directory), "weight_version": version}
        return await self._routes.load_dir(body | ({"recompute_kv": True} if recompute_kv else {}))

    async def abort_weight_update(self) -> None:
        """Roll back the update that is open, of any client.  Raises ServerError (409) if none is."""
        await self._routes.abort({})

    async def update_weight_version(self, version: str) -> None:
        """Rename the version of the weights that serve; begins a new epoch."""
        await self._connection.post("/update_weight_version", {"new_version": version})

    async def served_weights(self, *, checksum: bool = False, tensors: bool = False) -> dict[str, Any]:
        """GET /weight_info.  `checksum`: have the checksum of all weights computed; `tensors`: list them."""
        return await self._routes.served_weights(checksum=checksum, tensors=tensors)

    async def weight_checksums(self) -> dict[str, str]:
        """Checksums of the tensors that the server's weights were loaded from, by name, as `checksums` computes them.
        Raises ServerError (409) if they are not available."""
        request = {"action": "checksum", "names": "checkpoint"}
        return (await self._connection.post("/weight_checker", request))["checkpoint"]

    async def compare_weights(self, tensors: Weights | Iterable[tuple[str, Tensor]]) -> list[str]:
        """The names of tensors that differ from the server's, or that only one side has; empty if all are equal.  The
        dtype counts: pass the tensors in the dtype in which they were pushed."""
        baseline = await _torch_module("reader").read_whole(tensors, _torch_module("digests").checksums)
        request = {"action": "compare", "names": "checkpoint", "baseline": baseline}
        return (await self._connection.post("/weight_checker", request))["mismatches"]


TokserveClient = AsyncClient  # its name before there was a blocking one


def _torch_module(name: str) -> Any:
    """A module of this package that imports torch.  Raises TorchMissing."""
    try:
        return importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchMissing("weights are torch tensors, and torch is not installed", name="torch") from None


def _to_score(sequences: Sequence[Sequence[int]], starts: Sequence[int] | None) -> tuple[list[Ids], list[int]]:
    """The sequences, and the first position of each that is scored.  Raises ValueError."""
    firsts = [1] * len(sequences) if starts is None else integers(starts, "starts")
    if len(firsts) != len(sequences):
        raise ValueError(f"there are {len(sequences)} sequences and {len(firsts)} starts")
    for number, (first, sequence) in enumerate(zip(firsts, sequences, strict=True)):
        if not 1 <= first <= len(sequence):
            raise ValueError(f"starts[{number}] must be from 1 to {len(sequence)}, got {first}")
    return [prompt_ids(number, sequence, "sequences") for number, sequence in enumerate(sequences)], firsts


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> tuple[list[T | None], dict[int, ServerError]]:
    """Several calls at once: the results by call, and the error responses by call.  If one raises anything else, the
    others are cancelled, which aborts their requests."""
    failures: dict[int, ServerError] = {}

    async def result(index: int, call: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await call
        except ServerError as error:
            failures[index] = error
            return None

    tasks = [asyncio.ensure_future(result(index, call)) for index, call in enumerate(calls)]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return results, dict(sorted(failures.items()))


def _check_all(results: Sequence[Any], failures: dict[int, ServerError], num_calls: int) -> None:
    """Raises the first error if all calls failed, PromptsFailed if some did."""
    if failures and len(failures) == num_calls:
        raise failures[0]
    if failures:
        raise PromptsFailed(results, failures, num_calls)
