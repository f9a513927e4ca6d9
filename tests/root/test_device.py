"""The processors and memory that the process may use."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tokserve.base import cgroups, cpu_list
from tokserve.runner import device


def test_threads_are_set_and_default_to_the_cores_of_this_process() -> None:
    before = torch.get_num_threads()
    try:
        assert device.set_threads(3) == 3 and torch.get_num_threads() == 3
        cores = cgroups.usable_cpus()
        assert device.set_threads(None) == cores and torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)


def test_the_processor_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9000: red\nmodel name\t: other\n")
    monkeypatch.setattr(device, "CPUS", tmp_path / "cpuinfo")
    assert device.name() == "Abacus 9000: red"
    monkeypatch.setattr(device, "CPUS", tmp_path / "none")
    assert device.name()


@pytest.mark.parametrize(
    ("available", "swap", "group", "expected"),
    [
        (5, 0, None, (5, 100, "this machine's memory")),
        (5, 20, None, (25, 120, "this machine's memory")),
        (50, 20, (40, 30), (30, 40, "the container's limit (cgroup)")),
        (50, 0, (40, -3), (0, 40, "the container's limit (cgroup)")),
        (50, 0, (400, 300), (50, 100, "this machine's memory")),
    ],
)
def test_the_tightest_bound_of_memory_is_named(
    available: int,
    swap: int,
    group: tuple[int, int] | None,
    expected: tuple[int, int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=100))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=swap, total=swap))
    limits = [] if group is None else [cgroups.MemoryLimit(*group)]
    monkeypatch.setattr(cgroups, "memory_limits", lambda: limits)
    assert device.memory_bound()[:3] == expected


def nodes(root: Path, *lists: str) -> Path:
    """A copy of /sys/devices/system/node of a machine whose memory nodes have these CPUs."""
    for number, cpus in enumerate(lists):
        (root / f"node{number}").mkdir()
        (root / f"node{number}" / "cpulist").write_text(cpus + "\n")
    return root


def test_threads_are_bound_node_by_node_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6})
    monkeypatch.setattr(cpu_list, "NODES", nodes(tmp_path, "0-1,4-5", "2-3,6-7", ""))
    assert device.bound_cpus("auto", 7) == [0, 1, 4, 5, 2, 3, 6], "CPUs that may not be used are left out"
    assert device.bound_cpus("auto", 4) == [], "not a thread for each CPU"
    assert device.bound_cpus("none", 7) == []
    assert device.bound_cpus("6,0-2", 4) == [6, 0, 1, 2]


def test_threads_are_not_bound_on_one_memory_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(cpu_list, "NODES", nodes(tmp_path, "0-1", "2-3"))
    assert device.bound_cpus("auto", 2) == []
