"""Groups of ranks wait for each other as long as a rank may load."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokserve.features.ranks import collectives


def test_nccl_waits_as_long_as_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[tuple[Any, ...]] = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            groups.append(arguments)

    fake = SimpleNamespace(PrefixStore=lambda name, store: (name, store), ProcessGroupNCCL=Group)
    monkeypatch.setattr(collectives, "distributed", fake)
    monkeypatch.delenv(collectives.ERROR_HANDLING, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    collectives.ProcessGroup("store", "tensor", 1, 2, torch.device("cpu"), nccl=True)
    ((scoped, rank, size, options),) = groups
    assert (scoped, rank, size) == (("tensor", "store"), 1, 2)
    assert options._timeout == collectives.LONGEST and os.environ[collectives.ERROR_HANDLING] == "0"
