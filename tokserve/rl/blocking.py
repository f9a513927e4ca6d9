"""`Client`: the methods of `AsyncClient`, blocking.

An event loop in a thread of its own runs an `AsyncClient`; each method hands it a coroutine and waits.  So many prompts
are in flight at once here too, and a pause is extended while the caller computes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from .client import PATIENCE, PAUSE_LEASE, SESSION_LEASE, SESSION_WAIT, AsyncClient
from .errors import ClientClosed
from .rollouts import RolloutDelta
from .sessions import SessionTree

T = TypeVar("T")
P = ParamSpec("P")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """A method of `AsyncClient` as one of `Client`."""

    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(method(self._client, *args, **kwargs))

    return call


class Client:
    """A client of one server; use as a context manager, or `close()`.  Its methods may be called from several threads.

    The arguments are those of `AsyncClient`.  A forked process makes its own client.

    Methods raise what those of `AsyncClient` do, and ClientClosed.
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
        self._owner = os.getpid()
        self._client = AsyncClient(
            url, api_key=api_key, connections=connections, take_over=take_over, patience=patience, trust_env=trust_env
        )
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(self._loop,), name="tokserve-client", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _close, self._owner, self._client, self._loop, thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, which aborts what is in flight; a second time does nothing."""
        self._close()

    wait_ready = _blocking(AsyncClient.wait_ready)
    generate = _blocking(AsyncClient.generate)
    score = _blocking(AsyncClient.score)
    score_candidates = _blocking(AsyncClient.score_candidates)
    abort = _blocking(AsyncClient.abort)
    state = _blocking(AsyncClient.state)
    config = _blocking(AsyncClient.config)
    models = _blocking(AsyncClient.models)
    pause = _blocking(AsyncClient.pause)
    extend_pause = _blocking(AsyncClient.extend_pause)
    resume = _blocking(AsyncClient.resume)
    sleep = _blocking(AsyncClient.sleep)
    wake_up = _blocking(AsyncClient.wake_up)
    is_sleeping = _blocking(AsyncClient.is_sleeping)
    reset_prefix_cache = _blocking(AsyncClient.reset_prefix_cache)
    control = _blocking(AsyncClient.control)
    get = _blocking(AsyncClient.get)
    collective_rpc = _blocking(AsyncClient.collective_rpc)
    session_tree = _blocking(AsyncClient.session_tree)
    add_session_metadata = _blocking(AsyncClient.add_session_metadata)
    close_session = _blocking(AsyncClient.close_session)
    load_lora_adapter = _blocking(AsyncClient.load_lora_adapter)
    push_adapter = _blocking(AsyncClient.push_adapter)
    unload_lora_adapter = _blocking(AsyncClient.unload_lora_adapter)
    join = _blocking(AsyncClient.join)
    leave = _blocking(AsyncClient.leave)
    update_weights = _blocking(AsyncClient.update_weights)
    push = _blocking(AsyncClient.push)
    load_weights = _blocking(AsyncClient.load_weights)
    abort_weight_update = _blocking(AsyncClient.abort_weight_update)
    update_weight_version = _blocking(AsyncClient.update_weight_version)
    served_weights = _blocking(AsyncClient.served_weights)
    weight_checksums = _blocking(AsyncClient.weight_checksums)
    compare_weights = _blocking(AsyncClient.compare_weights)

    def stream(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        request_id: str | None = None,
        cache_salt: str | None = None,
        group_id: str | None = None,
        model: str | None = None,
        **sampling: Any,
    ) -> Iterator[RolloutDelta]:
        """The tokens of one prompt's rollouts as they are generated; the joined deltas are what `generate` returns.
        Leaving the loop aborts the rest.  The arguments are those of `AsyncClient.stream`."""
        deltas = self._client.stream(
            prompt, n=n, request_id=request_id, cache_salt=cache_salt, group_id=group_id, model=model, **sampling
        )
        try:
            while (delta := self._wait(_next(deltas))) is not None:
                yield delta
        finally:
            if self._close.alive:  # not waited for: a collected iterator may be closed in the loop's thread
                asyncio.run_coroutine_threadsafe(deltas.aclose(), self._loop)

    def sessions(self, *, wait: float = SESSION_WAIT, lease: float = SESSION_LEASE) -> Iterator[SessionTree]:
        """Sessions that were closed, as they come; see `AsyncClient.sessions`."""
        trees = self._client.sessions(wait=wait, lease=lease)
        try:
            while (tree := self._wait(_next(trees))) is not None:
                yield tree
        finally:
            if self._close.alive:  # not waited for, as in `stream`
                asyncio.run_coroutine_threadsafe(trees.aclose(), self._loop)

    @contextmanager
    def paused(self, mode: str = "keep", *, lease: float = PAUSE_LEASE) -> Iterator[None]:
        """Pause for the length of the block; resumes even if it raises, also on Ctrl-C, and while it is pausing.  Of
        several blocks of this client, nested or at once, the last one that ends resumes.

        The pause is extended by a thread while the block computes; when this process has ended, the server goes on by
        itself after `lease` seconds (0: never).
        """
        pause = self._client.paused(mode, lease=lease)
        self._wait(pause.__aenter__())  # interrupted, it resumes in the loop's thread
        try:
            yield
        finally:
            self._wait(pause.__aexit__(None, None, None))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the loop's thread and wait; Ctrl-C cancels it."""
        try:
            loop = self._running_loop()
        except ClientClosed:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("this client has been closed meanwhile") from None
        finally:
            future.cancel()  # does nothing to one that is done

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if os.getpid() != self._owner:
            raise ClientClosed("a forked process must make its own client")
        if not self._close.alive:
            raise ClientClosed("this client has been closed")
        return self._loop


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    if calls := asyncio.all_tasks(loop):  # of threads that wait for them
        for call in calls:
            call.cancel()
        loop.run_until_complete(asyncio.wait(calls))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _close(owner: int, client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the loop: on `close`, when collected, or at exit."""
    if os.getpid() != owner:  # a fork has no loop thread
        return
    if threading.current_thread() is thread:  # collected there
        closing = loop.create_task(client.close())
        closing.add_done_callback(lambda _: loop.stop())
        return
    try:
        asyncio.run_coroutine_threadsafe(client.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
