"""Whether candidates have the bits of what they replace, on the device that serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokserve import ops
from tokserve.gpu import candidates

logger = logging.getLogger(__name__)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers, by the size of what they stand for


def without_unequal(check: Callable[[], list[str]], errors: tuple[type[Exception], ...] = ()) -> list[str]:
    """What `check` returns, with the candidates in use if all results of its ops then have the bits that they have
    without; else, or if it raises one of `errors` with them, this process uses no candidates from here on."""
    names = candidates.in_use()
    if not names:
        return check()
    try:
        failures, results = recorded(check)
    except errors as error:
        use_none(error)
        return check()
    candidates.use(())
    expected_failures, expected = recorded(check)
    differing = sorted({name for name, sums in results.items() if not _are_equal(sums, expected.get(name, []))})
    if differing or failures or results.keys() != expected.keys():
        what = ", ".join(differing or failures)
        logger.warning("bits differ with the candidates %s (%s): none is used", ", ".join(names), what)
        return expected_failures
    candidates.use(names)
    return failures


def use_none(error: Exception) -> None:
    """Let this process do without candidates, if it has any, after this error, which may be one of theirs."""
    if names := candidates.in_use():
        logger.warning("with the candidates %s: %s: none is used", ", ".join(names), error)
        candidates.use(())


def recorded(check: Callable[[], list[str]]) -> tuple[list[str], dict[str, list[Tensor | None]]]:
    """What `check` returns, and the sums of the bits of all that its ops return, by the op.  None stands for a tensor
    that the next op takes in another form (`gpu/kernels/rows`), as reading it would make it one like others."""
    results: dict[str, list[Tensor | None]] = {}

    def recording(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = op(*arguments)
            if name != "attention_work":
                for one in result if isinstance(result, tuple) else (result,):
                    if isinstance(one, Tensor):
                        results.setdefault(name, []).append(sums_of_bits(one) if type(one) is Tensor else None)
            return result

        return call

    unwrap = ops.wrap(recording)
    try:
        return check(), results
    finally:
        unwrap()


def sums_of_bits(x: Tensor) -> Tensor:
    """Sums of the bits of x, taken as integers, over each row and over each column."""
    bits = x.detach().contiguous().view(BITS[x.element_size()])
    bits = bits.reshape(-1, bits.shape[-1]) if bits.dim() else bits.reshape(1, 1)
    return torch.cat([bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)])


def _are_equal(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return len(some) == len(others) and all(
        one is None or other is None or torch.equal(one, other) for one, other in zip(some, others, strict=True)
    )
