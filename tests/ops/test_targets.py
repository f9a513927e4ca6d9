"""The Triton kernels compiled for GPUs with no GPU: that they fit, and for sm_90 (H100, H200) registers, spills, the
matrix unit, and the order in which products add up, as `compile_kernels` reports them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from tokserve.gpu.compile.targets import TARGETS  # noqa: E402
from tokserve.gpu.kernels import dense  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a GPU shows it"),
    pytest.mark.timeout(1600),  # the compiler takes minutes, on a busy machine many
]

EVERY_SIZE = ["1", "64", "128", "256", "300"]  # rows for which the table has something for this card


@pytest.fixture(
    scope="module", params=[["1", "300"], pytest.param(EVERY_SIZE, marks=pytest.mark.slow)], ids=["ends", "whole-table"]
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of compile_kernels.py on every variant of a kernel, for sm_90."""
    report = compile_for("sm_90", request.param, tmp_path_factory.mktemp("triton"))
    assert not report["failed"]
    kernels: dict[str, Any] = report["kernels"]
    return kernels


def compile_for(target: str, rows: list[str], cache: Path) -> dict[str, Any]:
    """The report of compile_kernels.py."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    program = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(program), target, *rows],
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout[done.stdout.rindex('{\n "kernels"') :])  # Triton prints errors
    return report


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "sm_90"])
def test_every_kernel_fits(target: str, tmp_path: Path) -> None:
    """A100, RTX 3090, RTX 4090 and L4, B200, RTX 5090: kernels compile, and their shared memory is there."""
    report = compile_for(target, ["1", "300"], tmp_path)
    assert not report["failed"]
    assert len(report["kernels"]) > 120
    most = TARGETS[target].shared_memory
    large = {name: one["shared"] for name, one in report["kernels"].items() if one["shared"] > most}
    assert not large
    for kernel in ("linear", "gated_linear", "decode", "prefill", "latent_decode", "latent_prefill"):
        assert variants(report["kernels"], kernel)


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "sm_90"])
def test_candidates_fit(target: str, tmp_path: Path) -> None:
    """What is on trial elsewhere: attention of steps in tiles of 16 rows, gated experts; nothing that needs sm_90."""
    report = compile_for(target, ["candidates"], tmp_path)
    assert not report["failed"]
    assert not variants(report["kernels"], "linear_tma", "gated_tma", "linear_early", "prompt")
    assert len(variants(report["kernels"], "gated_experts")) >= 2
    low = [one for one in variants(report["kernels"], "decode").values() if one["stack"] <= 64 and one["by_warps"]]
    assert len(low) >= 5, variants(report["kernels"], "decode")
    most = TARGETS[target].shared_memory
    large = {name: one["shared"] for name, one in report["kernels"].items() if one["shared"] > most}
    assert not large


@pytest.mark.slow
def test_every_kernel_compiles_for_amd(tmp_path: Path) -> None:
    """MI300X: all but the exchange of ranks, which is written in NVIDIA's instructions, compile and fit."""
    kernels = compile_for("gfx942", ["1", "300"], tmp_path)
    assert not kernels["failed"]
    assert len(kernels["kernels"]) > 170
    for name, figures in kernels["kernels"].items():
        assert figures["shared"] <= 64 << 10, f"{name} does not fit: {figures}"
        assert not figures["atomics"], f"{name} adds in any order"
    products = variants(kernels["kernels"], "linear", "gated_linear", "experts", "wna16", "decode", "latent_decode")
    assert len(products) > 30 and all(figures["by_matrix_unit"] for figures in products.values())


def variants(compiled: dict[str, Any], *names: str) -> dict[str, Any]:
    """The variants of the named kernels, or of all kernels."""
    return {name: report for name, report in compiled.items() if not names or name.partition("#")[0] in names}


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(compiled: dict[str, Any]) -> None:
    for name, figures in compiled.items():
        most = 192 if name.startswith("latent_prefill") else 64  # there, sums wait while those of a split are computed
        assert figures["stack"] <= most, f"{name} spills: {figures}"
        assert figures["shared"] <= 227 << 10, f"{name} does not fit: {figures}"
        counts = name.partition("#")[0] in ("count", "search", "ties", "decode", "linear")  # integers
        assert not figures["atomics"] or counts, f"{name} adds in any order"
    waiting = {name.partition("#")[0] for name, figures in compiled.items() if figures["waits"]}
    assert waiting == {
        "linear",
        "gated_linear",
        "norm",
        "activate",
        "norm_rope_store",
        "float8_rows",
        "int8_rows",
        "work",
        "decode",
        "prefill",
    }
    source = Path(dense.__file__).parent
    on_trial = {"linear_tma", "gated_tma", "add_chains", "prompt", "gated_experts", "linear_early"}
    kernels = {name for file in source.rglob("*.py") for name in re.findall(r"def (\w+)_kernel\(", file.read_text())}
    assert kernels == {name.partition("#")[0] for name in compiled} | on_trial
    for name, figures in variants(
        compiled,
        "linear",
        "gated_linear",
        "linear_heads",
        "latent_rope_store",
        "latent_decode",
        "latent_prefill",
        "decode",
        "prefill",
        "latent_merge",
        "run_splits",
        "run_merge",
        "norm_rope_store",
        "norm",
        "rope",
        "activate",
        "scale",
        "store",
    ).items():
        in_float32 = name.partition("#")[0] in ("decode", "prefill") and not figures["chains"]
        assert not figures["fma"] or in_float32, f"{name} contracts"  # its products add up by fma, in order


@pytest.mark.slow
def test_flags_of_ranks_follow_what_was_written_and_precede_what_is_read(compiled: dict[str, Any]) -> None:
    exchanges = variants(compiled, "exchange")
    assert len(exchanges) == 12
    for name, figures in exchanges.items():
        order = " ".join(figures["flags"])
        written, read = r"(st\.global\.v4 )*", r"( (ld\.global\.cg|st\.global\.v4))*"
        flags = r"bar\.sync (st\.release\.sys )+(ld\.acquire\.sys )+bar\.sync"
        assert re.fullmatch(written + flags + read, order), f"{name}: {order}"


@pytest.mark.slow
def test_tiles_of_any_shape_add_up_in_one_order_on_sm_90(
    compiled: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    products = variants(compiled, "linear", "gated_linear")
    assert len(products) >= (12 if "whole-table" in request.node.name else 6)
    for name, figures in products.items():
        assert figures["chains"] or figures["by_warps"], f"{name} does without a matrix unit"
        for chain in figures["chains"]:
            assert chain["adds"] and chain["ascending"], f"{name}: {chain}"
            if chain["inputs"] == [32] and not chain["fresh"]:
                continue  # of int8: sums of integers
            by_float8 = {"inputs": [32], "length": dense.FLOAT8_STEP // 32, "fresh": True}  # the rest is in float32
            in_place = chain["inputs"] == [16] and not chain["fresh"]
            assert in_place or chain | by_float8 == chain, f"{name}: {chain}"


@pytest.mark.slow
def test_decode_and_prefill_do_the_same_arithmetic_on_sm_90(compiled: dict[str, Any]) -> None:
    kernels = variants(compiled, "decode", "prefill")
    # sinks are in the merge of a decode step and in prefill itself, so prefill has more variants of the same loops
    loops = {
        kernel: {str(figures["loop"]) for figures in variants(compiled, kernel).values()}
        for kernel in ("decode", "prefill", "latent_decode", "latent_prefill")
    }
    assert loops["decode"] == loops["prefill"] and len(loops["decode"]) >= 3
    assert loops["latent_decode"] == loops["latent_prefill"] and len(loops["latent_decode"]) == 1
    assert sum(not figures["chains"] for figures in kernels.values()) == 2  # in float32
    for name, figures in kernels.items():
        if not figures["chains"]:
            continue
        scores, values = figures["chains"]
        assert scores["fresh"] and not values["fresh"], name
        assert all(chain["inputs"] == [16] and chain["adds"] and chain["ascending"] for chain in (scores, values)), name


@pytest.mark.slow
def test_gradients_add_up_in_one_order_on_sm_90(compiled: dict[str, Any]) -> None:
    products = "matrix_product", "expert_products", "expert_weights"
    kernels = variants(compiled, *products, "query_gradients", "key_gradients")
    by_matrix_unit = {name: figures for name, figures in kernels.items() if figures["chains"]}
    assert len(by_matrix_unit) == 4 + 3 + 1 + 3 + 3 and len(kernels) == len(by_matrix_unit) + 6  # in float32
    for name, figures in by_matrix_unit.items():
        assert not figures["fma"], f"{name} contracts"
        for chain in figures["chains"]:
            assert chain["inputs"] == [16] and chain["adds"] and chain["ascending"], f"{name}: {chain}"


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of compile_kernels.py on kernels on trial, for sm_90."""
    report = compile_for("sm_90", ["candidates"], tmp_path_factory.mktemp("triton"))
    assert not report["failed"]
    kernels: dict[str, Any] = report["kernels"]
    return kernels


@pytest.mark.slow
def test_candidates_fit_and_multiply_in_one_order_on_sm_90(candidates: dict[str, Any]) -> None:
    decode = {name: figures for name, figures in variants(candidates, "decode").items() if figures["by_warps"]}
    assert len(decode) == 7
    for name, figures in decode.items():
        assert figures["waits"] and not figures["fma"], f"{name}: {figures}"
        assert figures["stack"] <= 48 and figures["shared"] <= 80_000, f"{name}: {figures}"  # two programs fit
        chains = figures["warp_chains"]  # of keys and of a head's elements: as long as one another, if it has 64
        assert [chain["orders"] for chain in chains] in ([1, 1], [2]), f"{name}: {figures}"
    assert decode["decode"]["stack"] == 0
    assert [chain["length"] for chain in decode["decode"]["warp_chains"]] == [
        64 // 16,
        128 // 16,
    ]  # of keys, and of a head
    products = variants(candidates, "linear_tma", "gated_tma")
    assert len(products) == 6
    plain = {"inputs": [16], "fresh": False, "adds": True, "ascending": True}
    by_float8 = {"inputs": [32], "length": dense.FLOAT8_STEP // 32, "fresh": True, "adds": True, "ascending": True}
    for name, figures in products.items():
        assert figures["warps"] == 12, f"{name} has no warps that fetch: {figures}"
        assert figures["registers"] <= 168 and figures["stack"] == 0 and figures["shared"] <= 227 << 10, f"{name}"
        assert figures["waits"] and not figures["fma"], f"{name}: {figures}"
        assert len(figures["chains"]) == 2 * (1 + name.startswith("gated")), f"{name}: both groups multiply all rows"
        assert all(chain in (chain | plain, by_float8) for chain in figures["chains"]), f"{name}: {figures}"


@pytest.mark.slow
def test_prompts_by_groups_do_the_arithmetic_of_prefill_on_sm_90(candidates: dict[str, Any]) -> None:
    kernels = variants(candidates, "prompt")
    assert len(kernels) == 3
    for name, figures in kernels.items():
        assert figures["warps"] == 12 and figures["registers"] <= 168, f"{name}: {figures}"
        assert figures["stack"] == 0 and figures["shared"] <= 227 << 10 and not figures["fma"], f"{name}: {figures}"
        assert [chain["fresh"] for chain in figures["chains"]] == [False, True] * 2, f"{name}: {figures}"  # both groups
        assert all(chain["inputs"] == [16] and chain["adds"] and chain["ascending"] for chain in figures["chains"]), (
            name
        )
    done = {  # choices between numbers do not count: sums that begin anew are written another way
        kernel: {
            "\n".join(step for step in figures["loop"] if "arith.select" not in step)
            for figures in variants(candidates, kernel).values()
        }
        for kernel in ("prompt", "prefill")
    }
    assert done["prompt"] == done["prefill"] and len(done["prompt"]) == 2  # heads of 64 and of 128


@pytest.mark.slow
def test_gated_experts_add_up_in_the_order_of_others_on_sm_90(candidates: dict[str, Any]) -> None:
    gated, plain = variants(candidates, "gated_experts"), variants(candidates, "experts")
    assert len(gated) == len(plain) == 5  # of one row, and of 512 in bfloat16, int8 and float8, with blocks' scales too
    by_float8 = {"inputs": [32], "length": dense.FLOAT8_STEP // 32, "fresh": True}  # the rest is in float32
    for name, figures in (gated | plain).items():
        assert figures["waits"] and not figures["fma"] and not figures["atomics"], f"{name}: {figures}"
        assert figures["stack"] == 0 and figures["shared"] <= 227 << 10, f"{name}: {figures}"
        assert figures["chains"] or figures["warp_chains"], f"{name}: {figures}"
        assert all(chain["adds"] and chain["ascending"] for chain in figures["chains"]), f"{name}: {figures}"
        assert all(not chain["fresh"] or chain | by_float8 == chain for chain in figures["chains"]), (
            f"{name}: {figures}"
        )
        assert all(chain["orders"] == 1 for chain in figures["warp_chains"]), f"{name}: {figures}"
    for name in ("route", "sort", "tiles", "combine"):
        assert all(figures["waits"] for figures in variants(candidates, name).values()), name


@pytest.mark.slow
def test_early_products_fetch_weights_before_they_wait_on_sm_90(candidates: dict[str, Any]) -> None:
    kernels = variants(candidates, "linear_early")
    assert len(kernels) == 6  # four chains, two, both left to the next kernel, one, and a gate
    assert sum(not figures["atomics"] for figures in kernels.values()) == 4, "the next kernel adds chains"
    for name, figures in kernels.items():
        assert figures["early"] >= 8 and figures["waits"] and not figures["fma"], f"{name}: {figures}"
        assert figures["stack"] == 0 and figures["registers"] <= 64, f"{name}: {figures}"
        assert figures["shared"] <= 113 << 10, f"{name}: two programs do not fit: {figures}"
        assert figures["warp_chains"] == [{"length": 128 // 16, "orders": 1}], f"{name}: {figures}"


@pytest.mark.slow
def test_rows_in_the_form_of_the_next_kernel_fit_on_sm_90(candidates: dict[str, Any]) -> None:
    """Norms and gates that round, norms and rotations that add chains."""
    kernels = variants(candidates, "norm", "activate", "norm_rope_store", "add_chains")
    assert {name.partition("#")[0] for name in kernels} == {"norm", "activate", "norm_rope_store", "add_chains"}
    for name, figures in kernels.items():
        assert figures["waits"] and not figures["fma"] and not figures["atomics"], f"{name}: {figures}"
        assert figures["stack"] == 0 and figures["registers"] <= 128, f"{name}: {figures}"
