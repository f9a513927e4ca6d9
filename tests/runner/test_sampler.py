"""The whole sampler: distributions by chi-square, logprobs of every kind, independence of rows, broken rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.runner.drive import logprobs_of, row
from tokserve import ops
from tokserve.protocol.column_table import asked_columns
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.params import LOGPROBS_MODES, SamplingParams
from tokserve.protocol.plan import NO_LEGAL_TOKEN, NOT_FINITE, OK, NewRow
from tokserve.rl import sticky_seeds
from tokserve.runner.device import Host
from tokserve.runner.logits import LogitRows
from tokserve.runner.sampler import SampledTokens, Sampler
from tokserve.runner.tables.slots import SamplingColumns, Slots

VOCAB = 24
PROMPT, OUTPUT = [3, 3, 7, 0], [5, 5, 7, 1]
STOP = (2, 9)
BATCH = 4000


def model_logits(rows: int = 1, seed: int = 5) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def make_sampler(requested: list[SamplingParams], mode: Any = "raw") -> tuple[Sampler, Slots]:
    slots = Slots(len(requested), 16, 4)
    sampler = Sampler(slots, VOCAB, mode, Host())
    for slot, params in enumerate(requested):
        tokens, columns = np.array(PROMPT + OUTPUT, np.int32), tuple(asked_columns(params))
        entering = NewRow(slot, "", tokens, len(PROMPT), params, 1000 + slot, STOP, columns=columns)
        slots.assign(entering)
        sampler.assign(entering)
    return sampler, slots


def rows_of(slots: list[int] | np.ndarray[Any, Any]) -> LogitRows:
    count = len(slots)
    lengths = np.full(count, len(PROMPT + OUTPUT), np.int64)
    return LogitRows(np.asarray(slots, np.int32), lengths, np.full(count, len(PROMPT), np.int64))


def draw(sampler: Sampler, logits: torch.Tensor, rows: LogitRows) -> SampledTokens:
    slots = sampler._slots
    table = (slots.seeds[rows.slots], rows.lengths, slots.greedy[rows.slots], slots.temperature[rows.slots])
    return sampler.sample(logits, rows, SamplingColumns(*map(torch.from_numpy, table))).result()


def exact(params: SamplingParams, logits: torch.Tensor) -> np.ndarray[Any, Any]:
    """The distribution that a token after PROMPT + OUTPUT is to be drawn from, in float64 and by plain loops."""
    x = logits[0].double().numpy().copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    x[params.bad_token_ids] = -np.inf
    history = PROMPT + OUTPUT
    for sequence in params.bad_token_sequences:
        if len(sequence) == 1 or history[-len(sequence) + 1 :] == sequence[:-1]:
            x[sequence[-1]] = -np.inf
    if len(OUTPUT) < params.min_tokens:
        x[list(STOP)] = -np.inf
    for token in range(VOCAB):
        if token in history:
            x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
        times = OUTPUT.count(token)
        x[token] -= times * params.frequency_penalty + (times > 0) * params.presence_penalty
    p = np.exp((x - x.max()) / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    actual: np.ndarray[Any, Any] = p / p.sum()
    return actual


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "hotter": {"temperature": 8.0, "top_k": 12},
    "hottest": {"temperature": 1e300},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "negative_penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {1: 2.0, 4: -3.0, 20: 1.5}},
    "allowed": {"allowed_token_ids": [0, 2, 5, 11, 17]},
    "bad": {"bad_token_ids": [1, 9, 15], "bad_token_sequences": [[7, 1, 6], [1, 8], [0, 1, 10], [12]]},
    "min_tokens": {"min_tokens": 5},
    "min_tokens_reached": {"min_tokens": 4},
    "filters": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    "all": {
        "temperature": 0.9,
        "top_k": 10,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {1: 1.0, 5: 2.0},
        "bad_token_ids": [13],
        "bad_token_sequences": [[1, 4]],
        "min_tokens": 9,
        "allowed_token_ids": list(range(20)),
    },
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    params = SamplingParams(**DISTRIBUTIONS[name])
    logits = model_logits()
    expected = exact(params, logits)
    sampler, slots = make_sampler([params] * BATCH)
    counts = np.zeros(VOCAB)
    for batch in range(5):
        slots.seeds[:] = np.arange(BATCH) * 7919 + batch * 10**9
        drawn = draw(sampler, logits.repeat(BATCH, 1), rows_of(np.arange(BATCH)))
        assert drawn.status is None and not drawn.columns
        counts += np.bincount(drawn.token_ids, minlength=VOCAB)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        assert stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue > 1e-3


@pytest.mark.some(2)
@pytest.mark.parametrize("bias", [1e3, 1e9, 1e30])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_among_huge_logits_follow_the_reported_logprobs(bias: float, temperature: float) -> None:
    params = SamplingParams(
        logit_bias=dict.fromkeys((4, 9, 20), bias), temperature=temperature, logprobs=-1, logprobs_mode="processed"
    )
    logits = model_logits()
    logprobs = logprobs_of(draw(make_sampler([params])[0], logits.clone(), rows_of([0])).columns)
    assert logprobs is not None
    sampler, slots = make_sampler([params] * BATCH)
    slots.seeds[:] = np.arange(BATCH) * 7919
    drawn = draw(sampler, logits.repeat(BATCH, 1), rows_of(np.arange(BATCH)))
    counts = np.bincount(drawn.token_ids, minlength=VOCAB)
    best = logprobs.top_ids[0, :3]
    assert sorted(best) == [4, 9, 20] and counts[best].sum() == BATCH
    expected = np.exp(logprobs.top_logprobs[0, :3].astype(np.float64))
    assert stats.chisquare(counts[best], expected / expected.sum() * BATCH).pvalue > 1e-3


def test_same_seed_draws_independently_at_every_position() -> None:
    sampler, slots = make_sampler([SamplingParams()] * BATCH)
    logits, rows = model_logits(), rows_of(np.arange(BATCH))
    slots.seeds[:] = 77
    rows.lengths = np.arange(1, BATCH + 1, dtype=np.int64)
    ids = draw(sampler, logits.repeat(BATCH, 1), rows).token_ids
    expected = exact(SamplingParams(), logits)
    assert stats.chisquare(np.bincount(ids, minlength=VOCAB), expected * BATCH).pvalue > 1e-3
    pairs = np.histogram2d(ids[::2] % 3, ids[1::2] % 3, bins=(3, 3))[0]
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


def test_a_draw_is_keyed_by_the_seed_and_the_index_of_the_new_token() -> None:
    sampler, _ = make_sampler([SamplingParams()] * 50)
    logits = model_logits().repeat(50, 1)
    ids = draw(sampler, logits, rows_of(np.arange(50))).token_ids
    index = torch.full((50,), len(PROMPT + OUTPUT))
    assert (
        ids.tolist() == ops.sample(logits, torch.arange(1000, 1050), index, torch.zeros(50, dtype=torch.bool)).tolist()
    )


@pytest.mark.parametrize("named", [[], [4, 0]], ids=str)
@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
@pytest.mark.parametrize("name", ["plain", "temperature", "filters", "penalties", "all"])
def test_logprobs_are_those_of_their_kind(name: str, mode: Any, named: list[int]) -> None:
    params = SamplingParams(**DISTRIBUTIONS[name], logprobs=-1, logprobs_mode=mode, logprob_token_ids=named or None)
    logits = model_logits()
    plain = {
        "raw": SamplingParams(),
        "temperature": SamplingParams(temperature=params.temperature),
        "processed": params,
    }
    with np.errstate(divide="ignore"):
        expected = np.log(exact(plain[mode], logits))
    sampler, _ = make_sampler([params])
    drawn = draw(sampler, logits.clone(), rows_of([0]))
    check_logprobs(drawn, expected, named)


def check_logprobs(drawn: SampledTokens, expected: np.ndarray[Any, Any], named: list[int]) -> None:
    logprobs = logprobs_of(drawn.columns)
    assert logprobs is not None
    logprob, rank, ids, values = row(logprobs, 0, VOCAB + len(named))
    token = int(drawn.token_ids[0])
    assert logprob == pytest.approx(expected[token], abs=1e-5)
    assert rank == 1 + (expected > expected[token]).sum()
    assert sorted(ids[:VOCAB]) == list(range(VOCAB)) and ids[VOCAB:] == named
    assert values[: VOCAB - 1] >= values[1:VOCAB] and values[:VOCAB] == sorted(values[:VOCAB], reverse=True)
    for token, value in zip(ids, values, strict=True):
        assert value == pytest.approx(expected[token], abs=1e-5)


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_greedy_takes_the_best_after_penalties_and_counts_as_temperature_one(mode: Any) -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.4, "logit_bias": {6: 3.0}, "top_k": 2}
    params = SamplingParams(temperature=0.0, **options, logprobs=-1, logprobs_mode=mode)
    logits = model_logits()
    chosen = exact(SamplingParams(**options | {"top_k": 0}), logits)
    sampler, _ = make_sampler([params])
    drawn = draw(sampler, logits.clone(), rows_of([0]))
    assert drawn.token_ids.tolist() == [chosen.argmax()]
    expected = chosen if mode == "processed" else exact(SamplingParams(), logits)
    check_logprobs(drawn, np.log(expected), named=[])


def test_the_default_logprobs_mode() -> None:
    logits = model_logits()
    results = []
    for default, mode in (("raw", None), ("temperature", None), ("raw", "temperature"), ("processed", "raw")):
        params = SamplingParams(temperature=0.5, logprobs=1, logprobs_mode=mode)  # type: ignore[arg-type]
        drawn = draw(make_sampler([params], default)[0], logits.clone(), rows_of([0]))
        logprobs = logprobs_of(drawn.columns)
        assert logprobs is not None
        results.append(float(logprobs.token_logprobs[0]))
    assert results[0] == results[3] != results[1] == results[2]


def varied(count: int, seed: int) -> list[SamplingParams]:
    """Requests of all sorts."""
    rng = np.random.default_rng(seed)
    sampler = []
    for i in range(count):
        options: dict[str, Any] = {"temperature": float(rng.choice([0.0, 1.0, 0.7, 1.6]))}
        if rng.random() < 0.4:
            options |= {"top_k": int(rng.integers(0, 30)), "top_p": float(rng.uniform(0.3, 1)), "min_p": 0.01}
        if rng.random() < 0.3:
            options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        if rng.random() < 0.3:
            options |= {"logit_bias": {int(rng.integers(VOCAB)): 2.0}, "bad_token_sequences": [[1, 2], [5], [7, 1, 3]]}
        if rng.random() < 0.3:
            options |= {"allowed_token_ids": rng.integers(0, VOCAB, 9).tolist(), "min_tokens": int(rng.integers(8))}
        if i % 3:
            options |= {"logprobs": int(rng.integers(-1, 4)), "logprobs_mode": str(rng.choice(LOGPROBS_MODES))}
        if i % 4 == 1:
            options |= {"logprob_token_ids": [3, i % VOCAB], "logprobs_mode": "processed"}
        sampler.append(SamplingParams(**options))
    return sampler


def own_row(params: SamplingParams, drawn: SampledTokens, n: int) -> Any:
    width = {None: 0, -1: VOCAB}.get(params.logprobs, params.logprobs) or 0
    width += len(params.logprob_token_ids or [])
    asks = params.logprobs is not None or params.logprob_token_ids
    logprobs = logprobs_of(drawn.columns)
    assert logprobs is not None or not asks
    actual = row(logprobs, n, width) if logprobs is not None and asks else None
    return int(drawn.token_ids[n]), drawn.status is None or drawn.status[n] == OK, actual


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    requested = varied(60, 1)
    sampler, _ = make_sampler(requested)
    logits = model_logits(60, seed=9)
    alone = [own_row(p, draw(sampler, logits[i : i + 1].clone(), rows_of([i])), 0) for i, p in enumerate(requested)]
    rng = np.random.default_rng(2)
    for count in (60, 60, 31, 7, 2, 2, 2):
        order = rng.permutation(60)[:count]
        drawn = draw(sampler, logits[torch.from_numpy(order)].clone(), rows_of(order))
        assert [own_row(requested[i], drawn, n) for n, i in enumerate(order.tolist())] == [
            alone[i] for i in order.tolist()
        ]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 5e-7, 1e-20])
def test_a_cold_row_draws_the_same_among_near_ties_in_any_batch(temperature: float) -> None:
    sampler, slots = make_sampler([SamplingParams(temperature=temperature), SamplingParams(top_k=3, logprobs=2)])
    logits = 9.0 + torch.arange(VOCAB).repeat(2, 1) % 5 * 2.0**-20
    for seed in range(100):
        slots.seeds[0] = seed
        alone = draw(sampler, logits[:1].clone(), rows_of([0])).token_ids[0]
        assert draw(sampler, logits.clone(), rows_of([0, 1])).token_ids[0] == alone


def test_nonfinite_rows_are_flagged_and_change_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, logprobs = ops.sample, ops.logprobs

    def checked(op: Any) -> Any:
        def call(logits: torch.Tensor, *rest: Any) -> Any:
            assert logits.amax(1).isfinite().all(), "an op was given a broken row"
            return op(logits, *rest)

        return call

    monkeypatch.setattr(ops, "sample", checked(sample))
    monkeypatch.setattr(ops, "logprobs", checked(logprobs))
    requested = [*varied(40, 3)[:20], SamplingParams(allowed_token_ids=[2], bad_token_ids=[2], logprobs=2)]
    sampler, _ = make_sampler(requested)
    logits = model_logits(21, seed=4)
    sound = draw(sampler, logits.clone(), rows_of(np.arange(21)))
    assert sound.status is not None and sound.status.tolist() == [OK] * 20 + [NO_LEGAL_TOKEN]
    logits[3] = float("nan")
    logits[8, 5] = float("nan")
    logits[11] = float("-inf")
    logits[15, 2] = float("inf")
    drawn = draw(sampler, logits.clone(), rows_of(np.arange(21)))
    assert drawn.status is not None
    assert np.flatnonzero(drawn.status == NOT_FINITE).tolist() == [3, 8, 11, 15]
    assert np.flatnonzero(drawn.status == NO_LEGAL_TOKEN).tolist() == [20]
    assert ((drawn.token_ids >= 0) & (drawn.token_ids < VOCAB)).all()
    for n in np.flatnonzero(drawn.status == OK).tolist():
        assert own_row(requested[n], drawn, n) == own_row(requested[n], sound, n)


def test_nothing_is_returned_for_rows_that_ask_for_no_logprobs() -> None:
    sampler, _ = make_sampler([SamplingParams(), SamplingParams(temperature=0.0, prompt_logprobs=3)])
    assert draw(sampler, model_logits(2), rows_of([0, 1])).columns == {}
    zero, four = np.zeros(2, np.int32), np.full(2, 4, np.int32)
    assert sampler.scored_spans(np.array([1, 0], np.int32), zero, four) == [(0, 1, 4)]


@pytest.mark.parametrize(
    "start, begin, end, expected",
    [(0, 0, 4, (1, 4)), (0, 0, 2, (1, 3)), (0, 2, 3, (3, 4)), (3, 0, 2, (3, 3)), (3, 0, 4, (3, 4)), (0, 3, 4, (4, 4))],
)
def test_range_of_prompt_tokens_to_score(start: int, begin: int, end: int, expected: tuple[int, int]) -> None:
    sampler, _ = make_sampler([SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start)])
    slot = np.zeros(1, np.int32)
    spans = sampler.scored_spans(slot, np.array([begin], np.int32), np.array([end - begin], np.int32))
    assert spans == ([(0, *expected)] if expected[0] < expected[1] else [])


def test_scoring_where_everything_is_forbidden_is_minus_infinity() -> None:
    params = SamplingParams(
        allowed_token_ids=[2], bad_token_sequences=[[3, 2]], prompt_logprobs=2, logprobs_mode="processed"
    )
    sampler, _ = make_sampler([params])
    actual = Logprobs(sampler.score(model_logits(2), 0, 1))  # after token 3; after tokens 3, 3
    assert actual.token_logprobs.tolist() == [float("-inf")] * 2
    assert not np.isnan(actual.top_logprobs).any()


def test_scoring_ignores_min_tokens() -> None:
    params = SamplingParams(prompt_logprobs=2, logprobs_mode="processed", min_tokens=5, temperature=0.5)
    logits = model_logits(3)
    actual = make_sampler([params])[0].score(logits.clone(), 0, 1)
    expected = make_sampler([SamplingParams(prompt_logprobs=2, logprobs_mode="temperature", temperature=0.5)])[0]
    assert np.array_equal(actual, expected.score(logits.clone(), 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("position", [3, 400])
def test_sticky_seeds_draw_from_the_distribution(position: int) -> None:
    """Over 1e5 prompts, each with the seed that belongs to it; and choices of one prompt are independent."""
    logits = torch.randn(32, generator=torch.Generator().manual_seed(position)) * 2
    expected = torch.softmax(logits.double(), 0).numpy()
    seeds = torch.tensor(sticky_seeds([number, 7, number % 13] for number in range(100_000)))
    rows = logits.expand(len(seeds), -1).contiguous()
    lengths, greedy = torch.full((len(seeds),), position), torch.zeros(len(seeds), dtype=torch.bool)
    first, second = (ops.sample(rows.clone(), seeds + choice, lengths, greedy).numpy() for choice in (0, 1))
    assert stats.chisquare(np.bincount(first, minlength=32), expected * len(seeds)).pvalue > 1e-3
    likely = np.argsort(expected)[-6:]
    pairs = np.array([[((first == a) & (second == b)).sum() for b in likely] for a in likely])
    assert stats.chi2_contingency(pairs).pvalue > 1e-3
