"""Each processor against the plain meaning of its parameter, and that it touches only its own rows."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from tokserve import ops
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.protocol.plan import GrammarBitmask, NewRow
from tokserve.runner.logits import LogitRows
from tokserve.runner.pipeline import Pipeline
from tokserve.runner.processors import is_extreme
from tokserve.runner.tables.slots import Slots

VOCAB, LENGTH = 12, 40
PROMPT = [1, 2, 3, 2]
NEVER = float("-inf")


def make_pipeline(*rows: dict[str, Any], tokens: list[list[int]] | None = None) -> tuple[Pipeline, Slots]:
    """Slot i holds a request with parameters rows[i] whose tokens so far are tokens[i]."""
    slots = Slots(len(rows), LENGTH, 4)
    pipeline = Pipeline(slots, VOCAB)
    for slot, options in enumerate(rows):
        known = np.array(tokens[slot] if tokens else PROMPT, np.int32)
        stop_ids = options.get("stop_ids", ())
        params = SamplingParams(**{name: value for name, value in options.items() if name != "stop_ids"})
        row = NewRow(slot, "", known, len(PROMPT), params, 0, stop_ids)
        slots.assign(row)
        pipeline.assign(row, params)
    return pipeline, slots


def rows_of(slots: list[int], lengths: list[int], prompt: int = len(PROMPT), sampling: bool = True) -> LogitRows:
    count = len(slots)
    return LogitRows(np.array(slots, np.int32), np.array(lengths, np.int64), np.full(count, prompt, np.int64), sampling)


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3


def processed(pipeline: Pipeline, rows: LogitRows) -> tuple[torch.Tensor, torch.Tensor]:
    logits = some_logits(len(rows.slots))
    kept = logits.clone()
    out, _ = pipeline.run(logits, rows)
    assert torch.equal(logits, kept), "the model's logits were written to"
    return kept, out


def test_rows_without_processors_are_not_copied() -> None:
    pipeline, _ = make_pipeline({}, {"temperature": 0.0, "top_k": 3, "top_p": 0.5}, {"min_tokens": 2, "stop_ids": (3,)})
    logits = some_logits(3)
    out, drawable = pipeline.run(logits, rows_of([0, 1, 2], [4, 4, 6]))
    assert out is logits and drawable is None


def test_bias_is_added() -> None:
    pipeline, _ = make_pipeline({"logit_bias": {3: 2.5, 7: -100.0}}, {}, {"logit_bias": {0: 1.0}})
    before, after = processed(pipeline, rows_of([0, 1, 2], [4, 4, 4]))
    before[0, 3] += 2.5
    before[0, 7] += -100.0
    before[2, 0] += 1.0
    assert torch.equal(after, before)


def test_huge_bias_stays_a_number() -> None:
    pipeline, _ = make_pipeline({"logit_bias": {3: 1e300, 4: -1e300}})
    _, after = processed(pipeline, rows_of([0], [4]))
    assert not after.isnan().any() and after[0, 3] == 0.0 and after.argmax() == 3 and after.argmin() == 4


def test_allowed_and_bad_ids() -> None:
    pipeline, _ = make_pipeline(
        {"allowed_token_ids": [2, 5, 9]},
        {"bad_token_ids": [0, 11]},
        {"allowed_token_ids": [2, 5, 9], "bad_token_ids": [5]},
        {"bad_token_sequences": [[4], [1, 2]]},
    )
    before, after = processed(pipeline, rows_of([0, 1, 2, 3], [4] * 4))
    for row, kept in enumerate([{2, 5, 9}, set(range(1, 11)), {2, 9}, set(range(VOCAB)) - {4}]):
        for token in range(VOCAB):
            assert after[row, token] == (before[row, token] if token in kept else NEVER)


def test_ids_that_the_vocabulary_lacks_are_passed_over() -> None:
    pipeline, _ = make_pipeline(
        {"bad_token_ids": [VOCAB], "logit_bias": {VOCAB + 3: 1.0, 1: 1.0}, "bad_token_sequences": [[2, VOCAB]]},
        {"allowed_token_ids": [3, VOCAB], "min_tokens": 1, "stop_ids": (VOCAB, 5)},
    )
    before, after = processed(pipeline, rows_of([0, 1], [4, 4]))
    before[0, 1] += 1.0
    before[1, [i for i in range(VOCAB) if i != 3]] = NEVER
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    "tokens, sequences, forbidden",
    [
        ([1, 2, 3], [[2, 3, 4]], {4}),
        ([1, 2, 3], [[2, 4, 4], [3, 3, 4]], set()),
        ([1, 2, 3], [[3, 5], [2, 3, 6], [1, 2, 3, 7], [9, 1, 2, 3, 8]], {5, 6, 7}),
        ([3], [[3, 5], [0, 3, 6]], {5}),
        (list(range(10)), [[*range(10), 11], [1, *range(10), 2], [9, 9, 1]], {11}),
        ([0, 0, 0], [[0, 0, 0, 0, 1]], set()),
    ],
)
def test_bad_sequences_forbid_the_last_id_after_the_others(
    tokens: list[int], sequences: list[list[int]], forbidden: set[int]
) -> None:
    options = {"bad_token_sequences": sequences}
    pipeline, _ = make_pipeline({}, options, {"bad_token_sequences": [[5] * 20]}, tokens=[tokens, tokens, [5] * 19])
    before, after = processed(pipeline, rows_of([1, 0, 2], [len(tokens), len(tokens), 19]))
    before[0, list(forbidden)] = NEVER
    before[2, 5] = NEVER
    assert torch.equal(after, before)


def test_bad_sequences_see_only_what_came_before() -> None:
    pipeline, _ = make_pipeline({"bad_token_sequences": [[2, 3, 4]]}, tokens=[[1, 2, 3, 0, 2, 3]])
    before, after = processed(pipeline, rows_of([0] * 6, [1, 2, 3, 4, 5, 6]))
    before[[2, 5], 4] = NEVER
    assert torch.equal(after, before)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_no_ngram_is_repeated_as_in_transformers(size: int) -> None:
    chance = np.random.default_rng(size)
    tokens = [chance.integers(0, 3 + VOCAB // 3, length).tolist() for length in (1, 2, 3, 8, 20, 40)]
    pipeline, _ = make_pipeline({}, *({"no_repeat_ngram_size": size} for _ in tokens), tokens=[[1] * 40, *tokens])
    lengths = [len(history) for history in tokens]
    before, after = processed(pipeline, rows_of(range(1, len(tokens) + 1), lengths))
    oracle = NoRepeatNGramLogitsProcessor(size)
    for row, history in enumerate(tokens):
        assert torch.equal(after[row], oracle(torch.tensor([history]), before[row : row + 1].clone())[0])


def test_bad_sequences_take_as_much_memory_as_their_ids() -> None:
    many, long = [[1 + i % 11, i % 5] for i in range(3000)], [3] * 3000
    tracemalloc.start()
    try:
        pipeline, _ = make_pipeline({"bad_token_sequences": many}, {"bad_token_sequences": [*many, long]})
        processed(pipeline, rows_of([0, 1], [4, 4]))
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_min_tokens_forbids_stop_ids_until_there_are_enough() -> None:
    pipeline, _ = make_pipeline({"min_tokens": 3, "stop_ids": (0, 6)}, {"min_tokens": 3}, {"stop_ids": (0, 6)})
    before, after = processed(pipeline, rows_of([0, 0, 0, 0, 1, 2], [4, 5, 6, 7, 4, 4]))
    before[:3, [0, 6]] = NEVER
    assert torch.equal(after, before)
    before, after = processed(pipeline, rows_of([0], [4], sampling=False))
    assert torch.equal(after, before)


def test_penalties_equal_a_computation_in_numpy() -> None:
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    known = [*PROMPT, 5, 2, 5, 5]
    pipeline, _ = make_pipeline(options, {}, options, tokens=[known, known, known])
    before, after = processed(pipeline, rows_of([0, 1, 2], [8, 8, 4]))
    expected = before.clone()
    for row, seen, output in ((0, {1, 2, 3, 5}, {5: 3, 2: 1}), (2, {1, 2, 3}, {})):
        for token in seen:
            value = before[row, token]
            value = value / 1.5 if value > 0 else value * 1.5
            if token in output:
                value = value - output[token] * 0.25 - 0.5
            expected[row, token] = value
    assert torch.allclose(after, expected, rtol=0, atol=1e-6)
    assert torch.equal(after[1], before[1])


def test_penalties_give_the_op_the_history_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def penalize(logits: torch.Tensor, history: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
        seen.append((history.tolist(), *(column.tolist() for column in columns)))
        return logits + 1.0

    monkeypatch.setattr(ops, "penalize", penalize)
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    pipeline, _ = make_pipeline(options, {}, {"presence_penalty": 1.0}, tokens=[[*PROMPT, 5, 6, 7]] * 3)
    before, after = processed(pipeline, rows_of([0, 1, 2], [6, 6, 4]))
    assert seen == [([[*PROMPT, 5, 6], [*PROMPT, 5, 6]], [4, 4], [6, 4], [0.5, 1.0], [0.25, 0.0], [1.5, 1.0])]
    assert torch.equal(after, before + torch.tensor([[1.0], [0.0], [1.0]]))


def test_temperature_divides_only_where_it_is_not_one() -> None:
    pipeline, _ = make_pipeline({"temperature": 0.7}, {}, {"temperature": 0.0}, {"temperature": 2.0})
    before, after = processed(pipeline, rows_of([3, 2, 1, 0], [4] * 4))
    assert torch.equal(after[1:3], before[1:3])
    assert torch.equal(after[0], before[0] / 2.0)
    assert torch.equal(after[3], before[3] / torch.tensor(np.float32(0.7)))


def test_filters_keep_the_most_probable() -> None:
    pipeline, _ = make_pipeline(
        {"top_k": 3}, {"top_k": -1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": VOCAB}, {"top_p": 0.5}
    )
    before, after = processed(pipeline, rows_of([0, 1, 2, 3, 4, 5], [4] * 6))
    assert (after > NEVER).sum(1).tolist()[:5] == [3, VOCAB, 1, 1, VOCAB]
    kept = after > NEVER
    assert torch.equal(after[kept], before[kept])
    for row in (0, 2, 3, 5):
        assert before[row][kept[row]].min() > before[row][~kept[row]].max()
    mass = torch.softmax(before[5].double(), 0)[kept[5]]
    assert mass.sum() >= 0.5 > mass.sum() - mass.min()


def test_order_of_the_list_shows_in_the_result() -> None:
    """Bias before masks before penalties before temperature before top-k."""
    options = {"logit_bias": {7: 50.0, 2: 40.0, 4: 30.0}, "bad_token_ids": [7], "repetition_penalty": 2.0}
    pipeline, _ = make_pipeline({**options, "temperature": 0.5, "top_k": 2})
    before, after = processed(pipeline, rows_of([0], [4]))
    expected = torch.full((VOCAB,), NEVER)
    expected[2] = (before[0, 2] + 40.0) / 2.0 / 0.5
    expected[4] = (before[0, 4] + 30.0) / 0.5
    assert torch.allclose(after[0], expected, rtol=1e-6)


EXTREME: list[dict[str, Any]] = [
    {"repetition_penalty": repetition, "temperature": temperature, **masks, "logit_bias": bias}
    for repetition in (1e-30, 1e-20, 1.0, 1e20, 1e300)
    for temperature in (5e-324, 1e-30, 1e-20, 1.0, 2.0)
    for bias in ({}, {1: 1e38, 5: 1e38}, {token: -1e300 for token in range(VOCAB)}, {2: 1e300, 3: -1e300})
    for masks in ({}, {"allowed_token_ids": [1, 2, 3], "frequency_penalty": 2.0, "top_p": 0.9})
]


def test_no_parameters_leave_nothing_to_draw() -> None:
    """What is possible at the largest numbers is drawn, what is forbidden is not, and the best stays the best."""
    pipeline, _ = make_pipeline(*EXTREME, {}, {"temperature": 0.5})
    count = len(EXTREME)
    before = some_logits(count + 2)
    after, drawable = pipeline.run(before, rows_of(list(range(count + 2)), [4] * (count + 2)))
    assert drawable is None or drawable.all()
    assert not after.isnan().any() and after.amax(1).isfinite().all()
    for row, options in enumerate(EXTREME):
        if "allowed_token_ids" in options:
            assert set((after[row] > NEVER).nonzero()[:, 0].tolist()) <= {1, 2, 3}
    assert torch.equal(after[count], before[count]) and torch.equal(after[count + 1], before[count + 1] / 0.5)


@pytest.mark.parametrize(
    ("edge", "beyond"),
    [
        ({"logit_bias": {1: 256.0, 2: -256.0}}, {"logit_bias": {1: 0.0, 2: -257.0}}),
        ({"repetition_penalty": 16.0}, {"repetition_penalty": 16.1}),
        ({"repetition_penalty": 1 / 16}, {"repetition_penalty": 0.06}),
        ({"temperature": 2.0**-7}, {"temperature": 0.0078}),
        ({"temperature": 0.0}, {"temperature": 1e-9}),
    ],
)
def test_which_parameters_make_a_row_extreme(edge: dict[str, Any], beyond: dict[str, Any]) -> None:
    assert not is_extreme(SamplingParams(**edge)) and is_extreme(SamplingParams(**beyond))


def test_extreme_rows_are_the_same_bits_alone() -> None:
    pipeline, _ = make_pipeline(*EXTREME, {})
    logits = some_logits(len(EXTREME) + 1)
    together = pipeline.run(logits, rows_of(list(range(len(EXTREME) + 1)), [4] * (len(EXTREME) + 1)))[0].clone()
    for row in range(0, len(EXTREME), 7):
        assert torch.equal(pipeline.run(logits[row : row + 1], rows_of([row], [4]))[0][0], together[row])


def test_the_coldest_temperature_keeps_ties_and_nothing_else() -> None:
    pipeline, _ = make_pipeline({"temperature": 1e-40}, {"temperature": 5e-324, "logit_bias": {3: 1e38, 8: 1e38}})
    logits = some_logits(2)
    logits[0, [4, 9]] = 50.0
    after = pipeline.run(logits, rows_of([0, 1], [4, 4]))[0]
    assert torch.softmax(after, 1).gt(0).nonzero().tolist() == [[0, 4], [0, 9], [1, 3], [1, 8]]


def test_a_row_with_nothing_left_is_reported() -> None:
    pipeline, _ = make_pipeline({"allowed_token_ids": [3], "bad_token_ids": [3]}, {"bad_token_ids": [3]}, {})
    _, drawable = pipeline.run(some_logits(3), rows_of([1, 0, 2], [4] * 3))
    assert drawable is not None and drawable.tolist() == [True, False, True]


def test_a_slot_keeps_no_parameters_of_its_last_request() -> None:
    everything: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 9,
        "stop_ids": (1,),
        "logit_bias": {1: 1.0},
        "allowed_token_ids": [1, 2, 3],
        "bad_token_ids": [2],
        "bad_token_sequences": [[2, 1]],
    }
    pipeline, slots = make_pipeline(everything)
    row = NewRow(0, "", np.array(PROMPT, np.int32), 4, SamplingParams(), 0, ())
    slots.assign(row)
    pipeline.assign(row, SamplingParams())
    logits = some_logits(1)
    assert pipeline.run(logits, rows_of([0], [4]))[0] is logits


def grammar_step(masks: dict[int, set[int]]) -> GrammarBitmask:
    words = [[sum(1 << token for token in allowed)] for allowed in masks.values()]
    return GrammarBitmask(np.array(list(masks), np.int32), np.array(words, np.uint32), np.zeros(0, np.int32))


def test_a_grammar_forbids_all_but_what_the_step_allows() -> None:
    body = {"structured_outputs": StructuredOutputs(regex="x")}
    pipeline, _ = make_pipeline(body, {}, body)
    pipeline.set_bitmask(grammar_step({2: {0, 11}, 0: {3}}))
    kept, out = processed(pipeline, rows_of([0, 1, 2], [4, 4, 4]))
    for row, allowed in enumerate([{3}, set(range(VOCAB)), {0, 11}]):
        for token in range(VOCAB):
            assert out[row, token] == (kept[row, token] if token in allowed else NEVER)


def test_a_grammar_and_min_tokens_may_leave_nothing() -> None:
    pipeline, _ = make_pipeline(
        {"structured_outputs": StructuredOutputs(regex="x"), "min_tokens": 9, "stop_ids": (3,)}, {}
    )
    pipeline.set_bitmask(grammar_step({0: {3}}))
    _, drawable = pipeline.run(some_logits(2), rows_of([0, 1], [4, 4]))
    assert drawable is not None and drawable.tolist() == [False, True]


def test_positions_of_a_row_have_masks_of_their_own() -> None:
    params = {"structured_outputs": StructuredOutputs(regex="x")}
    pipeline, _ = make_pipeline(params, params)
    bits = np.array([[1 << 3], [1 << 5], [1 << 7]], np.uint32)
    pipeline.set_bitmask(GrammarBitmask(np.array([1, 0, 1], np.int32), bits, np.zeros(0, np.int32)))
    _, out = processed(pipeline, rows_of([0, 1, 1], [4, 4, 5]))
    assert [(row > NEVER).nonzero()[:, 0].tolist() for row in out] == [[5], [3], [7]]


def test_a_grammar_without_a_mask_is_an_error() -> None:
    pipeline, _ = make_pipeline({"structured_outputs": StructuredOutputs(regex="x")})
    with pytest.raises(ValueError, match="no mask"):
        pipeline.run(some_logits(1), rows_of([0], [4]))
    pipeline.set_bitmask(grammar_step({0: {3}}))
    with pytest.raises(ValueError, match="fewer masks than logits"):
        pipeline.run(some_logits(2), rows_of([0, 0], [4, 5]))


def test_a_grammar_is_not_about_prompt_tokens() -> None:
    pipeline, _ = make_pipeline({"structured_outputs": StructuredOutputs(regex="x")})
    logits = some_logits(1)
    assert pipeline.run(logits, rows_of([0], [2], prompt=2, sampling=False))[0] is logits
