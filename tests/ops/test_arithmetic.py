"""The choice of CPU kernels: by name, by arithmetic, or by measurement and the processor's vendor."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests import needs
from tokserve.base.errors import StartError
from tokserve.ops import arithmetic
from tokserve.ops.arithmetic import CpuKernels, choose_kernels, preferred

SETS = {"amx": "amx", "avx512_bf16": "pairs", "avx512_vnni": "fma", "avx2": "fma", "portable": "fma"}


class Extension(SimpleNamespace):
    """`tokserve._C` as on a machine that runs `sets`, best first."""

    def __init__(self, sets: dict[str, str]) -> None:
        super().__init__(sets=sets, selected=None)

    def instruction_sets(self) -> list[str]:
        return list(self.sets)

    def arithmetic(self, name: str) -> str:
        if name not in self.sets:
            raise ValueError(name)
        return str(self.sets[name])

    def select(self, name: str) -> None:
        self.selected = name


def choose(
    *args: Any, machine: dict[str, str] = SETS, rates: dict[str, float] | None = None, **named: Any
) -> CpuKernels:
    def measure(extension: Any, kernels: Any) -> dict[str, float]:
        assert rates is not None, "nothing was to be measured"
        return {name: rates[name] for name in kernels}

    extension: Any = Extension(machine)
    chosen = choose_kernels(*args, extension=extension, measure=measure, **{"vendor": "", **named})
    assert extension.selected == chosen.name
    return chosen


def test_a_named_arithmetic_gets_the_best_kernels_that_have_it() -> None:
    assert choose("bfloat16", "fma").name == "avx512_vnni"
    assert choose("bfloat16", "pairs") == CpuKernels("avx512_bf16", "pairs", {})
    assert choose("bfloat16", "amx").name == "amx"


def test_named_kernels_imply_their_arithmetic() -> None:
    assert choose("bfloat16", "auto", "avx2") == CpuKernels("avx2", "fma", {})
    assert choose("bfloat16", "pairs", "avx512_bf16").arithmetic == "pairs"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("amx", None), "option cpu_arithmetic: this machine does not run 'amx'; it runs fma"),
        (("auto", "z80"), "option cpu_kernels: this machine does not run 'z80'; it runs avx2, portable"),
        (("pairs", "avx2"), "option cpu_kernels: 'avx2' has the arithmetic 'fma', not 'pairs'"),
    ],
)
def test_what_this_machine_does_not_run_is_refused_by_the_options_name(
    args: tuple[str, str | None], words: str
) -> None:
    with pytest.raises(StartError) as refused:
        choose("bfloat16", *args, machine={"avx2": "fma", "portable": "fma"})
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("vendor", "rates", "fastest"),
    [
        ("GenuineIntel", {"fma": 100.0, "pairs": 87.0}, "fma"),
        ("GenuineIntel", {"fma": 100.0, "pairs": 120.0}, "fma"),  # not decisive: restarts must choose alike
        ("GenuineIntel", {"fma": 100.0, "pairs": 190.0}, "pairs"),
        ("GenuineIntel", {"fma": 100.0, "pairs": 87.0, "amx": 900.0}, "amx"),
        ("GenuineIntel", {"fma": 100.0, "pairs": 87.0, "amx": 20.0}, "fma"),
        ("AuthenticAMD", {"fma": 250.0, "pairs": 470.0}, "pairs"),
        ("AuthenticAMD", {"fma": 250.0, "pairs": 210.0}, "pairs"),
        ("CentaurHauls", {"fma": 100.0, "pairs": 110.0}, "fma"),  # a processor of which nothing is known
        ("CentaurHauls", {"fma": 100.0, "pairs": 210.0}, "pairs"),
    ],
)
def test_auto_takes_what_is_known_to_be_fast_unless_the_measurement_is_decisive(
    vendor: str, rates: dict[str, float], fastest: str
) -> None:
    assert preferred(rates, vendor) == fastest
    machine = {name: kind for name, kind in SETS.items() if kind in rates}
    chosen = choose("bfloat16", machine=machine, rates=rates, vendor=vendor)
    assert (chosen.arithmetic, chosen.rates) == (fastest, rates)
    assert machine[chosen.name] == fastest


def test_nothing_is_measured_where_all_kernels_give_the_same_bits() -> None:
    for dtype in ("float32", "float16"):
        for requested in ("auto", "fma", "pairs"):
            assert choose(dtype, requested, vendor="AuthenticAMD").arithmetic == "fma"
    assert choose("bfloat16", machine={"neon": "fma", "portable": "fma"}) == CpuKernels("neon", "fma", {})


def test_the_log_names_kernels_arithmetic_and_rates() -> None:
    assert str(CpuKernels("avx2", "fma", {})) == "avx2, arithmetic fma"
    chosen = CpuKernels("avx512_bf16", "pairs", {"fma": 251.2, "pairs": 470.0})
    assert str(chosen) == "avx512_bf16, arithmetic pairs (GFLOP/s measured: fma 251, pairs 470)"


@pytest.fixture
def selection() -> Iterator[Any]:
    needs.EXTENSION.or_skip()
    from tokserve.ops.cpu.kernels import _C

    before = _C.instruction_set()
    yield _C
    _C.select(before)


def test_this_machine_is_measured(selection: Any) -> None:
    best = arithmetic.best_kernels(selection)
    assert (list(best)[-1] == "fma" and best["fma"] != "portable") or set(best) == {"fma"}
    rates = arithmetic.measured(selection, best)
    assert rates.keys() == best.keys() and all(rate > 0 for rate in rates.values())
    assert choose_kernels("bfloat16").name in best.values()
