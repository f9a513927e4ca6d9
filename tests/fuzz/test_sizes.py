"""Fields at sizes that no client has: a reply or a 4xx, and no other client waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.e2e.server import Server
from tests.fuzz.sizes import DEPTHS, SIZES, Case, cases, deep_cases
from tests.hostile.attack import MIB, Scene, post
from tests.route_table import ENDPOINTS
from tokserve.dialects.sglang.routes import ENDPOINTS as SGLANG
from tokserve.server.endpoint import Endpoint


@pytest.fixture(scope="module", params=["tokserve", pytest.param("sglang", marks=pytest.mark.slow)])
def dialect(request: pytest.FixtureRequest) -> Iterator[tuple[Scene, Sequence[Endpoint]]]:
    """A server, and the routes that are not tried with the other."""
    is_sglang = request.param == "sglang"
    with Server("demo", "--enable-lora", *(["--sglang-api"] if is_sglang else [])) as server:
        scene = Scene(server)
        yield scene, SGLANG if is_sglang else ENDPOINTS
        scene.metronome.end()


def check(scene: Scene, case: Case, what: str) -> None:
    """Send a body: an answer or a 4xx."""
    answer = post(scene.server.url, case.path, case.body)
    log = [line for line in scene.server.log if "Traceback" in line or " ERROR " in line]
    where = f"{case.path} {case.field} {what}: {answer}"
    assert (answer.status == 200 or 400 <= answer.status < 500) and not log, (where, scene.server.log[-30:])


def check_end(scene: Scene) -> None:
    """The server is idle, its memory is released, and it replies as before."""
    assert scene.good() == scene.expected
    scene.server.wait_idle()
    scene.wait_for_memory(150 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_each_field_at_a_size(dialect: tuple[Scene, Sequence[Endpoint]], size: int) -> None:
    scene, endpoints = dialect
    paths: set[str] = set()
    scene.metronome.worst()
    stalls = scene.stalls()
    for case in cases(size, endpoints):
        before, waits = (scene.stalls(), scene.processor_waits()) if size == SIZES[-1] else (stalls, None)
        check(scene, case, f"at {size}")
        if size == SIZES[-1]:
            scene.check_stalls(before, f"{case.path} {case.field} at {size}", waits)
        paths.add(case.path)
    assert len(paths) > 10
    if size < SIZES[-1]:
        scene.check_stalls(stalls)
    check_end(scene)


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_each_field_nested(dialect: tuple[Scene, Sequence[Endpoint]], depth: int) -> None:
    scene, endpoints = dialect
    scene.metronome.worst()
    stalls = scene.stalls()
    for case in deep_cases(depth, endpoints):
        check(scene, case, f"nested {depth} deep")
    scene.check_stalls(stalls)
    check_end(scene)
