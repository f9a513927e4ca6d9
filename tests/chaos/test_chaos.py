"""A minute of `tests.chaos.scene`; ten by hand: `python -m tests.chaos.scene --seconds 600`."""

import pytest

from tests.chaos.scene import Processes, play, thirds
from tokserve.protocol.commands import MODES

GROWTH = 48 << 20  # bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "processes",
    [Processes(), Processes(api_servers=2), Processes(data_parallel=2), Processes(tensor_parallel=2)],
    ids=["one", "api2", "dp2", "tp2"],
)
def test_a_minute_of_chaos(processes: Processes) -> None:
    scene = play(60.0, 1, processes)
    assert {"stop", "length", "engine_restarting", "abort", "left", "bad body"} <= set(scene.ends), scene.ends
    for what in ("kill", "hang"):
        assert scene.trouble[what] + scene.trouble[f"rank {what}"], scene.trouble
    assert scene.trouble["stop"] and scene.trouble["update: 200"], scene.trouble
    assert any(f"pause {mode}: 200" in scene.trouble for mode in MODES), scene.trouble
    assert any(f"sleep {level}: 200" in scene.trouble for level in range(3)), scene.trouble
    (rss, _), (later_rss, _) = thirds(scene)
    assert later_rss - rss < GROWTH
