"""What a room imports of other rooms, it says; the table leaves out a room that lacks something."""

from __future__ import annotations

import pytest

from tests.test_layers import BESIDE, at_import, home, is_room, modules
from tokserve.base import rooms as table
from tokserve.base.rooms import ROOMS, Room, rooms


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_requires_what_its_modules_import(name: str) -> None:
    folder = "/".join(ROOMS[name].split(".")[1:-1])
    places = {
        home(target)
        for module, path in modules().items()
        if home(module) == folder
        for target in at_import(path)
        if isinstance(target, tuple) and len(target) >= len(home(target).split("/"))
    }
    others = {place for place in places if place != folder and (is_room(place) or place in BESIDE)}
    assert {f"{place}".replace("/", ".") for place in others if "/" in place or place in BESIDE} == set(
        rooms()[name].requires
    )


def test_a_room_is_absent_without_what_it_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    find = table.importlib.util.find_spec
    monkeypatch.setattr(
        table.importlib.util, "find_spec", lambda name: None if name.endswith(".images") else find(name)
    )
    present: dict[str, Room] = rooms.__wrapped__()
    assert not {"images", "chat", "openai", "anthropic", "pooling"} & present.keys()
    assert {"weights", "lora", "kv", "grammar", "ranks", "fleet", "gpu"} <= present.keys()
