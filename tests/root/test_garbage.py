"""Full collections of garbage: none while bodies are decoded, and all cycles in the end."""

from __future__ import annotations

import subprocess
import sys

# in a process of its own, whose collector stays as it is made here
PROGRAM = """
import gc, weakref
import msgspec
from tokserve.garbage import AGAIN, LATEST, SOON, FullCollections

class Node: pass
now = 0.0
garbage = FullCollections(lambda: now)
full = []
gc.callbacks.append(lambda phase, info: phase == "start" and info["generation"] == 2 and full.append(now))
bodies = [msgspec.json.decode(b"[" + b"{}," * 300_000 + b"{}]") for _ in range(3)]
assert not full, "decoding began a full collection"
node = Node()
node.me, gone = node, weakref.ref(node)
gc.collect(1)
del node
garbage.run_if_due(calm=True)
assert not full and gone() is not None
now = SOON
assert not garbage.run_if_due(calm=False) and not garbage.run_if_due(calm=True), "there are many objects"
del bodies
now += AGAIN
assert not garbage.run_if_due(calm=False) and not full
assert garbage.run_if_due(calm=True) and full == [now] and gone() is None
now += LATEST
assert garbage.run_if_due(calm=False) and len(full) == 2
"""


def test_full_collections_wait_for_a_calm_moment() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
