"""Fields at sizes that no client has: an answer or a 4xx, and nobody else waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.fuzz.sizes import SIZES, cases
from tests.hostile.attack import MIB, Scene, post


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Server("demo", "--enable-lora") as server:
        made = Scene(server)
        yield made
        made.metronome.end()


@pytest.mark.parametrize("size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.slow) for size in SIZES[1:])])
def test_each_field_at_a_size(scene: Scene, size: int) -> None:
    paths: set[str] = set()
    scene.metronome.worst()
    stalls = scene.stalls()
    for case in cases(size):
        before = scene.stalls() if size == SIZES[-1] else stalls
        answer = post(scene.server.url, case.path, case.body)
        where = f"{case.path} {case.field} at {size}: {answer}"
        assert answer.status == 200 or 400 <= answer.status < 500, where
        if size == SIZES[-1]:
            scene.check_stalls(before, where)
        paths.add(case.path)
    assert len(paths) > 15
    if size < SIZES[-1]:
        scene.check_stalls(stalls)
    assert scene.good() == scene.want
    scene.server.wait_idle()
    scene.wait_for_memory(150 * MIB)
