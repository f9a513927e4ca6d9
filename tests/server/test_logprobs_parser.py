"""Logprobs written as objects and read back are the columns they were."""

import numpy as np
import pytest

from tests.server.test_logprobs import columns
from tokserve.client.outputs import Column
from tokserve.protocol.logprobs import Logprobs
from tokserve.server.replies import logprobs
from tokserve.server.replies import logprobs_parser as read


def back(row: Column, token_id: int, top: int, named: tuple[int, ...] = ()) -> tuple[list[int], list[float]]:
    written = {
        "content": [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "rank": entry.rank,
                "top_logprobs": [
                    {"token_id": other.token_id, "logprob": other.logprob, "rank": other.rank}
                    for other in entry.top_logprobs
                ],
            }
            for entry in logprobs.objects(row, [token_id], top).content
        ]
    }
    actual = Logprobs.of(read.parse_output(written, [token_id], top, named, "logprobs"))
    return actual.top_ids[0].tolist(), actual.top_logprobs[0].tolist()


@pytest.mark.parametrize(
    ("token_id", "rank", "ids"),
    [
        (9, 1, [9, 70, 3, 41]),  # logits that differ, all of them less than float32 can tell from nothing
        (3, 3, [9, 70, 3, 41]),
        (3, 2, [9, 3, 41, 70]),  # logits that are equal: ids in order
        (41, 2, [9, 3, 41, 70]),
        (70, 2, [9, 3, 41, 70]),
    ],
)
def test_equally_improbable_alternatives_keep_their_order(token_id: int, rank: int, ids: list[int]) -> None:
    values = [0.0, -np.inf, -np.inf, -np.inf]
    row = columns([values[ids.index(token_id)]], [rank], [ids], [values])
    assert back(row, token_id, 4) == (ids, [0.0, -9999.0, -9999.0, -9999.0])


def test_the_token_itself_may_be_none_of_the_most_probable() -> None:
    row = columns([-7.0], [9], [[5, 6, 7]], [[-1.0, -1.0, -2.0]])
    assert back(row, 4, 3) == ([5, 6, 7], [-1.0, -1.0, -2.0])
    row = columns([-1.0], [1], [[5, 6, 7, 9]], [[-1.0, -1.0, -2.0, -4.0]])
    assert back(row, 6, 3, (9,)) == ([5, 6, 7, 9], [-1.0, -1.0, -2.0, -4.0])
