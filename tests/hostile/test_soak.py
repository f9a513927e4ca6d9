"""A minute of `tests.hostile.soak`; twenty by hand: `python -m tests.hostile.soak --out PICTURE`."""

import pytest

from tests.hostile.soak import Soak, summary, table


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_attacks() -> None:
    soak = Soak(60.0, 10.0, 1)
    soak.run()
    print("\n".join(table(soak)))
    assert not soak.broken, soak.broken
    assert len(soak.loud) > 20 and len({attack["attack"] for attack in soak.attacks}) > 10
    assert summary(soak, 60.0)["attacks"] == len(soak.attacks)
