"""tokserve.base.structs: after it threads may decode into any class at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokserve.base.structs import struct_classes
from tokserve.features.ranks import channel
from tokserve.server import app

SCRIPT = """
import sys, threading
import msgspec
import tokserve.server.app
from tokserve.base.structs import prepare_structs, struct_classes

prepare_structs()
sys.setswitchinterval(1e-6)
kinds = list(struct_classes())
assert len(kinds) > 100
for kind in kinds:
    together = threading.Barrier(4)

    def decode():
        together.wait()
        for value in ({name: {} for name in kind.__struct_encode_fields__}, {}):
            try:
                msgspec.convert(value, kind)
            except (msgspec.ValidationError, TypeError):
                pass

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("decoded")
"""


def test_the_classes_of_all_packages_are_prepared() -> None:
    assert app and channel
    names = {kind.__name__ for kind in struct_classes()}
    assert {"AbortBody", "Begin", "GenerateBody", "Submit", "StepPlan"} <= names


@pytest.mark.slow
def test_threads_decode_into_any_class_at_once() -> None:
    """The script ends with a segmentation fault if `prepare_structs` is not called."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "decoded\n", done.stderr[-2000:]
