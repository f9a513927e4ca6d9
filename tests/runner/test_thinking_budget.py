"""The budget of reasoning against a plain reading of the tokens, row by row and position by position."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.runner.test_processors import NEVER, PROMPT, VOCAB, make_pipeline, processed, rows_of
from tokserve.protocol.params import ThinkingMarkers

OPEN, CLOSE = [8], [9]
LONG = ([8, 8], [9, 10, 9, 11])  # markers of several ids, of which one repeats within


def budget(tokens: int, opens: list[int], closes: list[int], inside: bool | None) -> dict[str, Any]:
    markers = ThinkingMarkers(opens=opens, closes=closes, inside=inside)
    return {"thinking_token_budget": tokens, "thinking_markers": markers}


def forced(output: list[int], limit: int, opens: list[int], closes: list[int], inside: bool) -> int | None:
    """The only token that may come next; None: any may.  A plain reading of the output from its start."""
    used, begin, at = 0, 0, 0
    for at in range(1, len(output) + 1):
        used += inside
        if inside and output[max(0, at - len(closes)) : at] == closes and at - len(closes) >= 0:
            used, inside = used - len(closes), False
        elif opens and output[max(0, at - len(opens)) : at] == opens:
            inside, begin = True, at
    if not inside or used < limit:
        return None
    sizes = [size for size in range(len(closes)) if len(output) - size >= begin]
    progress = max(size for size in sizes if output[len(output) - size :] == closes[:size])
    return closes[progress]


@pytest.mark.parametrize("markers", [(OPEN, CLOSE), LONG, ([], CLOSE), ([], LONG[1])], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_random_outputs_as_a_plain_reading_has_them(markers: tuple[list[int], list[int]], inside: bool) -> None:
    chance = random.Random(f"{markers}{inside}")
    opens, closes = markers
    for _ in range(40):
        outputs, limits = [], []
        for _ in range(5):
            output: list[int] = []
            while len(output) < 30:
                output += chance.choice([opens, closes, closes[:2], [chance.randrange(7)], [8], [9], [10]])
            outputs.append(output[:30])
            limits.append(chance.randrange(8))
        options = [budget(limit, opens, closes, inside) for limit in limits]
        pipeline, _ = make_pipeline({}, *options, tokens=[PROMPT, *(PROMPT + output for output in outputs)])
        lengths = [chance.randrange(31) for _ in outputs]
        rows = rows_of([0, 1, 2, 3, 4, 5], [len(PROMPT), *(len(PROMPT) + length for length in lengths)])
        before, after = processed(pipeline, rows)
        for row, (output, length, limit) in enumerate(zip(outputs, lengths, limits, strict=True), 1):
            token = forced(output[:length], limit, opens, closes, inside)
            if token is not None:
                before[row, [other for other in range(VOCAB) if other != token]] = NEVER
        assert torch.equal(after, before)


def test_a_prompt_that_ends_in_a_thought_begins_it() -> None:
    opened, over = [1, 8, 3, 2], [8, 1, 9, 2]
    options = budget(0, OPEN, CLOSE, None)
    pipeline, _ = make_pipeline(options, options, options, tokens=[opened, over, PROMPT])
    before, after = processed(pipeline, rows_of([0, 1, 2], [4, 4, 4]))
    before[0, [token for token in range(VOCAB) if token != 9]] = NEVER
    assert torch.equal(after, before)


def test_without_a_budget_or_markers_nothing_is_forbidden() -> None:
    inside = ThinkingMarkers(opens=OPEN, closes=CLOSE, inside=True)
    pipeline, _ = make_pipeline({"thinking_markers": inside}, {"thinking_token_budget": 0}, {"temperature": 0.5})
    before, after = processed(pipeline, rows_of([0, 1, 2], [4, 4, 4]))
    assert torch.equal(after[:2], before[:2])
