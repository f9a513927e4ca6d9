"""Images whose tokens see each other: no step ends in one, whatever the budget, the share and the prefix cache."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import Engine
from tests.engine.solo import engine_request
from tests.engine.test_scheduler import prompt, shapes
from tests.tiers import slow_after
from tokserve.base.errors import StartError
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.request import Request
from tokserve.features.images.vision import encode_image
from tokserve.protocol.images import Grid, ImageFormat
from tokserve.protocol.prompt import Feature

SIX = ImageFormat(  # a patch is a pixel; an image has 6 by 6 of them, and 9 tokens
    3,
    4,
    5,
    size=1,
    temporal=1,
    merge=2,
    channels=1,
    mean=(0.0,),
    std=(1.0,),
    rescale=1.0,
    axes=False,
    side=6,
    bidirectional=True,
)
LENGTH = SIX.step_tokens


def image(start: int, number: int = 0) -> Feature:
    pixels = np.full((36, 1), number, np.uint8)
    return Feature("image", bytes([number]), start, LENGTH, encode_image(pixels, Grid(1, 6, 6)))


def engine_of(**options: Any) -> Engine:
    return Engine(images=SIX, max_num_batched_tokens=options.pop("budget", 17), **options)


def steps(engine: Engine) -> list[list[tuple[str, int, int]]]:
    """The rows of each step, as (request, first position, count)."""
    by_slot: dict[int, str] = {}
    result = []
    for plan, rows in zip(engine.executor.plans, shapes(engine), strict=True):
        by_slot |= {row.slot: row.request_id for row in plan.new}
        slots = plan.slots.tolist()
        result.append([(by_slot[slot], row[0], row[1]) for slot, row in zip(slots, rows, strict=True)])
    return result


def computed(engine: Engine, rid: str) -> list[tuple[int, int]]:
    """(first position, count) of the request's rows."""
    return [(first, count) for rows in steps(engine) for name, first, count in rows if name == rid]


def test_a_chunk_ends_before_an_image_or_after_it() -> None:
    limits = Limits(99, 20, (1,), "raw", {"image": 0}, SIX)
    spec = engine_request("a", prompt(40), features=(image(5), image(20)))
    request = Request(spec, owner=b"A", number=0, received=0.0, limits=limits)
    assert request.joint == ((5, 14), (20, 29))
    cases = {  # (computed, count, most) -> tokens
        (0, 5, 5): 5,
        (0, 4, 4): 4,
        (0, 6, 20): 5,
        (0, 13, 20): 5,
        (0, 14, 20): 14,
        (0, 25, 30): 20,
        (5, 1, 9): 9,
        (5, 1, 8): 0,
        (5, 9, 9): 9,
        (5, 8, 8): 0,
        (8, 2, 6): 6,
        (8, 2, 5): 0,
        (8, 6, 6): 6,
        (14, 7, 7): 6,
        (20, 3, 3): 0,
        (29, 11, 11): 11,
    }
    for (start, count, most), tokens in cases.items():
        assert request.without_cuts(start, count, most) == tokens, (start, count, most)
    plain = Request(spec, owner=b"A", number=0, received=0.0, limits=Limits(99, 20, (1,), "raw", {"image": 0}))
    assert plain.joint == ()


def test_steps_end_at_the_borders_of_images() -> None:
    engine = engine_of()
    engine.add("a", prompt(40), features=(image(5), image(30)), max_tokens=2, ignore_eos=True)
    engine.run()
    assert computed(engine, "a") == [(0, 17), (17, 13), (30, 10), (40, 1)]
    engine.check_complete("a")
    engine.check_empty()


def test_an_image_that_does_not_fit_holds_up_later_prompts() -> None:
    engine = engine_of(max_num_seqs=3, budget=17)
    engine.add("a", prompt(12), max_tokens=9, ignore_eos=True)
    engine.add("b", prompt(30, 3), features=(image(0),), max_tokens=2, ignore_eos=True)
    engine.add("c", prompt(10, 5), max_tokens=2, ignore_eos=True)
    engine.run()
    first = [[name for name, _, _ in rows] for rows in steps(engine)[:2]]
    assert first == [["a"], ["a", "b"]]  # five tokens were left in the first step: neither b's image nor c has them
    assert computed(engine, "b")[0] == (0, 16)
    for rid in "abc":
        engine.check_complete(rid)


def test_a_prefix_that_ends_in_an_image_goes_on_with_the_rest_of_it() -> None:
    engine = engine_of(block_size=4)
    engine.add("a", prompt(20), features=(image(2),), max_tokens=2, ignore_eos=True)
    engine.run()
    engine.add("b", [*prompt(12), 7, 7, 7], features=(image(2),), max_tokens=2, ignore_eos=True)
    engine.add("c", prompt(9), features=(), max_tokens=2, ignore_eos=True)
    engine.add("d", [*prompt(11), 7], features=(image(2),), max_tokens=2, ignore_eos=True)
    engine.run()
    assert computed(engine, "b")[0] == (12, 3)
    assert computed(engine, "d")[0] == (8, 4)  # three tokens of the image, and the one after it
    engine.check_complete("d")


@pytest.mark.parametrize("option", ["max_chunk", "clients"])
def test_an_image_may_exceed_a_share_and_the_longest_chunk(option: str) -> None:
    engine = engine_of(budget=17, **({"max_chunk": 4} if option == "max_chunk" else {}))
    for number, client in enumerate("wxyz"):
        engine.add(
            client,
            prompt(16, number),
            features=(image(3, number),),
            max_tokens=3,
            ignore_eos=True,
            client=client if option == "clients" else "",
        )
    engine.run()
    for rid in "wxyz":
        assert (3, LENGTH) in computed(engine, rid) or (0, 3 + LENGTH) in computed(engine, rid)
        engine.check_complete(rid)
    engine.check_empty()


def test_a_budget_that_cannot_hold_an_image_is_refused_at_start() -> None:
    with pytest.raises(StartError, match="max_num_batched_tokens: 16 is less than 17"):
        engine_of(budget=16)
    engine_of(budget=17)
    engine_of(budget=10, max_num_seqs=1)


@pytest.mark.parametrize("seed", slow_after(range(12), 4))
def test_results_do_not_depend_on_other_requests(seed: int) -> None:
    rng = random.Random(seed)
    engine = engine_of(
        num_blocks=rng.choice([12, 24, 64]),
        depth=rng.choice([1, 2]),
        budget=rng.choice([17, 20, 40]),
        max_chunk=rng.choice([None, 2, 7]),
        max_num_seqs=8,
        context=40,
    )
    added: list[str] = []
    for turn in range(60):
        if rng.random() < 0.5:
            start, number = rng.choice([0, 2, 8]), rng.randrange(2)
            features = [image(start, number)] + ([image(start + LENGTH + 1, 1)] if rng.random() < 0.5 else [])
            length = features[-1].start + LENGTH + rng.choice([0, 0, 3])
            rid = f"r{turn}"
            engine.add(
                rid,
                prompt(length),
                features=tuple(features),
                seed=turn,
                max_tokens=rng.choice([1, 4, 9]),
                ignore_eos=True,
                client=rng.choice(["", "x", "y"]),
                prompt_logprobs=rng.choice([None, None, 0]),
            )
            added.append(rid)
        engine.step()
    engine.run()
    for rid in added:
        engine.check_complete(rid)
    engine.check_empty()
