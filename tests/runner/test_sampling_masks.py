"""Sampling masks: against float64, in any batch, with and without drafts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.runner.drive import MASKS, Mask, logprobs_of, masks_of
from tests.runner.test_sampler import (
    DISTRIBUTIONS,
    OUTPUT,
    PROMPT,
    STOP,
    VOCAB,
    draw,
    exact,
    make_sampler,
    model_logits,
    rows_of,
    varied,
)
from tokserve.features.masks.columns import mask_rows
from tokserve.ops import sampling
from tokserve.protocol.params import MASK_TOO_LONG, WHOLE_VOCABULARY, SamplingParams
from tokserve.protocol.plan import NewRow, StepResult, decode_hook, encode
from tokserve.runner.device import Host
from tokserve.runner.sampler import SampledTokens, Sampler
from tokserve.runner.tables.slots import Slots


def with_mask(**options: Any) -> SamplingParams:
    return SamplingParams(**options, return_sampling_mask=True)


def drawn_masks(drawn: SampledTokens) -> list[Mask]:
    return masks_of(drawn.columns[MASKS])


def log_mass(logits: torch.Tensor, ids: list[int], temperature: float) -> float:
    """The logarithm of the mass of ids in the model's distribution, in float64."""
    x = logits.double().numpy() / (temperature or 1.0)
    p = np.exp(x - x.max())
    return float(np.log(p[ids].sum() / p.sum()))


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, "greedy"])
def test_a_mask_is_the_support_of_the_draw(name: str) -> None:
    options = DISTRIBUTIONS.get(name, {"temperature": 0.0, "top_k": 3})
    for seed in range(5, 10):
        logits = model_logits(seed=seed)
        drawn = draw(make_sampler([with_mask(**options)])[0], logits.clone(), rows_of([0]))
        ((count, ids, logprob, kept),) = drawn_masks(drawn)
        token = int(drawn.token_ids[0])
        if name == "greedy":
            assert (count, ids, logprob) == (1, [token], 0.0)
        else:
            p = exact(SamplingParams(**options), logits)
            unrestricted = (p > 0).all()
            assert ids == ([] if unrestricted else np.flatnonzero(p).tolist())
            assert count == (WHOLE_VOCABULARY if unrestricted else len(ids)) and (unrestricted or token in ids)
            assert logprob == pytest.approx(np.log(p[token]), abs=1e-5)
        temperature = options.get("temperature", 1.0)
        assert kept == pytest.approx(log_mass(logits[0], ids or list(range(VOCAB)), temperature), abs=2e-6)
        assert kept == 0.0 or count != WHOLE_VOCABULARY


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_processed_and_kept_make_the_logprob_at_the_temperature(temperature: float) -> None:
    modes: Any = ("temperature", "processed")
    params = [with_mask(temperature=temperature, top_k=7, logprobs=0, logprobs_mode=mode) for mode in modes]
    logits = model_logits().repeat(2, 1)
    sampler, slots = make_sampler(params)
    slots.seeds[:] = 8
    drawn = draw(sampler, logits, rows_of([0, 1]))
    (_, ids, logprob, kept), again = drawn_masks(drawn)
    logprobs = logprobs_of(drawn.columns)
    assert again == (len(ids), ids, logprob, kept) and logprobs is not None
    at_temperature, processed = logprobs.token_logprobs.tolist()
    assert logprob + kept == pytest.approx(at_temperature, abs=1e-6)
    if temperature:  # a greedy token is certain, and `processed` is of what the largest was chosen from
        assert logprob == processed
    else:
        assert logprob == 0.0


def test_among_ties_the_lower_ids_are_kept() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4, 9, 20]] = 1.0
    p = np.exp(logits[0].double().numpy())
    for options, ids in (
        ({"top_k": 2}, [3, 4]),
        ({"top_k": 6}, [0, 1, 3, 4, 9, 20]),
        ({"top_p": float(3.5 * p[3] / p.sum())}, [3, 4, 9, 20]),
        ({"top_p": float((4 * p[3] + 1.5) / p.sum())}, [0, 1, 3, 4, 9, 20]),
        ({"min_p": 0.4}, [3, 4, 9, 20]),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.9}, [3, 4]),
    ):
        mask = drawn_masks(draw(make_sampler([with_mask(**options)])[0], logits.clone(), rows_of([0])))[0]
        assert mask[1] == ids, options


def test_more_ids_than_a_mask_may_have() -> None:
    slots = Slots(3, 16, 4)
    sampler = Sampler(slots, VOCAB, "raw", Host(), max_mask=5)
    for slot, top_k in enumerate((5, 6, 0)):
        tokens = np.array(PROMPT + OUTPUT, np.int32)
        params = with_mask(top_k=top_k)
        entering = NewRow(slot, "", tokens, len(PROMPT), params, slot, STOP, columns=(MASKS,))
        slots.assign(entering)
        sampler.assign(entering)
    logits = model_logits(3)
    five, six, unrestricted = drawn_masks(draw(sampler, logits.clone(), rows_of([0, 1, 2])))
    assert five[0] == 5 and len(five[1]) == 5
    assert six[:2] == (MASK_TOO_LONG, [])
    best = logits[1].argsort(descending=True)[:6].tolist()
    assert six[3] == pytest.approx(log_mass(logits[1], best, 1.0), abs=1e-6)
    assert unrestricted[:2] == (WHOLE_VOCABULARY, []) and unrestricted[3] == 0.0
    assert (sampling.WHOLE_VOCABULARY, sampling.MASK_TOO_LONG) == (WHOLE_VOCABULARY, MASK_TOO_LONG)


@pytest.mark.usefixtures("kernels")
def test_a_mask_has_the_same_bits_in_any_batch_and_changes_no_token() -> None:
    requests = varied(60, 1)
    plain = draw(make_sampler(requests)[0], model_logits(60, seed=9), rows_of(range(60)))
    asking = [i % 3 != 1 for i in range(60)]
    changed = [
        with_mask(**{n: getattr(p, n) for n in p.__struct_fields__ if n != "return_sampling_mask"}) if wants else p
        for p, wants in zip(requests, asking, strict=True)
    ]
    sampler, _ = make_sampler(changed)
    logits = model_logits(60, seed=9)
    alone = [draw(sampler, logits[i : i + 1].clone(), rows_of([i])) for i in range(60)]
    assert [MASKS in one.columns for one in alone] == asking
    masks = [drawn_masks(one)[0] if MASKS in one.columns else None for one in alone]
    rng = np.random.default_rng(2)
    for count in (60, 31, 7, 2, 2, 2):
        order = rng.permutation(60)[:count]
        drawn = draw(sampler, logits[torch.from_numpy(order)].clone(), rows_of(order))
        assert drawn.token_ids.tolist() == plain.token_ids[order].tolist()
        if MASKS not in drawn.columns:
            assert not any(asking[i] for i in order)
            continue
        for i, token, mask in zip(order.tolist(), drawn.token_ids.tolist(), drawn_masks(drawn), strict=True):
            assert mask == (masks[i] if asking[i] else (WHOLE_VOCABULARY, [], 0.0, 0.0))
            assert not mask[1] or token in mask[1]


def test_rows_that_are_taken_and_sent() -> None:
    counts, ids = np.array([2, -1, 3, -2], np.int32), np.arange(5, dtype=np.int32)
    rows = mask_rows(counts, ids, *np.arange(8, dtype=np.float32).reshape(2, 4))
    assert masks_of(rows.take(np.array([True, True, False, True]))) == [
        (2, [0, 1], 0, 4),
        (-1, [], 1, 5),
        (-2, [], 3, 7),
    ]
    assert masks_of(rows.take(np.array([False, False, True, False]))) == [(3, [2, 3, 4], 2, 6)]
    none = np.zeros(0, np.int32)
    decode = msgspec.msgpack.Decoder(StepResult, dec_hook=decode_hook).decode
    again = decode(encode(StepResult(0, none, none, np.zeros(0, np.uint8), {MASKS: rows})))
    assert masks_of(again.columns[MASKS]) == masks_of(rows)
