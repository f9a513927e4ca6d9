"""What the recipes' READMEs tell to install, beside the environments in which `make test-trainers` runs them."""

from __future__ import annotations

import pytest
from packaging.utils import canonicalize_name

from tests.trainers.run import EXAMPLES, HERE, INSTALLED_AS_TOLD, RECIPES, install_line, pins, rerun_difference


@pytest.mark.parametrize("name", INSTALLED_AS_TOLD)
def test_the_readmes_install_line_is_what_the_recipe_runs_with(name: str) -> None:
    """`run.py` also compares what these need in turn with all that is pinned (rl-faults F10)."""
    recipe = RECIPES[name]
    pinned = pins(HERE / f"{recipe.environment}.txt")
    listed = {canonicalize_name(r.name): r for r in install_line(EXAMPLES / recipe.folder / "README.md")}
    assert "tokserve-client" in listed
    for distribution, requirement in listed.items():
        if distribution != "tokserve-client":  # this tree's
            assert requirement.specifier.contains(pinned[distribution]), requirement
    if recipe.environment == "trl":
        assert "requests" in listed, "TRL's client of a server imports it, and TRL declares it in an extra"


def test_a_rerun_may_differ_in_its_seconds_alone() -> None:
    steps = [{"step": step, "reward": 0.5, "mismatch": 0.0, "seconds": 1.0} for step in range(1, 6)]
    assert rerun_difference([*steps, steps[0]], [step | {"seconds": 2.0} for step in steps]) == []
    assert "step 3" in rerun_difference(steps, [*steps[:2], steps[2] | {"reward": 0.5000001}, *steps[3:]])[0]
    assert rerun_difference(steps, steps[:2]) != []
