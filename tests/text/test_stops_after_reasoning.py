"""Stop strings count after the reasoning (serving-faults F12), however the tokens arrive."""

from __future__ import annotations

import pytest

from tests.server.byte_tokenizer import TOKENIZER, ids
from tokserve.base.errors import RequestError
from tokserve.protocol.params import SamplingParams
from tokserve.text.detokenizer import Detokenizer

OPENED, ASSUMED = ["<think>", "</think>"], ["", "</think>"]
ROWS = [  # markers, text, stop, what is left, the token that completed the stop
    (OPENED, "<think>\n9.8 or</think>\n\nIt is 9.8.", "9.8", "<think>\n9.8 or</think>\n\nIt is ", True),
    (ASSUMED, "9.8 or</think>It is 9.8.", "9.8", "9.8 or</think>It is ", True),
    (OPENED, "It is 9.8.", "9.8", "It is ", True),
    (OPENED, " \n<thin 9.8", "9.8", " \n<thin ", True),
    (OPENED, "\n\nYes", "\n\n", "", True),
    (OPENED, "<think>9.8", "9.8", "<think>9.8", False),
    (ASSUMED, "9.8 </thin", "9.8", "9.8 </thin", False),
    (OPENED, " <th", "x", " <th", False),
    (ASSUMED, "a</think>b", "k>b", "a</think>b", False),
    (ASSUMED, "a</think>b", "b", "a</think>", True),
    ([], "<think>9.8</think>", "9.8", "<think>", True),
]


@pytest.mark.parametrize(("markers", "text", "stop", "left", "hits"), ROWS)
def test_a_stop_string_counts_after_the_reasoning(
    markers: list[str], text: str, stop: str, left: str, hits: bool
) -> None:
    tokens = ids(text)
    splits = [[tokens], [[token] for token in tokens], *([tokens[:at], tokens[at:]] for at in range(1, len(tokens)))]
    for pieces in splits:
        detokenizer = Detokenizer(TOKENIZER, [stop], stop_after=markers)
        output = "".join(detokenizer.push(piece)[0] for piece in pieces) + detokenizer.push([], True)[0]
        assert output == left and (detokenizer.hit is not None) == hits
        if detokenizer.hit is not None:
            assert detokenizer.hit.text == stop
            assert detokenizer.hit.index == len(ids(left + stop)) - 1


def test_the_shape_of_the_parameter() -> None:
    for wrong in (["a"], ["a", ""], ["a", "b", "c"]):
        with pytest.raises(RequestError) as caught:
            SamplingParams(stop_after=wrong).validate()
        assert caught.value.field == "stop_after"
    SamplingParams(stop_after=["", "b"]).validate()
    assert SamplingParams(stop="x", stop_after=["", "b"]).for_engine().stop_after == []
