"""Seeds of a trainer's rollouts (rl-faults F6, newcomer-3 D7)."""

from __future__ import annotations

import importlib

import pytest

from tests.rl.distribution import rl

StepSeeds = importlib.import_module(f"{rl.__name__}.step_seeds").StepSeeds


def test_no_two_calls_have_a_seed_in_common() -> None:
    seeds = StepSeeds()
    drawn = [
        seed
        for step in range(3)
        for training in (True, False)
        for _ in range(4)
        for seed in seeds.draw(16, run_seed=1, step=step, training=training)
    ]
    drawn += StepSeeds().draw(16, run_seed=2, step=0) + StepSeeds().draw(16, run_seed=1, step=0, process=1)
    assert len(drawn) == len({*drawn}) == 3 * 2 * 4 * 16 + 32
    assert all(type(seed) is int and 0 <= seed < 1 << 62 for seed in drawn)


@pytest.mark.parametrize("run_seed", [0, -1, 1 << 63])
def test_the_next_run_has_the_same_seeds(run_seed: int) -> None:
    first, second = StepSeeds(), StepSeeds()
    for step in (0, 0, 1, 4):
        assert first.draw(3, run_seed=run_seed, step=step) == second.draw(3, run_seed=run_seed, step=step)


def test_a_run_that_is_resumed_goes_on_with_the_seeds_it_would_have_had() -> None:
    complete, resumed = StepSeeds(), StepSeeds()
    for step in range(3):
        for _ in range(2):
            complete.draw(4, run_seed=1, step=step)
    complete.draw(4, run_seed=1, step=3, training=False)  # an evaluation after the step, not repeated by the other
    for _ in range(2):
        assert complete.draw(4, run_seed=1, step=3) == resumed.draw(4, run_seed=1, step=3)
