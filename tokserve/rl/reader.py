"""Reads a trainer's weights for code in an event loop: in a thread, and all of them in the same one.

What makes the tensors may depend on the state of its thread, such as the mode of gradients or the current device.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from contextvars import copy_context
from typing import Generic, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from .weight_pairs import Weights, reading

T = TypeVar("T")
P = ParamSpec("P")


class Reader(Generic[T]):
    """What is made of the pairs, one after the other."""

    def __init__(self, items: Iterator[T], thread: _Thread) -> None:
        self._items, self._thread = items, thread

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item = await self._thread.call(lambda: next(self._items, None))
        if item is None:
            raise StopAsyncIteration
        return item


class _Thread:
    """A thread in which no gradients are recorded, on the caller's device."""

    def __init__(self) -> None:
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if used else None
        self._context = copy_context()
        self._executor = ThreadPoolExecutor(1, "weights-read", initializer=_prepare, initargs=(device,))

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: self._context.run(function, *args, **kwargs))

    def end(self) -> None:
        self._executor.shutdown(wait=False)


def _prepare(device: int | None) -> None:
    torch.set_grad_enabled(False)
    if device is not None:
        torch.cuda.set_device(device)


@asynccontextmanager
async def open_reader(
    weights: Weights, make: Callable[[Iterator[tuple[str, Tensor]]], Iterator[T]]
) -> AsyncIterator[Reader[T]]:
    """What `make` makes of the pairs of `weights`, for `async for`.  Raises as `reading`, and ends as it does."""
    thread, stack = _Thread(), ExitStack()
    try:
        try:
            yield Reader(await thread.call(lambda: make(stack.enter_context(reading(weights)))), thread)
        finally:
            await thread.call(stack.__exit__, *sys.exc_info())
    finally:
        thread.end()


async def read_whole(weights: Weights, take: Callable[[Iterator[tuple[str, Tensor]]], T]) -> T:
    """What `take` makes of all the pairs."""
    async with open_reader(weights, lambda pairs: iter((take(pairs),))) as reader:
        return await anext(reader)
