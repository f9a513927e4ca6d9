"""Segments of shared memory that hold no weights."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tokserve.base.errors import RequestError
from tokserve.features.weights.weight_sources import SHARED_MEMORY, Announcement, shared_memory
from tokserve.rl.broadcast import Declared

ONE: Declared = ("norm", torch.float32, (4,))


@pytest.fixture
def path() -> Iterator[Path]:
    path = SHARED_MEMORY / f"tokserve-test-{secrets.token_hex(8)}"
    yield path
    path.rmdir() if path.is_dir() else path.unlink()


def announced(path: Path, count: int) -> Announcement:
    return Announcement(["norm"] * count, ["float32"] * count, [[4]] * count, segment=path.name, offsets=[0] * count)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_no_file_is_refused(path: Path, make: object) -> None:
    assert callable(make)
    make(path)
    with pytest.raises(RequestError, match="is not a shared memory segment") as caught:
        list(shared_memory(announced(path, 1), [ONE]))
    assert caught.value.field == "update_info.segment"


def test_an_empty_segment_has_no_tensor(path: Path) -> None:
    path.touch()
    with pytest.raises(RequestError, match="segment of 0"):
        list(shared_memory(announced(path, 1), [ONE]))
    assert list(shared_memory(announced(path, 0), [])) == []
