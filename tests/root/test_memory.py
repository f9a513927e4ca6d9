"""The memory of a process: full collections wait for few objects, and what is free goes back to the system."""

from __future__ import annotations

import subprocess
import sys
import weakref

import psutil
import pytest

from tests import needs
from tokserve.base.memory import FREED_AT_ONCE, IDLE, IdleMemory, free_in_parts, give_back

# in processes of their own, whose collector and allocator stay as they are made here
COLLECTIONS = """
import gc, weakref
import msgspec
from tokserve.base.memory import LATEST, LOOK, SOON, FullCollections

class Node: pass
now = 0.0
thresholds = gc.get_threshold()
garbage = FullCollections(lambda: now)
full = []
gc.callbacks.append(lambda phase, info: phase == "start" and info["generation"] == 2 and full.append(now))
# in calls of a few objects each: from Python 3.12 on, a collection begins between two instructions, not within a call
bodies = [[msgspec.json.decode(b"[{},{}]") for _ in range(100_000)] for _ in range(3)]
assert not full, "decoding began a full collection"
node = Node()
node.me, gone = node, weakref.ref(node)
gc.collect(1)
del node
now = SOON + LOOK
garbage.run_if_due()
assert not full and gone() is not None, "there are many objects"
now = LATEST
garbage.run_if_due()
assert full == [LATEST] and gone() is None
now += SOON - LOOK
del bodies
garbage.run_if_due()
assert full == [LATEST], "there was one"
now += LOOK
garbage.run_if_due()
assert full == [LATEST, now], "there are few objects"
garbage.stop()
assert gc.get_threshold() == thresholds, "they are Python's again"
"""
CACHES = """
import gc, sys
import msgspec
from tokserve.base.memory import SOON, FullCollections

now = 0.0
garbage = FullCollections(lambda: now)
def use():
    msgspec.json.decode(b"[" + b",".join(b'{"key%d": 1}' % i for i in range(900)) + b"]")
    texts = []
    for i in range(900):
        getattr(garbage, "".join(["run", "_if_due"]))  # the cache keeps this string, of this lookup
        texts.append(str(i))  # so that the next string is at another address
gc.collect()
before = sys.getallocatedblocks()
use()
gc.collect()
print(sys.getallocatedblocks() - before)
now = SOON
garbage.run_if_due()
print(sys.getallocatedblocks() - before)
"""
APART = """
import psutil
from tokserve.base.memory import keep_apart
keep_apart()
larger = b"x" * (8 << 20)
del larger  # from here on glibc would take what is smaller from the heap
blocks = [b"x" * (1 << 20) for _ in range(64)]
process = psutil.Process()
full = process.memory_info().rss
del blocks[:-1]
print(full - process.memory_info().rss)
"""
HEAPS = """
import ctypes
import sys
import threading
from tokserve.base.memory import share_heaps
share_heaps()
barrier = threading.Barrier(9)
def work():
    block = bytearray(20_000)
    barrier.wait()
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
barrier.wait()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
barrier.wait()
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_full_collections_wait_until_there_are_few_objects() -> None:
    run(COLLECTIONS)


def test_full_collections_drop_what_caches_hold_of_requests() -> None:
    cached, left = map(int, run(CACHES).split())
    assert (
        cached > 300 and left < 100
    )  # msgspec keeps about 400 keys; how many names Python keeps depends on its version


@needs.GLIBC.skips()  # other allocators have no such threshold
def test_a_large_allocation_goes_back_when_it_is_freed() -> None:
    assert int(run(APART)) > 60 << 20


@needs.GLIBC.skips()  # other allocators have no such heaps
def test_threads_share_two_heaps() -> None:
    assert run(HEAPS).count("<heap nr=") == 2


@needs.GLIBC.skips()  # other allocators have nothing to trim
def test_memory_between_what_is_in_use_goes_back_to_the_system() -> None:
    blocks = [bytes(20_000) for _ in range(4_000)]  # small enough to come from the heap, not from a mapping
    last = blocks[-1]
    process = psutil.Process()
    full = process.memory_info().rss
    del blocks
    give_back()
    assert len(last) == 20_000 and process.memory_info().rss < full - 40_000_000


def test_free_memory_goes_back_once_after_idle_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[float] = []
    monkeypatch.setattr("tokserve.base.memory.give_back", lambda: released.append(now))
    now = 0.0
    memory = IdleMemory(lambda: now)
    memory.turn(False)
    assert memory.sleep(None) is None and memory.sleep(3.0) == 3.0, "there was no work"
    memory.turn(True)
    now = 1.0
    memory.turn(False)
    assert memory.sleep(None) == IDLE - 1 and memory.sleep(3.0) == 3.0 and memory.sleep(IDLE) == IDLE - 1
    memory.turn(True)
    now = IDLE
    memory.turn(False)
    assert not released and memory.sleep(None) == 1.0, "work came in between"
    now += 1
    assert memory.sleep(None) == 0.0
    memory.turn(False)
    now += IDLE
    memory.turn(False)
    assert released == [IDLE + 1] and memory.sleep(None) is None


def test_decoded_json_is_freed_but_for_what_others_refer_to() -> None:
    count = 3 * FREED_AT_ONCE + 1

    class Entry(list[int]):
        """A list that shows when it is freed."""

    kept, inner = list(range(count)), [Entry() for _ in range(count)]
    freed = [weakref.ref(inner[0]), weakref.ref(inner[-1])]
    values = [{"kept": kept, "objects": [{"inner": inner}, 5], "text": "a", "none": []}]
    del inner
    free_in_parts(values)
    assert not values and [reference() for reference in freed] == [None, None]
    assert kept == list(range(count))
