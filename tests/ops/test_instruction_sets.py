"""Every op with every instruction set that this machine has, against the portable kernels and the references."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.packing import pack_arguments
from tests.ops.samples import samples
from tests.ops.test_cpu import _C, FMA, NAMES, as_it_was, outputs, run  # noqa: F401  # as_it_was: of each test
from tests.tiers import slow_after
from tokserve.ops.registry import OPS

SETS = _C.instruction_sets()


@lru_cache(1)  # the instruction sets of an op follow one another
def expected(name: str, by: Callable[[str, tuple[Any, ...]], list[Tensor]]) -> list[Any]:
    """(dtype, arguments, what `by` makes of them) of the samples of an op."""
    return [(dtype, sample, by(name, sample)) for dtype in OPS[name].tolerance for sample in samples(name, dtype)]


def by_portable(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    _C.select("portable")
    return run(name, arguments)


def by_reference(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    arguments = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
    arguments = pack_arguments(name, "torch", arguments)
    return outputs(OPS[name].reference(*arguments), arguments)


@pytest.mark.some(21)
@pytest.mark.parametrize("isa", [isa for isa in FMA[:-1] if not isa.endswith("_vnni")])
@pytest.mark.parametrize("name", NAMES)
def test_instruction_sets_of_one_arithmetic_have_the_same_bits(name: str, isa: str) -> None:
    """The sets named _vnni differ from those without in linear_int8 only, which has other tests on all sets."""
    for _, arguments, references in expected(name, by_portable):
        _C.select(isa)
        for result, reference in zip(run(name, arguments), references, strict=True):
            assert torch.equal(result.isnan(), reference.isnan())
            assert torch.equal(result.nan_to_num(0), reference.nan_to_num(0))


@pytest.mark.parametrize(  # test_ops.py compares the first set, whose bits those of its arithmetic have
    "isa", slow_after([isa for isa in ("portable", *SETS[1:]) if isa not in FMA[:-1]], 0 if SETS[0] in FMA else 9)
)
@pytest.mark.parametrize("name", NAMES)
def test_each_arithmetic_is_close_to_the_reference(name: str, isa: str) -> None:
    _C.select(isa)
    for dtype, arguments, references in expected(name, by_reference):
        absolute, relative = OPS[name].tolerance[dtype]
        for a, e in zip(run(name, arguments), references, strict=True):
            torch.testing.assert_close(a, e, atol=absolute, rtol=relative, equal_nan=True)
