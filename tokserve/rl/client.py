"""A trainer's client: rollouts as numpy arrays, and weights pushed over HTTP or a process group.

Everything is asynchronous; many rollouts are in flight at once.  A call is repeated only where that is safe: when no
connection could be made, or the server answered 503 with Retry-After.  Uses the routes of docs/rl.md and
docs/token-api.md, and none of the server's code.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokserve.errors import RequestError, TransferFailed
from tokserve.rl import broadcast
from tokserve.rl.broadcast import TransferGroup
from tokserve.rl.deltas import dtype_name, file_pieces
from tokserve.rl.digests import checksums
from tokserve.rl.push import PushResult, Weights, named_tensors
from tokserve.rl.pusher import TENSORS, Pusher, ServerError, body_of, transaction

MSGPACK = "application/msgpack"
INT32 = np.iinfo(np.int32)
TRUNCATED = -2  # the count of a sampling mask that would have had too many ids
WAIT = 0.1  # seconds between two attempts to reach a server
NamedTensors = Iterable[tuple[str, Tensor]]


def sticky_seeds(prompts: Iterable[Sequence[int]], seed: int = 0) -> list[int]:
    """A seed for each prompt that depends on nothing but the prompt and `seed`.

    With the same seed in the next epoch a rollout meets the same noise, so where the policy has changed little the
    server drafts it from the last one.  Each is still an exact sample of the policy, but those of one prompt are
    correlated over epochs.
    """
    key = seed.to_bytes(8, "little", signed=True)
    packed = (np.asarray(prompt, "<i4").tobytes() for prompt in prompts)
    return [
        int.from_bytes(hashlib.blake2b(ids, digest_size=8, key=key).digest(), "little") % (1 << 62) for ids in packed
    ]


@dataclass(slots=True)
class Rollout:
    """One choice of one prompt.  `logprobs` are those of `token_ids`, in the requested mode.

    `weight_versions`: (version, start, end): which version of the weights made which of `token_ids`.

    With `return_sampling_mask`, else None, by token: `sampling_mask`, the ascending ids that it was drawn from, None
    for the whole vocabulary and where there were too many (`mask_truncated`); `sampling_logprobs`, its logprob among
    them; `kept_logprob`, the logprob of all of them in the model's distribution at the temperature.
    """

    prompt_index: int
    index: int
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    weight_versions: list[tuple[str, int, int]]
    sampling_mask: list[NDArray[np.int32] | None] | None = None
    mask_truncated: NDArray[np.bool_] | None = None
    sampling_logprobs: NDArray[np.float32] | None = None
    kept_logprob: NDArray[np.float32] | None = None


class TokserveClient:
    """For one server and one event loop; use as an async context manager, or `await close()`.

    `api_key`: an admin key where the server has one.  `connections`: limit of requests in flight.
    """

    def __init__(self, url: str, *, api_key: str | None = None, connections: int = 256) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits)
        self._group: TransferGroup | None = None
        self._pusher = Pusher(self)

    async def __aenter__(self) -> TokserveClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._group is not None:
            self._group.close()
        await self._http.aclose()

    # --- generation ---

    async def wait_ready(self, seconds: float = 600.0) -> None:
        """Wait until the server serves.  Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                with suppress(httpx.TransportError):
                    if (await self._http.get("/health")).status_code == 200:
                        return
                await asyncio.sleep(WAIT)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        seeds: Sequence[int] | None = None,
        cache_salt: str | None = None,
        group_id: str | None = None,
        draft_group: str | None = None,
        model: str | None = None,
        **sampling: Any,
    ) -> list[Rollout]:
        """`n` rollouts for each prompt (token ids), by prompt and index; `sampling`: the route's sampling_params.

        `model`: the name of an adapter; default: the model itself.  Logprobs are always returned.  Without `seeds` (one
        per prompt; choice i adds i) the server draws them.  `draft_group`: earlier rollouts of this group are drafts,
        as those of the same prompt are without it.  If one prompt fails, the others are aborted.
        """
        if seeds is not None and len(seeds) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(seeds)} seeds")
        checked = [_prompt(number, prompt) for number, prompt in enumerate(prompts)]
        tasks = []
        options = {"cache_salt": cache_salt, "group_id": group_id, "draft_group": draft_group, "model": model}
        for number, ids in enumerate(checked):
            params = {"logprobs": 0, **sampling, "n": n} | ({} if seeds is None else {"seed": seeds[number]})
            tasks.append(asyncio.ensure_future(self._generate(number, ids, params, options)))
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # closes the connections, which aborts the requests
                task.cancel()
        return [rollout for rollouts in results for rollout in rollouts]

    async def _generate(
        self, number: int, ids: NDArray[np.int32], params: dict[str, Any], options: dict[str, str | None]
    ) -> list[Rollout]:
        body = {"token_ids": ids.tobytes(), "sampling_params": params, "logprobs_format": "arrays",
                "request_id": secrets.token_hex(12), **options}  # fmt: skip
        headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
        content = msgspec.msgpack.encode(body)
        answer = await self._send("POST", "/inference/v1/generate", again=True, content=content, headers=headers)
        return [_rollout(number, ids, choice) for choice in msgspec.msgpack.decode(answer.content)["choices"]]

    # --- control ---

    async def state(self) -> dict[str, Any]:
        """GET /inference/v1/state."""
        state: dict[str, Any] = (await self._send("GET", "/inference/v1/state", again=True)).json()
        return state

    async def pause(self, mode: str = "abort", clear_cache: bool = False) -> None:
        """Stop generating; returns when generation has stopped."""
        await self.control("/pause", {"mode": mode, "clear_cache": clear_cache}, again=True)

    async def resume(self) -> None:
        await self.control("/resume", again=True)

    @asynccontextmanager
    async def paused(self, mode: str = "keep") -> AsyncIterator[None]:
        """Pause for the length of the block; resumes even if it raises."""
        await self.pause(mode)
        try:
            yield
        finally:
            await self.resume()

    async def abort(self, group_id: str) -> int:
        """Abort the requests of a group; returns how many there were."""
        return int((await self.control("/abort_requests", {"group_id": group_id}))["aborted"])

    # --- weights ---

    async def load_lora_adapter(self, name: str, path: str) -> int:
        """Load a PEFT directory of the server's machine, replacing an adapter of this name; returns its generation."""
        done = await self.control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        return int(done["generation"])

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter; returns when its last request has ended."""
        await self.control("/v1/unload_lora_adapter", {"lora_name": name})

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

        `address`, `port`: where this process listens, as the server sees it.
        """
        options = {"backend": backend, "master_address": address, "master_port": port, "rank_offset": rank_offset,
                   "world_size": world_size}  # fmt: skip
        meeting = _in_thread(lambda: TransferGroup(backend, address, port, 0, world_size, timeout))
        self._group, _ = await asyncio.gather(
            meeting, self.control("/init_weight_transfer_engine", {"init_info": options})
        )

    async def update_weights(self, tensors: Weights, version: str | None = None) -> dict[str, Any]:
        """Replace all weights, over the group if there is one, else over HTTP: {"weight_version", "epoch"}.

        Names are those of the checkpoint, as `model.named_parameters()` of a transformers model gives them.  If it
        fails, the server keeps its old weights.
        """
        named = named_tensors(tensors)
        async with transaction(self):
            if self._group is None:
                await self.send_body("/update_weights", body_of(file_pieces(named)), TENSORS)
            else:
                announced = {
                    "names": list(named), "dtype_names": [dtype_name(tensor.dtype) for tensor in named.values()],
                    "shapes": [list(tensor.shape) for tensor in named.values()], "packed": True,
                }  # fmt: skip
                await self.broadcast(announced, list(named.values()), packed=True)
            committed: dict[str, Any] = await self.control("/finish_weight_update", {"weight_version": version})
        return committed

    async def push(
        self,
        weights: Weights,
        version: str | None = None,
        *,
        delta: bool = False,
        directory: str | Path | None = None,
        anchor_every: int = 10,
    ) -> PushResult:
        """Replace all weights by those of a module (a `PolicyModel`, say), a state_dict, or pairs of (name, tensor).

        Each is rounded here as the server rounds it, so that no more bytes go than the server keeps.  `delta`: send
        only the elements that changed since the last push with it, which must still be what serves; else, and the
        first time, everything is pushed, and the result says why.  For that a rounded copy of all weights is kept.
        `directory`: write files there, which this server and others (`load_weights`) read, a delta a version and all
        weights with every `anchor_every`-th.  If it fails, the server keeps its old weights.
        """
        return await self._pusher.push(weights, version, delta=delta, directory=directory, anchor_every=anchor_every)

    async def load_weights(self, directory: str | Path, version: str | None = None) -> dict[str, Any]:
        """Have the server read a checkpoint directory, or the files of a version (default: the newest) that `push`
        wrote: {"weight_version", "epoch"}."""
        body = {"weight_dir": str(directory), "weight_version": version}
        loaded: dict[str, Any] = await self.control("/update_weights", body)
        return loaded

    async def served_weights(self, *, checksum: bool = False, tensors: bool = False) -> dict[str, Any]:
        """GET /weight_info.  `checksum`: have the checksum of all weights computed; `tensors`: list them."""
        flags = [name for name, value in (("checksum", checksum), ("tensors", tensors)) if value]
        reply: dict[str, Any] = await self.get("/weight_info?" + "&".join(f"{name}=true" for name in flags))
        return reply

    async def weight_checksums(self) -> dict[str, str]:
        """Checksums of the tensors that the server's weights were loaded from, by name, as `checksums` computes them.

        Raises ServerError (409) if they are not available.
        """
        request = {"action": "checksum", "names": "checkpoint"}
        digests: dict[str, str] = (await self.control("/weight_checker", request))["checkpoint"]
        return digests

    async def compare_weights(self, tensors: NamedTensors) -> list[str]:
        """The names of tensors that differ from the server's, or that only one side has; empty if all are equal.

        The dtype counts: pass the tensors in the dtype in which they were pushed.
        """
        baseline = await asyncio.to_thread(checksums, [(name, tensor.detach()) for name, tensor in tensors])
        request = {"action": "compare", "names": "checkpoint", "baseline": baseline}
        mismatches: list[str] = (await self.control("/weight_checker", request))["mismatches"]
        return mismatches

    @property
    def has_group(self) -> bool:
        """Whether `join` has formed a process group."""
        return self._group is not None

    async def broadcast(self, announced: dict[str, Any], tensors: list[Tensor], *, packed: bool) -> None:
        """Announce tensors to the server and send them over the group."""
        group = self._group
        if group is None:
            raise TransferFailed("there is no process group: join one first")
        sending = asyncio.ensure_future(asyncio.to_thread(broadcast.send, group, tensors, packed=packed))
        received = False
        try:
            await self.control("/update_weights", {"update_info": announced})
            received = True
        finally:
            if not received:  # the server does not receive any more: interrupt the sending thread
                group.interrupt()
                self._group = None
                await asyncio.wait([sending])
                sending.exception()  # retrieved, or asyncio logs it
        await sending

    async def get(self, path: str) -> Any:
        """The reply of a GET, as JSON."""
        return (await self._send("GET", path, again=True)).json()

    async def send_body(self, path: str, content: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        """POST a body that is made while it is sent."""
        await self._send("POST", path, content=content, headers=headers)

    async def control(self, path: str, body: dict[str, Any] | None = None, *, again: bool = False) -> Any:
        """The reply of a POST, as JSON."""
        return (await self._send("POST", path, again=again, json=body or {})).json()

    async def _send(self, method: str, path: str, *, again: bool = False, **kwargs: Any) -> httpx.Response:
        """Send a request; with `again`, repeat it where it cannot have had an effect."""
        reconnect = again  # once
        while True:
            try:
                answer = await self._http.request(method, path, **kwargs)
            except httpx.ConnectError:
                if not reconnect:
                    raise
                reconnect = False
                await asyncio.sleep(WAIT)
                continue
            if answer.status_code == 200:
                return answer
            if again and answer.status_code == 503 and "retry-after" in answer.headers:
                await asyncio.sleep(float(answer.headers["retry-after"]))
                continue
            raise _error(answer)


async def _in_thread(form: Callable[[], TransferGroup]) -> TransferGroup:
    """`form()` in a daemon thread, which does not keep the program from ending if the caller gives up."""
    formed: Future[TransferGroup] = Future()

    def run() -> None:
        try:
            formed.set_result(form())
        except RequestError as error:
            formed.set_exception(error)
        finally:
            if not formed.done():  # the thread prints the traceback
                formed.set_exception(TransferFailed("the process group could not be formed"))

    formed.set_running_or_notify_cancel()  # it cannot be cancelled
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(formed)


def _error(answer: httpx.Response) -> ServerError:
    try:
        error = answer.json()["error"]
        return ServerError(answer.status_code, error["message"], error["type"], error["param"], error.get("code"))
    except (ValueError, KeyError, TypeError):
        return ServerError(answer.status_code, answer.text[:500])


def _prompt(number: int, prompt: Sequence[int]) -> NDArray[np.int32]:
    """The ids of a prompt.  Raises ValueError for text, floats, ids beyond 32 bits, and a single id."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"prompts[{number}] must be a list of token ids, got {prompt!r}; one prompt is [ids]")
    if ids.size and (ids.min() < INT32.min or ids.max() > INT32.max):
        raise ValueError(f"prompts[{number}] holds an id that does not fit in 32 bits")
    return ids.astype("<i4")


def _rollout(number: int, prompt: NDArray[np.int32], choice: dict[str, Any]) -> Rollout:
    logprobs = choice["logprobs"]
    values = b"" if logprobs is None else logprobs["token_logprobs"]
    spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
    rollout = Rollout(
        number, choice["index"], prompt, np.frombuffer(choice["token_ids"], "<i4"), np.frombuffer(values, "<f4"),
        choice["finish_reason"], spans,
    )  # fmt: skip
    if "sampling_mask" in choice:
        counts = np.frombuffer(choice["sampling_mask"]["counts"], "<i4")
        parts = np.split(np.frombuffer(choice["sampling_mask"]["ids"], "<i4"), np.maximum(counts, 0).cumsum())
        rollout.sampling_mask = [
            None if count < 0 else ids for count, ids in zip(counts.tolist(), parts[:-1], strict=True)
        ]
        rollout.mask_truncated = counts == TRUNCATED
        rollout.sampling_logprobs = np.frombuffer(choice["sampling_logprobs"], "<f4")
        rollout.kept_logprob = np.frombuffer(choice["kept_logprob"], "<f4")
    return rollout
