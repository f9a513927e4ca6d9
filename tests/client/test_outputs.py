"""Merging deltas gives what an unstreamed request returns; what waits for a consumer, and how it is told."""

from __future__ import annotations

import pytest

from tests.client.fake_engine import logprobs_for, stop
from tokserve.client.outputs import Choice, ChoiceOutput, Delivery, join_logprobs, merge
from tokserve.errors import EngineDead
from tokserve.messages import Extra, Finish


def test_merge() -> None:
    end = {"finish_reason": "stop", "stop_reason": 5, "stop_detail": "stop_token", "times": (1.0, 2.0, 3.0)}
    deltas = [
        ChoiceOutput(1, [7], "x", logprobs_for([7]), prompt_logprobs=logprobs_for([1, 2]), cached_tokens=4),
        ChoiceOutput(0, [1, 2], "ab", logprobs_for([1, 2])),
        ChoiceOutput(0, [], "", weight_versions=[("v", 0, 2)], **end),  # type: ignore[arg-type]
        ChoiceOutput(1, [8], "y", logprobs_for([8]), finish_reason="length"),
    ]
    first, second = merge(deltas)
    assert first == ChoiceOutput(0, [1, 2], "ab", logprobs_for([1, 2]), weight_versions=[("v", 0, 2)], **end)  # type: ignore[arg-type]
    assert (second.index, second.token_ids, second.text, second.finish_reason) == (1, [7, 8], "xy", "length")
    assert second.logprobs == logprobs_for([7, 8]) and second.prompt_logprobs == logprobs_for([1, 2])
    assert second.cached_tokens == 4
    assert merge([]) == []


def test_join_logprobs() -> None:
    assert join_logprobs([]) is None
    parts = [logprobs_for([i], 3) for i in range(4)]
    assert join_logprobs(parts) == logprobs_for(range(4), 3)


# between the engine and the consumer


def delivered(n: int = 1, hold: bool = False) -> tuple[Delivery, list[Choice]]:
    choices = [Choice(index, f"r#{index}", hold) for index in range(n)]
    return Delivery("r", choices), choices


def bring(choice: Choice, ids: list[int], finish: Finish | None = None) -> bool:
    """As the client does with a row of a step; True: the consumer is due to be told."""
    choice.accept(ids, None, Extra(0, finish) if finish else None)
    return choice.delivery.offer(choice)


def test_a_delivery_tells_once_and_merges_until_it_is_taken() -> None:
    delivery, [choice] = delivered()
    assert next(delivery.take(), None) is None and not delivery.ended
    assert bring(choice, [1])
    assert not bring(choice, [2]) and not bring(choice, [3], stop())
    assert not delivery.ended
    delta = next(delivery.take(), None)
    assert delta is not None and (delta.token_ids, delta.finish_reason) == ([1, 2, 3], "length")
    assert next(delivery.take(), None) is None and delivery.ended


def test_choices_are_taken_in_the_order_in_which_they_had_something() -> None:
    delivery, (first, second) = delivered(2)
    assert bring(second, [5]) and bring(first, [6]) and not bring(second, [7])
    taken = list(delivery.take())
    assert [(delta.index, delta.token_ids) for delta in taken] == [(1, [5, 7]), (0, [6])]
    assert bring(first, [], stop()) and next(delivery.take(), None) and not delivery.ended
    assert bring(second, [], stop()) and next(delivery.take(), None) and delivery.ended


def test_a_held_choice_has_nothing_to_take_before_its_end() -> None:
    delivery, [choice] = delivered(hold=True)
    assert not bring(choice, [1]) and next(delivery.take(), None) is None
    assert bring(choice, [2], stop())
    delta = next(delivery.take(), None)
    assert delta is not None and delta.token_ids == [1, 2]


def test_the_listener_is_told_of_the_end_too_and_there_is_one() -> None:
    delivery, [choice] = delivered()
    told: list[str] = []
    delivery.tell()
    delivery.listen(lambda: told.append("news"))
    with pytest.raises(RuntimeError, match="one consumer"):
        delivery.listen(lambda: None)
    bring(choice, [1])
    delivery.fail(EngineDead("gone"))
    assert told == ["news"]
    assert next(delivery.take(), None) is not None, "what came before the end is not lost"
    with pytest.raises(EngineDead):
        next(delivery.take(), None)
    delivery.listen(None)
    delivery.tell()
    assert told == ["news"]


def test_choices_that_share_the_prompts_scores_wait_for_them() -> None:
    scores = logprobs_for([1, 2], 3)
    choices = [Choice(index, f"r#{index}", awaits_scores=index > 0) for index in range(3)]
    delivery = Delivery("r", choices)
    assert not bring(choices[1], [5]) and not bring(choices[2], [6], stop()), "nothing is handed out yet"
    choices[0].accept([7], None, Extra(0, None, scores))
    assert delivery.offer(choices[0])
    taken = {delta.index: delta for delta in delivery.take()}
    assert {index: delta.token_ids for index, delta in taken.items()} == {0: [7], 1: [5], 2: [6]}
    assert all(delta.prompt_logprobs == scores for delta in taken.values())
    assert bring(choices[1], [8]) and next(delivery.take()).prompt_logprobs is None, "they come once"
    bring(choices[0], [], stop()), bring(choices[1], [], stop())
    assert len(list(delivery.take())) == 2 and delivery.ended


def test_a_first_choice_that_ends_without_scores_holds_up_no_other() -> None:
    choices = [Choice(index, f"r#{index}", awaits_scores=index > 0) for index in range(2)]
    delivery = Delivery("r", choices)
    assert not bring(choices[1], [5])
    assert bring(choices[0], [], stop())
    assert {delta.index for delta in delivery.take()} == {0, 1}
