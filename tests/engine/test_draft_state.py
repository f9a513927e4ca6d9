"""A request's draft state: what it proposes, how it realigns, and what it learns from each token."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from tokserve.features.speculation.draft_budget import StepCosts, choose, guess
from tokserve.features.speculation.draft_state import Corpus, DraftState
from tokserve.features.speculation.token_index import SEPARATOR, TokenIndex

PROMPT = [1, 2, 3]


def corpus(ids: Sequence[int], *, expected: bool = False) -> Corpus:
    return Corpus("prediction" if expected else "history", TokenIndex(array("i", ids)), expected=expected)


def predicted(ids: Sequence[int]) -> tuple[array[int], DraftState]:
    """The tokens of a request with a prediction, to append to, and its state."""
    tokens, text = array("i", PROMPT), corpus(ids, expected=True)
    state = DraftState(tokens, len(PROMPT), [text], (text, 0), trust=16)
    state.advance()
    return tokens, state


def test_a_prediction_is_followed_from_the_first_token_on() -> None:
    tokens, state = predicted(range(20, 40))
    assert state.source == "prediction"
    assert state.drafts(0, 4) == [20, 21, 22, 23] and state.drafts(2, 4) == [22, 23, 24, 25]
    likely = state.probabilities(0, 100)
    assert len(likely) == 8 and sorted(likely, reverse=True) == likely and likely[0] > 0.9, "it may be all wrong"
    assert state.probabilities(2, 3) == likely[2:5]
    tokens.extend(range(20, 30))
    state.advance()
    assert state.drafts(0, 99) == list(range(30, 40)) and state.num_hits == 10
    assert len(state.probabilities(0, 100)) == 10
    assert state.probabilities(0, 3)[2] > likely[2], "it was right ten times"


def test_an_exchanged_token_keeps_the_alignment() -> None:
    tokens, state = predicted(range(20, 40))
    tokens.extend([20, 21, 99])
    state.advance()
    assert state.drafts(0, 2) == [23, 24]
    assert state.probabilities(0, 1)[0] < 0.7


@pytest.mark.parametrize("output", [[20, 21, 98, 99, 22, 23], [20, 21, 26, 27]], ids=["inserted", "left out"])
def test_after_two_matching_tokens_the_prediction_is_resumed(output: list[int]) -> None:
    tokens, state = predicted(range(20, 40))
    for token in output:
        tokens.append(token)
        state.advance()
    assert state.drafts(0, 2) == [output[-1] + 1, output[-1] + 2]


def test_a_wrong_prediction_is_given_up() -> None:
    tokens, state = predicted(range(20, 40))
    for token in range(50, 58):
        tokens.append(token)
        state.advance()
    assert state.source == "" and state.probabilities(0, 9) == [] and state.drafts(0, 9) == []


def test_its_own_tokens_are_repeated() -> None:
    tokens = array("i", [5, 6, 7, 8, 9, 5, 6])
    state = DraftState(tokens, 7, [])
    state.advance()
    assert state.source == "prompt" and state.drafts(0, 3) == [7, 8, 9]
    assert state.drafts(0, 12) == [7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7, 8], "a period goes on"
    assert DraftState(tokens, 7, [], searches=False).drafts(0, 3) == []


def test_a_separator_is_never_a_draft() -> None:
    text = corpus([1, 2, 3, 4, SEPARATOR, 2, 3, SEPARATOR])
    state = DraftState(array("i", [9, 2, 3]), 3, [text])
    state.advance()
    assert SEPARATOR not in state.drafts(0, 9)


def test_random_corpora_propose_ids_of_their_own() -> None:
    rng = random.Random(0)
    for _ in range(300):
        texts = [corpus([rng.randrange(4) for _ in range(rng.randrange(30))], expected=rng.random() < 0.5)]
        tokens = array("i", [rng.randrange(4) for _ in range(rng.randrange(1, 8))])
        start = (texts[0], rng.randrange(4)) if rng.random() < 0.5 else None
        state = DraftState(tokens, len(tokens), texts, start)
        for _ in range(20):
            state.advance()
            skip, limit = rng.randrange(3), rng.randrange(6)
            likely = state.probabilities(skip, limit)
            drafts = state.drafts(skip, len(likely))
            assert len(drafts) <= len(likely) <= limit and all(0 <= draft < 4 for draft in drafts)
            assert all(0 <= p <= 1 for p in likely) and sorted(likely, reverse=True) == likely
            tokens.extend(drafts if rng.random() < 0.5 else [rng.randrange(4)])


# --- how many ---


def test_drafts_are_chosen_by_cost_and_probability() -> None:
    costs = StepCosts()
    assert choose([[0.9] * 15], 1, 1, 99, costs) == [15]
    assert choose([[0.005, 0.005]], 1, 1, 99, costs) == [0]
    assert choose([[0.9] * 15], 1, 1, 4, costs) == [4], "the budget"
    for _ in range(200):
        costs.record(4, 4, 1.0)
        for count in (5, 6, 8, 12, 16, 20):
            costs.record(4, count, 3.0)
    assert choose([[0.5, 0.25]] * 4, 4, 4, 99, costs) == [0] * 4
    assert costs.relative(4, 12) == pytest.approx(3.0, rel=0.2)


def test_drafts_go_where_they_are_likely() -> None:
    likely = [[0.9, 0.8, 0.7], [0.3, 0.05], []]
    counts = choose(likely, 3, 3, 4, StepCosts())
    assert counts[0] == 3 and counts[2] == 0 and sum(counts) <= 4


def test_one_slow_step_is_forgotten() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.record(1, 1, 1.0)
    costs.record(1, 8, 50.0)
    assert costs.relative(1, 8) > 1.2
    for _ in range(500):
        costs.record(1, 1, 1.0)
        costs.record(1, 4, guess(4))
    assert costs.relative(1, 8) == pytest.approx(guess(8), rel=0.05)
