"""A minute of `tests.chaos.scene`; ten by hand: `python -m tests.chaos.scene --seconds 600`."""

import pytest

from tests.chaos.scene import play, thirds

GROWTH = 48 << 20  # bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_chaos() -> None:
    scene = play(60.0, seed=1)
    assert {"stop", "length", "engine_restarting", "abort", "left", "bad body"} <= set(scene.ends), scene.ends
    assert scene.kills and scene.stops
    (rss, _), (later_rss, _) = thirds(scene)
    assert later_rss - rss < GROWTH
