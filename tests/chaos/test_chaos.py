"""A minute of `tests.chaos.scene`; ten by hand: `python -m tests.chaos.scene --seconds 600`."""

import pytest

from tests.chaos.scene import play, thirds
from tests.chaos.trouble import MODES

GROWTH = 48 << 20  # bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("api_servers", [1, 2])
def test_a_minute_of_chaos(api_servers: int) -> None:
    scene = play(60.0, 1, api_servers)
    assert {"stop", "length", "engine_restarting", "abort", "left", "bad body"} <= set(scene.ends), scene.ends
    assert all(scene.trouble[what] for what in ("kill", "stop", "hang")), scene.trouble
    assert any(f"pause {mode}: 200" in scene.trouble for mode in MODES), scene.trouble
    (rss, _), (later_rss, _) = thirds(scene)
    assert later_rss - rss < GROWTH
