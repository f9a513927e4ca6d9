"""Candidates of prompt tokens: their logprobs are those of the whole vocabulary's row.  Only `==`, but for a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.runner.drive import Driver, Job, Row, make_runner
from tests.runner.test_runner import VOCAB, prompt
from tests.tiny_models import tiny_config
from tokserve.protocol.candidates import NO_CANDIDATE, pack_array
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts
from tokserve.runner.runner import Runner

Loaded = tuple[Runner, DeviceFacts]
IDS, START = prompt(60, 8), 22
COUNT = len(IDS) - 1 - START
MODES: list[dict[str, Any]] = [
    {"prompt_logprobs_mode": "raw"},
    {"prompt_logprobs_mode": "temperature", "temperature": 0.7},
    {"prompt_logprobs_mode": "processed", "temperature": 0.7, "repetition_penalty": 1.5, "bad_token_ids": [3, 4]},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Runners by dtype, each made once."""
    runners: dict[str, Loaded] = {}

    def get(dtype: str) -> Loaded:
        if dtype not in runners:
            runners[dtype] = make_runner(tmp_path_factory.mktemp("model"), tiny_config("qwen3"), dtype=dtype)
        return runners[dtype]

    return get


def scored(loaded: Loaded, chunk: int = 1 << 30, others: int = 0, **params: Any) -> dict[int, Row]:
    """The rows of the prompt's tokens."""
    task = SamplingParams(max_tokens=1, **params).for_engine()
    neighbours = [Job(prompt(33 + i, i), SamplingParams(max_tokens=4, prompt_logprobs=i), i) for i in range(others)]
    return Driver(*loaded, seed=others).run([Job(IDS, task), *neighbours], chunk=chunk)[0].prompt_rows


def sets_of(seed: int, most: int) -> list[list[int]]:
    """A set for each position, of 0 to `most` ids."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(VOCAB)[: rng.integers(0, most + 1)].tolist() for _ in range(COUNT)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES, ids=[mode["prompt_logprobs_mode"] for mode in MODES])
def test_candidates_have_the_logprobs_of_the_whole_row(
    loaded: Callable[[str], Loaded], dtype: str, mode: dict[str, Any]
) -> None:
    full_rows = scored(loaded(dtype), prompt_logprobs=-1, prompt_logprobs_start=START + 1, **mode)
    sets = sets_of(1, 20)
    width = max(map(len, sets))
    result = scored(loaded(dtype), prompt_logprob_token_ids=sets, prompt_logprob_start=START, **mode)
    assert list(result) == list(range(START + 1, len(IDS)))
    for row, (place, (logprob, rank, ids, values)) in zip(sets, result.items(), strict=True):
        full = dict(zip(full_rows[place][2], full_rows[place][3], strict=True))
        empty = width - len(row)
        assert (logprob, rank) == full_rows[place][:2]
        assert ids == row + [NO_CANDIDATE] * (empty + 1)
        assert values[:-1] == [full[token] for token in row] + [-np.inf] * empty
        others = [value for token, value in full.items() if token not in row]
        assert values[-1] == pytest.approx(np.logaddexp.reduce(np.array(others, np.float64)), abs=2e-6)
        assert row or values[-1] == 0.0


def test_chunks_and_neighbours_change_no_bit(loaded: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    params: dict[str, Any] = {"prompt_logprob_token_ids": sets_of(2, 9), "prompt_logprob_start": START}
    expected = scored(loaded("bfloat16"), **params)
    assert [scored(loaded("bfloat16"), chunk, others, **params) for chunk, others in ((16, 0), (5, 4), (1, 7))] == [
        expected
    ] * 3
    monkeypatch.setattr(loaded("bfloat16")[0], "_score_chunk", 16)
    assert scored(loaded("bfloat16"), **params) == expected


def test_packed_sets_and_one_set_for_all_are_the_same(loaded: Callable[[str], Loaded]) -> None:
    row = [7, 300, 0, 7]
    forms: list[Any] = [row, [row] * COUNT, pack_array(np.array(row, np.int32))]
    forms.append(pack_array(np.array([row] * COUNT, np.int32)))
    results = [
        scored(loaded("float32"), prompt_logprob_token_ids=form, prompt_logprob_start=START, temperature=0.0)
        for form in forms
    ]
    assert results.count(results[0]) == 4


def test_nothing_is_left_of_the_whole_vocabulary(loaded: Callable[[str], Loaded]) -> None:
    rows = scored(loaded("float32"), prompt_logprob_token_ids=list(range(VOCAB)))
    assert len(rows) == len(IDS) - 1
    assert all(values[-1] == -np.inf and len(values) == VOCAB + 1 for *_, values in rows.values())
