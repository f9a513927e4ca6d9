"""A few thousand executions of each target; a million by hand: `python -m tests.fuzz.run TARGET`."""

import pytest

from tests.fuzz.run import NAMES, fuzz
from tokserve.base import log


@pytest.mark.some(2)
@pytest.mark.parametrize("name", NAMES)
def test_fuzzed_inputs_raise_only_expected_errors(name: str) -> None:
    fuzz(name, 600)
    assert log.request_id.get() is None  # a request's id stays in the request's context


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_fuzzed_inputs_raise_only_expected_errors(name: str) -> None:
    fuzz(name, 100_000, seed=1)
