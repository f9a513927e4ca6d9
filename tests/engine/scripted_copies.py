"""Copies of KV blocks for the scripted executor: slots and files hold what the simulated blocks hold.

A copy takes place when it is let go (`advance`), or when its result is needed, so that a block which got other content
in between is copied with that.  `files` outlive the engine; `broken`: keys whose files are damaged; `is_full`: nothing
is written; `is_hung`: nothing is read.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.engine.scripted import ScriptedExecutor

LANES = {
    "save_blocks": "pages",
    "load_blocks": "pages",
    "read_files": "read",
    "use_identity": "read",
    "write_files": "write",
    "clear_files": "write",
    "read_blocks": "pages",
    "write_blocks": "pages",
}
Content = list[tuple[tuple[bytes, int], str]]
SENT: dict[bytes, Content] = {}  # by what stands for a block on the wire between engines of one process


class LateFuture(Future[Any]):
    """A future whose work is done by `advance`, or when its result is read."""

    def __init__(self, until: Callable[[LateFuture], None], work: Callable[[], Any]) -> None:
        super().__init__()
        self._until, self.work = until, work

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._until(self)
        return super().result(timeout)


class ScriptedCopies:
    """`instant`: every copy takes place at once."""

    def __init__(self, executor: ScriptedExecutor, files: dict[tuple[bytes, bytes], Content] | None = None) -> None:
        self.executor = executor
        self.files: dict[tuple[bytes, bytes], Content] = {} if files is None else files
        self.slots: dict[int, Content] = {}
        self.lanes: dict[str, deque[LateFuture]] = {lane: deque() for lane in ("pages", "read", "write")}
        self.instant = True
        self.broken: set[bytes] = set()
        self.is_full = self.is_hung = False
        self.calls: list[str] = []

    def copy(self, lane: str, method: str, args: dict[str, Any]) -> Future[Any]:
        assert LANES[method] == lane
        self.calls.append(method)
        queue = self.lanes[lane]
        future = LateFuture(lambda late: self.advance(lane, late), lambda: getattr(self, method)(**args))
        queue.append(future)
        if self.instant and not (self.is_hung and lane == "read"):
            self.advance(lane, future)
        return future

    def advance(self, lane: str, last: LateFuture | None = None) -> None:
        """Do the oldest work of a lane, or all up to `last`."""
        queue = self.lanes[lane]
        while queue:
            future = queue.popleft()
            future.set_result(future.work())
            if last is None or future is last:
                return

    def _block(self, block: int) -> Content:
        executor = self.executor
        places = [(block, offset) for offset in range(executor.size)]
        return [(executor.kv.get(place, (b"", -1)), executor.kv_weights.get(place, "")) for place in places]

    def _put(self, block: int, content: Content) -> None:
        for offset, ((value, _), weights) in enumerate(content):
            self.executor.kv[block, offset] = value, -1
            self.executor.kv_weights[block, offset] = weights

    def save_blocks(self, blocks: Sequence[int], slots: Sequence[int]) -> float:
        self.slots |= {slot: self._block(block) for block, slot in zip(blocks, slots, strict=True)}
        return 0.001

    def load_blocks(self, blocks: Sequence[int], slots: Sequence[int]) -> float:
        for block, slot in zip(blocks, slots, strict=True):
            self._put(block, self.slots[slot])
        return 0.001

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        contents = [self._block(block) for block in blocks]
        sent = [hashlib.blake2b(repr(content).encode(), digest_size=32).digest() for content in contents]
        SENT.update(zip(sent, contents, strict=True))
        return sent

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytearray]) -> None:
        for block, sent in zip(blocks, contents, strict=True):
            self._put(block, SENT[bytes(sent)])

    def write_files(self, identity: bytes, keys: Sequence[bytes], slots: Sequence[int]) -> dict[str, Any]:
        if self.is_full:
            return {"written": [], "deleted": [], "failed": len(keys), "seconds": 0.001}
        self.files |= {(identity, key): self.slots[slot] for key, slot in zip(keys, slots, strict=True)}
        return {"written": list(keys), "deleted": [], "failed": 0, "seconds": 0.001}

    def read_files(self, identity: bytes, keys: Sequence[bytes], slots: Sequence[int]) -> dict[str, Any]:
        count = damaged = 0
        for key, slot in zip(keys, slots, strict=True):
            if key in self.broken:
                damaged = 1
                del self.files[identity, key]
                break
            if (identity, key) not in self.files:
                break
            self.slots[slot] = self.files[identity, key]
            count += 1
        return {"count": count, "damaged": damaged, "seconds": 0.001}

    def use_identity(self, identity: bytes, parts: dict[str, str]) -> list[bytes]:
        return [key for owner, key in self.files if owner == identity]

    def clear_files(self) -> None:
        self.files.clear()
