"""Limits of control groups of both versions, read from files of the test."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tokserve.base import cgroups, processes
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.runner import device

V1 = "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n"


def group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text + "\n")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 1000000 bytes available and no limits."""
    memory = type("Memory", (), {"available": 1_000_000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
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


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/pod/box\n", {"pod/box/cpu.max": "50000 100000"}, 0.5),
        ("0::/pod/box\n", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "250000 100000"}, 2.5),
        ("0::/pod/box\n", {"pod/box/cpu.max": "400000 100000", "pod/cpu.max": "300000 100000"}, 3.0),
        ("0::/pod/box\n", {"pod/box/cpu.max": "max 100000"}, None),
        ("0::/pod/box\n", {"pod/box/cpu.max": "rubbish"}, None),
        (V1, {"cpu/x/cpu.cfs_quota_us": "150000", "cpu/x/cpu.cfs_period_us": "100000"}, 1.5),
        (V1, {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "50000"}, 4.0),
        (V1, {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "0"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_quota_of_processor_time(
    membership: str, files: dict[str, str], quota: float | None, root: Path
) -> None:
    """newcomer-3 D10."""
    (root / "own").write_text(membership)
    for name, text in files.items():
        group((root / "fs" / name).parent, {Path(name).name: text})
    assert cgroups.cpu_quota() == quota


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (64.0, 8), (2.5, 2), (4.0, 4), (0.5, 1)])
def test_threads_by_default_are_those_that_the_quota_lets_run(
    quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    assert cgroups.usable_cpus() == threads
    assert resolve(Config.make()).runtime.cpu_threads == threads
    assert resolve(Config.make(data_parallel_size=2)).runtime.cpu_threads == max(1, threads // 2)
    assert resolve(Config.make(cpu_threads=7)).runtime.cpu_threads == 7
    assert resolve(Config.make(cpu_bind="0-3")).runtime.cpu_threads == 4


@pytest.mark.parametrize(
    ("before", "after", "limit", "cause"),
    [
        (2, 3, 3 << 30, ", probably out of memory (limit 3.0 GiB, cgroup)"),
        (2, 2, 3 << 30, ""),
        (None, None, 3 << 30, ", probably out of memory (limit 3.0 GiB, cgroup)"),
        (0, 1, None, ", probably out of memory"),
        (None, None, None, ", perhaps out of memory"),
    ],
)
def test_a_kill_for_lack_of_memory_is_told_from_others(
    before: int | None, after: int | None, limit: int | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """newcomer-3 D8."""
    monkeypatch.setattr(processes, "_KILLS_BEFORE", before)
    monkeypatch.setattr(cgroups, "out_of_memory_kills", lambda: after)
    limits = [] if limit is None else [cgroups.MemoryLimit(limit, 0)]
    monkeypatch.setattr(cgroups, "memory_limits", lambda: limits)
    reason = processes.describe_exit(-9)
    assert reason == f"was killed by SIGKILL{cause}"
    assert processes.see_log(reason) == reason, "its log says nothing"
    assert processes.see_log("ended with exit code 1") == "ended with exit code 1; its log says more"


@pytest.mark.parametrize(
    ("membership", "name", "kills"),
    [
        ("0::/box\n", "fs/box/memory.events", 3),
        (V1, "fs/memory/box/memory.oom_control", 3),
        ("0::/\n", "fs/other", None),
    ],
)
def test_kills_for_lack_of_memory_are_counted_by_the_groups(
    membership: str, name: str, kills: int | None, root: Path
) -> None:
    (root / "own").write_text(membership)
    group((root / name).parent, {Path(name).name: "low 0\noom 5\noom_kill 3\noom_group_kill 0"})
    assert cgroups.out_of_memory_kills() == kills
