"""The sampler against plain-Python Philox, brute-force filters and exact probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from tokserve import ops  # noqa: F401  (declares the ops)
from tokserve.ops import registry
from tokserve.ops.registry import OPS
from tokserve.ops.sampling import philox

registry.load_extension("cpu")
Floats = NDArray[np.float64]
DRAWS = 20000
LEAST = 1e-4  # p-value under which a distribution is wrong; the seeds are fixed, so a pass stays a pass


def every(name: str) -> pytest.MarkDecorator:
    """Parametrise `call` over all implementations of the op that run here."""
    names = OPS[name].available("cpu")
    return pytest.mark.parametrize("call", [OPS[name].implementations[one].call for one in names], ids=names)


def random_logits(seed: int, rows: int, width: int, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for turn in range(10):
        if turn:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        one, two = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(two >> 32) ^ c[1] ^ k[0], two % 2**32, (one >> 32) ^ c[3] ^ k[1], one % 2**32]
    return c


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_published_answers(word: int, answer: list[int]) -> None:
    words = torch.tensor([word])
    assert [int(x) for x in philox((words,) * 4, (words, words))] == answer
    assert plain_philox([word] * 4, [word] * 2) == answer


def test_philox_of_mixed_words_gives_the_published_answer() -> None:
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    words = [torch.tensor([word]) for word in pi]
    actual = philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert [int(x) for x in actual] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def gumbel(seed: int, position: int, token: int) -> float:
    key, where = [seed % 2**32, seed % 2**64 >> 32], [position % 2**32, position >> 32]
    bits = plain_philox([token // 4, *where, 0], key)[token % 4]
    uniform = min((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -math.log(-math.log1p(-float(uniform)))


@every("sample")
def test_sample_is_gumbel_max_of_the_documented_counters(call: Any) -> None:
    width, rows = 21, 40
    logits = random_logits(1, rows, width)
    logits[:, 5::6] = -math.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(rows) + torch.arange(rows) % 2 * 2**33
    ids = call(logits, seeds, positions, torch.zeros(rows, dtype=torch.bool))
    assert ids.dtype == torch.int64
    for row in range(rows):
        noise = [gumbel(int(seeds[row]), int(positions[row]), token) for token in range(width)]
        noisy = logits[row].double() + torch.tensor(noise, dtype=torch.float64)
        assert int(ids[row]) == int(noisy.argmax())


@every("sample")
def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(call: Any) -> None:
    for width in (2, 17, 5003):
        logits = torch.zeros(6, width)
        logits[1, width // 2 :] = 1.0
        logits[2, 0] = -math.inf
        logits[3] = -math.inf
        logits[3, width - 1] = -5.0
        logits[4] = random_logits(width, 1, width)[0]
        logits[5, 1] = -0.0
        ids = call(logits, torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64), torch.ones(6).bool())
        assert ids.tolist() == [0, width // 2, 1, width - 1, int(logits[4].max(0).indices), 0]


@every("sample")
def test_greedy_rows_and_drawn_rows_do_not_mix(call: Any) -> None:
    logits, index = random_logits(3, 30, 100), torch.arange(30)
    drawn = call(logits, index, index, torch.zeros(30, dtype=torch.bool))
    mixed = call(logits, index, index, index % 3 == 0)
    assert torch.equal(mixed, torch.where(index % 3 == 0, logits.argmax(-1), drawn))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(call(logits[order], index[order], index[order], order % 3 == 0), mixed[order])


def best_first(logits: Floats) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def softmax(logits: Floats) -> Floats:
    mass = np.exp(logits - logits.max())
    return np.asarray(mass / mass.sum())


def plain_filter(logits: Floats, top_k: int, top_p: float, min_p: float) -> Floats:
    order = best_first(logits)
    if top_k:
        order = order[:top_k]
    kept = np.full_like(logits, -math.inf)
    kept[order] = logits[order]
    if top_p < 1:
        probabilities, mass, count = softmax(kept), 0.0, 0
        while count < len(order) and mass < top_p:
            mass += probabilities[order[count]]
            count += 1
        kept[order[count:]] = -math.inf
    kept[softmax(kept) < min_p * softmax(kept).max()] = -math.inf
    return kept


FILTERS = [(0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1), (9, 0.7, 0.0), (12, 0.9, 0.05)]


@pytest.mark.parametrize("width", [1, 6, 50, 1500])
@every("filter_logits")
def test_filters_keep_what_brute_force_keeps(call: Any, width: int) -> None:
    settings = [*FILTERS, (width, 1.0, 0.0), (width + 5, 0.5, 0.0), (0, 1e-6, 0.0), (0, 0.999, 0.0), (3, 1.0, 1.0)]
    logits = random_logits(width, len(settings), width, 0.5)  # flat: top-p keeps most of 1500
    columns = [torch.tensor(column) for column in zip(*settings, strict=True)]
    result = call(logits, columns[0].int(), columns[1], columns[2])
    for row, setting in enumerate(settings):
        kept = plain_filter(logits[row].double().numpy(), setting[0], *(float(np.float32(x)) for x in setting[1:]))
        assert torch.equal(result[row] > -math.inf, torch.from_numpy(kept) > -math.inf), setting
        assert torch.equal(result[row][result[row] > -math.inf], logits[row][result[row] > -math.inf])


@every("filter_logits")
def test_ties_go_to_the_lower_id_and_exactly_k_stay(call: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 0.0, 1.0]]).repeat(3, 1)
    top_k = torch.tensor([4, 0, 0], dtype=torch.int32)
    mass = torch.softmax(logits[0].double(), -1)
    top_p = torch.tensor([1.0, float(2 * mass[1] + 1.5 * mass[0]), 0.01])
    kept = call(logits, top_k, top_p, torch.zeros(3)) > -math.inf
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[0, 1, 2, 4], [0, 1, 2, 4], [1]]


@every("filter_logits")
def test_filters_leave_what_is_forbidden_already(call: Any) -> None:
    logits = random_logits(5, 4, 40)
    logits[:, ::2] = -math.inf
    top_k, top_p = torch.tensor([3, 30, 0, 0], dtype=torch.int32), torch.tensor([1.0, 0.9, 0.9, 1.0])
    kept = call(logits, top_k, top_p, torch.tensor([0.0, 0.0, 0.0, 0.2])) > -math.inf
    assert not kept[:, ::2].any() and kept.any(-1).all() and int(kept[0].sum()) == 3


@every("filter_logits")
def test_filters_do_not_write_into_their_input(call: Any) -> None:
    logits = random_logits(5, 2, 40)
    before = logits.clone()
    call(logits, torch.tensor([3, 0], dtype=torch.int32), torch.tensor([1.0, 0.5]), torch.tensor([0.5, 0.0]))
    assert torch.equal(logits, before)


PROMPT, OUTPUT = [3, 4, 4, 7], [4, 9, 9, 9, 12]
PENALTIES = [(0.0, 0.0, 1.0), (0.8, 0.0, 1.0), (0.0, 0.4, 1.0), (0.0, 0.0, 1.5), (-0.5, 0.3, 0.7)]


def plain_penalties(logits: Floats, presence: float, frequency: float, repetition: float) -> Floats:
    out = logits.copy()
    for token in {*PROMPT, *OUTPUT}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in OUTPUT:
        out[token] -= frequency
    for token in set(OUTPUT):
        out[token] -= presence
    return out


def penalized(call: Any, logits: Tensor, settings: list[tuple[float, float, float]]) -> Tensor:
    rows = len(settings)
    history = torch.tensor([PROMPT + OUTPUT + [-1] * 3] * rows, dtype=torch.int32)
    prompt_lens = torch.full((rows,), len(PROMPT), dtype=torch.int32)
    lens = torch.full((rows,), len(PROMPT) + len(OUTPUT), dtype=torch.int32)
    columns = [torch.tensor(column) for column in zip(*settings, strict=True)]
    result = call(logits, history, prompt_lens, lens, *columns)
    assert isinstance(result, Tensor)
    return result


@every("penalize")
def test_penalties_are_the_formula(call: Any) -> None:
    logits = random_logits(7, len(PENALTIES), 20)
    before = logits.clone()
    result = penalized(call, logits, PENALTIES)
    for row, setting in enumerate(PENALTIES):
        expected = torch.from_numpy(plain_penalties(before[row].double().numpy(), *setting))
        torch.testing.assert_close(result[row].double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(result[0], before[0]) and torch.equal(logits, before)


@every("penalize")
def test_penalties_keep_forbidden_ids_forbidden(call: Any) -> None:
    logits = torch.zeros(2, 20)
    logits[:, 4] = -math.inf
    result = penalized(call, logits, [(1.0, 1.0, 1.5), (-1.0, -1.0, 0.5)])
    assert (result[:, 4] == -math.inf).all()


@pytest.mark.some(39)
@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("setting", FILTERS, ids=str)
def test_draws_follow_the_exact_probabilities(
    setting: tuple[int, float, float], penalty: tuple[float, float, float], by: str
) -> None:
    """The references end to end, with a bias and a forbidden id: chi-square over the whole vocabulary."""
    raw = random_logits(11, 1, 30, 1.0) / 0.9  # a temperature
    raw[0, 2] += 1.5
    raw[0, 5] = -math.inf
    expected = softmax(plain_filter(plain_penalties(raw[0].double().numpy(), *penalty), *setting))
    logits = penalized(OPS["penalize"].reference, raw, [penalty])
    columns = torch.tensor([setting[0]]).int(), torch.tensor([setting[1]]), torch.tensor([setting[2]])
    logits = OPS["filter_logits"].reference(logits, *columns).expand(DRAWS, -1)
    running, fixed = torch.arange(DRAWS), torch.full((DRAWS,), 12345678901)
    seeds, positions = (running, fixed) if by == "seed" else (fixed, running)
    ids = OPS["sample"].reference(logits, seeds, positions, torch.zeros(DRAWS, dtype=torch.bool))
    check_distribution(ids, expected)


@every("sample")
def test_draws_of_each_implementation_follow_the_exact_probabilities(call: Any) -> None:
    logits = random_logits(13, 1, 40, 1.5)
    index = torch.arange(DRAWS)
    ids = call(logits.repeat(DRAWS, 1), index * 3 - DRAWS, index // 2, torch.zeros(DRAWS, dtype=torch.bool))
    check_distribution(ids, softmax(logits[0].double().numpy()))


def check_distribution(ids: Tensor, probabilities: Floats) -> None:
    seen = np.bincount(ids.numpy(), minlength=len(probabilities))
    assert not seen[probabilities == 0].any()
    often = probabilities * DRAWS >= 5
    rare = ~often & (probabilities > 0)
    observed, expected = [*seen[often]], [*(probabilities[often] * DRAWS)]
    if rare.any():
        observed.append(seen[rare].sum())
        expected.append(probabilities[rare].sum() * DRAWS)
    if len(observed) > 1:
        assert stats.chisquare(observed, expected, sum_check=False).pvalue > LEAST


def test_adjacent_seeds_and_positions_draw_independently() -> None:
    logits, index = torch.zeros(DRAWS, 8), torch.arange(DRAWS)
    never = torch.zeros(DRAWS, dtype=torch.bool)
    fixed = torch.full((DRAWS,), 7)
    for seeds, positions in ((index, fixed), (fixed, index), (index, index)):
        ids = OPS["sample"].reference(logits, seeds, positions, never)
        pairs = torch.zeros(64).index_add_(0, ids[1:] * 8 + ids[:-1], torch.ones(DRAWS - 1))
        assert stats.chisquare(pairs.numpy()).pvalue > LEAST


@pytest.mark.parametrize("width", [1, 50, 5003, 9000])
@every("logprobs")
def test_logprobs_are_the_log_softmax(call: Any, width: int) -> None:
    logits = random_logits(width, 4, width)
    ids = torch.tensor([0, width - 1, width // 2, width // 3])
    named = torch.tensor([[width - 1, 0]] * 4)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0])
    for heat in (None, temperature):
        divisor = torch.ones(4) if heat is None else torch.tensor([1.0, 0.5, 2.0, 1.0])
        exact = torch.log_softmax(logits.double() / divisor[:, None], -1)
        for k in {0, 1, min(width, 20), width}:
            token, ranks, top_ids, top = call(logits, ids, k, named, heat)
            assert (token.dtype, ranks.dtype, top_ids.dtype, top.dtype) == (
                torch.float32,
                torch.int32,
                torch.int32,
                torch.float32,
            )
            order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
            assert torch.equal(top_ids.long(), torch.cat([order, named], -1))
            torch.testing.assert_close(top.double(), exact.gather(1, top_ids.long()), atol=4e-6, rtol=4e-7)
            torch.testing.assert_close(token.double(), exact.gather(1, ids[:, None])[:, 0], atol=4e-6, rtol=4e-7)
            assert ranks.tolist() == [1 + int((row > row[i]).sum()) for row, i in zip(logits, ids, strict=True)]


@every("logprobs")
def test_logprobs_of_equal_and_forbidden_ids(call: Any) -> None:
    logits = torch.tensor([[-math.inf, 2.0, -0.0, 0.0, 2.0, -math.inf, -3.0]])
    token, ranks, ids, values = call(logits, torch.tensor([3]), 7, None, None)
    assert ids.tolist() == [[1, 4, 2, 3, 6, 0, 5]]
    assert ranks.tolist() == [3]
    assert values[0, 5:].tolist() == [-math.inf] * 2 and torch.equal(values[0, 3], token[0])
    forbidden, last, _, _ = call(logits, torch.tensor([5]), 0, None, None)
    assert forbidden.tolist() == [-math.inf] and last.tolist() == [6]


@every("logprobs")
def test_alternatives_are_in_order_however_near_they_are(call: Any) -> None:
    logits = torch.tensor([[1e-9, 3e-9, -2e-9, 2e-9, -1e-9]])
    _, ranks, ids, _ = call(logits, torch.tensor([0]), 5, None, None)
    assert ids.tolist() == [[1, 3, 0, 4, 2]] and ranks.tolist() == [3]


@every("logprobs")
def test_a_logprob_does_not_depend_on_other_requested_logprobs(call: Any) -> None:
    logits = random_logits(3, 1, 5003)
    ids = torch.tensor([77])
    alone = call(logits, ids, 0, None, None)
    for k, named in ((5, None), (5003, None), (0, torch.tensor([[77, 1]])), (3, torch.tensor([[77]]))):
        token, rank, top_ids, top = call(logits, ids, k, named, None)
        assert torch.equal(token, alone[0]) and torch.equal(rank, alone[1])
        assert torch.equal(top[top_ids == 77], alone[0].expand(int((top_ids == 77).sum())))
    assert torch.equal(call(logits, ids, 0, None, torch.ones(1))[0], alone[0])


@pytest.mark.parametrize("scale", [0.01, 3.0, 3e4, 3e7])
@pytest.mark.parametrize("name", [name for name in OPS["sample_fused"].available("cpu") if name != registry.REFERENCE])
def test_logits_that_a_draw_skips_could_not_have_won(name: str, scale: float) -> None:
    """Flat, usual and steep logits, hot and cold: the ids are those of noise on every logit."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(16, 3001, generator=generator) * scale
    seeds = torch.randint(-(2**62), 2**62, (16,), generator=generator)
    temperature = torch.tensor([0.3, 1.0, 1.7, 0.0]).repeat(4)
    arguments = (logits, seeds, torch.arange(16), torch.zeros(16, dtype=torch.bool), temperature, False, -1)
    drawn = OPS["sample_fused"].implementations[name].call(*arguments)[0]
    assert torch.equal(drawn, OPS["sample_fused"].reference(*arguments)[0])
