"""benchmarks/gpu_tune.py: its candidates fit a GPU, and launches use the entries it writes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.ops.test_triton import pytestmark
from tokserve.gpu import candidates
from tokserve.gpu.kernels import launch
from tokserve.ops.registry import OPS

__all__ = ["pytestmark"]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu_tune.py"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program with a simulated GPU and a copy of the table."""
    spec = importlib.util.spec_from_file_location("gpu_tune", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_tune", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(launch, "TABLE", Path(shutil.copy(launch.TABLE, tmp_path)))
    monkeypatch.setattr(launch, "_architecture", lambda device: "sm_90")
    monkeypatch.setattr(launch, "shared_memory", lambda device: 227 << 10)
    monkeypatch.setattr(module, "architecture", lambda: "sm_90")
    launch.table.cache_clear()
    launch.tuned.cache_clear()
    yield module
    launch.table.cache_clear()
    launch.tuned.cache_clear()


def test_candidates_fit_a_card_and_each_size_has_some(program: Any) -> None:
    for rows in program.TILES:
        entries = program.fitting(rows)
        assert 8 <= len(entries) <= 40 and len({json.dumps(entry) for entry in entries}) == len(entries)
        for entry in entries:
            assert 2 * entry["stages"] * entry["step"] * sum(entry["tile"]) <= 227 << 10
            assert entry["tile"][0] * entry["tile"][1] // (32 * entry["warps"]) <= 128  # sums of a thread, in registers


def test_written_entries_are_used_and_float8_keeps_its_entries(program: Any) -> None:
    def entry(stages: int, **bounds: int) -> dict[str, Any]:
        return {"arch": "sm_90", "bytes": 2, **bounds, "tile": [64, 32], "step": 64, "warps": 4, "stages": stages}

    def stages(size: int, rows: int, outputs: int) -> int:
        return int(launch.tuned("linear", 0, rows=rows, outputs=outputs, bytes=size)["stages"])

    before = [stages(size, rows, 4096) for size in (1, 4) for rows in (1, 100, 999)]
    measured = [entry(4), entry(7, rows=16), entry(7, rows=16, outputs=1024), entry(3, rows=16, outputs=512)]
    attention = {"arch": "sm_90", "row_bytes": 256, "group": 4, "decode_stages": 9, "prefill_stages": 2, "programs": 2}
    for _ in range(2):  # written again, it replaces itself
        program.write({"attention": [attention], "linear": program.merged(measured)})
    launch.table.cache_clear()
    launch.tuned.cache_clear()
    assert [stages(2, *sizes) for sizes in ((1, 512), (16, 1024), (16, 9999), (17, 1))] == [3, 7, 7, 4]
    assert before == [stages(size, rows, 4096) for size in (1, 4) for rows in (1, 100, 999)]
    assert [launch.tuned("attention", 0, row_bytes=256, group=group)["decode_stages"] for group in (4, 8)] == [9, 3]
    text = launch.TABLE.read_text()
    assert text.count('"bytes": 2') == 3 and json.loads(text)["about"]


def small_cases(program: Any) -> dict[str, Any]:
    cases = {"sample_few": program.Chat(2, 90), "linear_tma": program.Products(70, 32, 32, 32)}
    cases["prompt_groups"] = program.Prompts(2, 30, 70, 2, 1, 16, 50)
    cases |= dict.fromkeys(("experts_gated", "experts_dependent"), program.Mixture(2, 3, 2, 16, 16))
    cases["chains_next"] = program.FeedForward(2, 16, 1024)
    cases["float8_rows"] = program.FeedForward(2, 16, 16, float8=True)
    cases["float8_tma"] = program.Products(3, 16, 16, 16, float8=True)
    return {name: [cases.get(name, program.Step(2, 70, 2, 1, 16))] for name in candidates.BY_NAME}


def test_every_candidate_has_cases(program: Any) -> None:
    assert program.CASES.keys() == candidates.BY_NAME.keys()


@pytest.mark.parametrize("wrong", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_command_decides_all_candidates(
    program: Any, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A candidate that gains is chosen; one that changes bits, or fails, is not.  The interpreter runs all."""
    monkeypatch.setattr(program, "CASES", small_cases(program))
    monkeypatch.setattr(program, "ROUNDS", 1)
    monkeypatch.setattr(program, "LAYERS", 1)
    monkeypatch.setattr(program, "in_turns", lambda runs: [3e-6, 2e-6])
    monkeypatch.setattr(candidates, "FILE", tmp_path / "candidates.json")
    monkeypatch.setattr(launch, "_architecture", lambda device: "")  # the interpreter's
    launch.tuned.cache_clear()
    linear = OPS["linear"].implementations["triton"].call

    def call(name: str) -> Any:
        if wrong and name == "linear":
            return lambda *arguments: linear(*arguments) + (1 if candidates.is_on("decode_tile") else 0)
        if wrong and name == "paged_attention" and candidates.is_on("decode_early"):
            raise RuntimeError("out of resource")
        return OPS[name].implementations["triton"].call

    monkeypatch.setattr(program, "call", call)
    out = tmp_path / "out.json"
    program.main(["--candidates", "--out", str(out), "--seconds", "60"])
    expected = [name for name in candidates.BY_NAME if not (wrong and name.startswith("decode"))]
    report = json.loads(out.read_text())
    assert report["chosen"] == expected and candidates.stored_for("interpreter") == expected
    printed = capsys.readouterr().out
    for name, row in report["candidates"].items():
        assert f"| {name} |" in printed
        assert row["chosen"] == (name in expected)
    if wrong:
        assert report["candidates"]["decode_tile"]["us"] == {"step of 2 x 70, heads 2/1 of 16": "bits differ"}
        assert "out of resource" in report["candidates"]["decode_early"]["error"]
    assert candidates.in_use() == []
