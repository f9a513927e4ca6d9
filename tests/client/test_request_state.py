"""What a request has received until its consumer takes it, and when the consumer is notified."""

from __future__ import annotations

import numpy as np
import pytest

from tests.client.fake_engine import logprobs_for, stop
from tokserve.base.errors import EngineDead
from tokserve.client.request_state import ChoiceState, DeliveryRules, RequestState
from tokserve.protocol.columns import PROMPT_LOGPROBS, Column
from tokserve.protocol.messages import Finish, RareFields
from tokserve.protocol.prompt import TokenPrompt


def make(n: int = 1, stream: bool = True, awaits_scores: bool = False) -> tuple[RequestState, list[ChoiceState]]:
    rules = DeliveryRules(stream)
    choices = [ChoiceState(i, f"r#{i}", rules, awaits_scores=awaits_scores and i > 0) for i in range(n)]
    return RequestState("r", TokenPrompt(b""), 0, choices), choices


def receive(
    choice: ChoiceState, ids: list[int], finish: Finish | None = None, prompt_logprobs: Column | None = None
) -> bool:
    """Accept a row of a step as the client does; return whether the consumer must be notified."""
    values = {} if prompt_logprobs is None else {PROMPT_LOGPROBS: prompt_logprobs}
    choice.accept(ids, {}, RareFields(0, finish, values=values) if finish or prompt_logprobs else None)
    choice.request.num_open -= choice.finished
    return choice.request.enqueue(choice)


def test_a_request_notifies_once_and_merges_until_it_is_taken() -> None:
    request, [choice] = make()
    assert next(request.take(), None) is None and not request.ended
    assert receive(choice, [1])
    assert not receive(choice, [2]) and not receive(choice, [3], stop())
    assert not request.ended
    delta = next(request.take(), None)
    assert delta is not None and (delta.token_ids, delta.finish_reason) == ([1, 2, 3], "length")
    assert next(request.take(), None) is None and request.ended


def test_choices_are_taken_in_the_order_in_which_they_had_something() -> None:
    request, (first, second) = make(2)
    assert receive(second, [5]) and receive(first, [6]) and not receive(second, [7])
    taken = list(request.take())
    assert [(delta.index, delta.token_ids) for delta in taken] == [(1, [5, 7]), (0, [6])]
    assert receive(first, [], stop()) and next(request.take(), None) and not request.ended
    assert receive(second, [], stop()) and next(request.take(), None) and request.ended


def test_a_choice_that_is_not_streamed_has_nothing_to_take_before_its_end() -> None:
    request, [choice] = make(stream=False)
    assert not receive(choice, [1]) and next(request.take(), None) is None
    assert receive(choice, [2], stop())
    delta = next(request.take(), None)
    assert delta is not None and delta.token_ids == [1, 2]


def test_the_one_listener_is_called_at_the_end_too() -> None:
    request, [choice] = make()
    calls: list[str] = []
    request.notify()
    request.listen(lambda: calls.append("news"))
    with pytest.raises(RuntimeError, match="one consumer"):
        request.listen(lambda: None)
    receive(choice, [1])
    request.fail(EngineDead("gone"))
    assert calls == ["news"]
    assert next(request.take(), None) is not None, "what came before the end is not lost"
    with pytest.raises(EngineDead):
        next(request.take(), None)
    request.listen(None)
    request.notify()
    assert calls == ["news"]


def test_choices_that_share_the_prompts_scores_wait_for_them() -> None:
    scores = logprobs_for([1, 2], 3)
    request, choices = make(3, awaits_scores=True)
    assert not receive(choices[1], [5]) and not receive(choices[2], [6], stop()), "nothing is handed out yet"
    assert receive(choices[0], [7], prompt_logprobs=scores)
    taken = {delta.index: delta for delta in request.take()}
    assert {index: delta.token_ids for index, delta in taken.items()} == {0: [7], 1: [5], 2: [6]}
    assert all(delta.prompt_logprobs == scores for delta in taken.values())
    assert receive(choices[1], [8]) and next(request.take()).prompt_logprobs is None, "they come once"
    receive(choices[0], [], stop()), receive(choices[1], [], stop())
    assert len(list(request.take())) == 2 and request.ended


def test_a_first_choice_that_ends_without_scores_holds_up_no_other() -> None:
    request, choices = make(2, awaits_scores=True)
    assert not receive(choices[1], [5])
    assert receive(choices[0], [], stop())
    assert {delta.index for delta in request.take()} == {0, 1}


def test_a_pooled_vector_comes_with_the_end() -> None:
    request, [choice] = make()
    vector = np.arange(4, dtype="<f4").tobytes()
    choice.accept([], {}, RareFields(0, stop("pooled", "stop"), values={"pooled": vector}))
    assert request.enqueue(choice)
    [delta] = request.take()
    assert (delta.values["pooled"], delta.token_ids, delta.finish_reason) == (vector, [], "stop")
