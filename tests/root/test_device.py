"""The processors and memory that the process may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from tokserve import cpu_list, device


def test_threads_are_set_and_default_to_the_cores_of_this_process() -> None:
    before = torch.get_num_threads()
    try:
        assert device.set_threads(3) == 3 and torch.get_num_threads() == 3
        cores = len(os.sched_getaffinity(0))
        assert device.set_threads(None) == cores and torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)


def test_the_processor_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9000: red\nmodel name\t: other\n")
    monkeypatch.setattr(device, "CPUS", tmp_path / "cpuinfo")
    assert device.name() == "Abacus 9000: red"
    monkeypatch.setattr(device, "CPUS", tmp_path / "none")
    assert device.name()


def group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text + "\n")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 1000000 bytes available and no limits."""
    memory = type("Memory", (), {"available": 1_000_000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(device, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(device, "OWN_CGROUP", tmp_path / "own")
    return tmp_path


def test_free_memory_without_limits_is_what_the_machine_has(root: Path) -> None:
    assert device.free_memory() == 1_000_000
    (root / "own").write_text("0::/\n")
    group(root / "fs", {"memory.max": "max", "memory.current": "5"})
    assert device.free_memory() == 1_000_000


def test_free_memory_is_bounded_by_the_tightest_group_above(root: Path) -> None:
    (root / "own").write_text("0::/pod/box\n")
    group(root / "fs/pod/box", {"memory.max": "500000", "memory.current": "100000"})
    group(root / "fs/pod", {"memory.max": "400000", "memory.current": "150000", "memory.stat": "inactive_file 20000"})
    group(root, {"memory.max": "1", "memory.current": "0"})  # above the mount: not a group
    assert device.free_memory() == 270_000
    group(root / "fs/pod", {"memory.current": "900000"})
    assert device.free_memory() == 0


def test_free_memory_reads_control_groups_of_version_1(root: Path) -> None:
    (root / "own").write_text("5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    group(
        root / "fs/memory/box",
        {
            "memory.limit_in_bytes": "300000",
            "memory.usage_in_bytes": "100000",
            "memory.stat": "inactive_file 1\ntotal_inactive_file 7",
        },
    )
    group(root / "fs/memory", {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "9"})
    assert device.free_memory() == 200_007


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
