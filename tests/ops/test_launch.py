"""The table of launch parameters: the first fitting entry is used, and every size has one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tokserve.gpu.kernels import launch


@pytest.fixture
def entries() -> Iterator[list[dict[str, object]]]:
    """The entries of a kernel, for a test to fill."""
    entries: list[dict[str, object]] = []
    launch.table()["fake"] = entries
    yield entries
    del launch.table()["fake"]
    launch.tuned.cache_clear()


def test_the_first_entry_that_fits_counts(entries: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_architecture", lambda device: "sm_90" if device == 0 else "")
    entries += [
        {"arch": "sm_90", "rows": 8, "outputs": 100, "is": "a"},
        {"arch": "sm_90", "rows": 8, "is": "b"},
        {"arch": "sm_80", "is": "c"},
        {"rows": 8, "is": "d"},
        {"is": "e"},
    ]
    entries = [
        launch.tuned("fake", device, rows=rows, outputs=outputs)["is"]
        for device, rows, outputs in ((0, 8, 100), (0, 8, 101), (0, 9, 1), (None, 1, 1), (None, 9, 1))
    ]
    assert entries == ["a", "b", "e", "d", "e"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", ""])
def test_every_size_has_complete_launch_parameters(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_architecture", lambda device: architecture)
    launch.tuned.cache_clear()
    for rows, outputs, size in product((1, 65, 1 << 20), (1, 4096, 1 << 20), (1, 2, 4)):
        entries = launch.tuned("linear", None, rows=rows, outputs=outputs, bytes=size)
        assert {"tile", "warps", "stages"} <= entries.keys() and entries.get("bytes", 4) >= size
    for row_bytes, group in ((32, 1), (256, 4), (4096, 64)):
        entries = launch.tuned("attention", None, row_bytes=row_bytes, group=group).keys()
        assert {"decode_stages", "prefill_stages", "programs"} <= entries
    launch.tuned.cache_clear()


@pytest.mark.parametrize(("shared", "tile"), [(99 << 10, 32), (163 << 10, 64), (1 << 30, 64)])
def test_tiles_follow_the_shared_memory(shared: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 256 and latent attention do not fit into 99 KiB (RTX 3090, 4090, 5090) with 64 rows."""
    monkeypatch.setattr(launch, "shared_memory", lambda device: shared)
    launch.tuned.cache_clear()
    assert launch.tuned("latent", None)["tile"] == tile
    assert launch.tuned("attention", None, row_bytes=512, group=2).get("tile", 64) == tile
    assert "tile" not in launch.tuned("attention", None, row_bytes=256, group=4)
    launch.tuned.cache_clear()


def test_programmatic_dependent_launch_is_used_only_where_the_table_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.launched(None) == launch.EXACT  # in the interpreter, and on any card until one has shown that it pays
    monkeypatch.setattr(launch, "is_dependent", lambda device: device == 1)
    assert launch.launched(1) == launch.EXACT | {"launch_pdl": True} and launch.launched(0) == launch.EXACT


def test_a_captured_step_keeps_the_tables_that_the_cache_drops() -> None:
    device = torch.device("cpu")
    with launch.kept_tables() as tables:
        table = launch.addresses((16, 32), device)
        assert launch.addresses((16, 32), device) is table
    assert len(tables) == 2 and all(one is table for one in tables)
    launch._table_of.cache_clear()
    assert launch.addresses((16, 32), device) is not table, "a table that is not kept would be freed"
    assert len(tables) == 2, "what is launched afterwards is not collected"


def test_threads_have_counters_of_their_own() -> None:
    """Engines may be threads of one process, whose kernels run side by side."""
    device = torch.device("cpu")
    counters = launch.counters(device)
    of_thread: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: of_thread.append(launch.counters(device)))
    thread.start()
    thread.join()
    assert launch.counters(device) is counters and of_thread[0] is not counters
