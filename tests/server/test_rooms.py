"""Rooms add routes, options and hooks to the server by one table, and the server goes without those that are absent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Annotated

import msgspec
import pytest

from tokserve import config
from tokserve.base import rooms as table
from tokserve.base.errors import StartError
from tokserve.base.rooms import Room, imported, rooms
from tokserve.config import Config, common, option_values
from tokserve.dialects.anthropic.error_shape import ANTHROPIC
from tokserve.server.http.errors import OPENAI
from tokserve.server.routes import endpoints, hint


class TrialOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a room that only these tests have."""

    trial_size: Annotated[int, common.about("How large a trial is.", ge=1)] = 3


TRIAL = Room(options=f"{__name__}:TrialOptions")


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokserve.base.rooms.rooms", lambda: {**rooms(), "trial": TRIAL})
    for cached in (config.fields, config._groups):
        monkeypatch.setattr(config, cached.__name__, cached.__wrapped__)


@pytest.mark.parametrize("name", rooms())
def test_the_paths_of_a_room_are_those_of_its_routes(name: str) -> None:
    room = rooms()[name]
    kind = "endpoints" if room.needs else "text_endpoints"
    served = imported(getattr(room, kind)) if getattr(room, kind) else ()
    assert set(room.paths) == {endpoint.path for endpoint in served}
    assert all(endpoint.text for endpoint in served) or room.needs


@pytest.mark.parametrize("name", rooms())
def test_what_a_room_adds_can_be_imported(name: str) -> None:
    room = rooms()[name]
    for kind in Room.__dataclass_fields__.keys() - {"needs", "paths", "parts", "requires"}:
        if place := getattr(room, kind):
            assert imported(place) is not None
    for place in room.parts.values():
        if name != "ray" or importlib.util.find_spec("ray") is not None:
            assert imported(place) is not None


def test_a_part_of_an_absent_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {name: room for name, room in rooms().items() if name != "ranks"}
    monkeypatch.setattr(table, "rooms", lambda: present)
    with pytest.raises(StartError, match=r"features\.ranks is not part of this installation"):
        table.part("ranks", "executor")


def test_each_room_has_its_paths_once() -> None:
    for room in rooms().values():
        for kind in ("endpoints", "text_endpoints"):
            paths = [endpoint.path for endpoint in imported(getattr(room, kind))] if getattr(room, kind) else []
            assert len(paths) == len(set(paths))


def test_a_tokens_only_server_imports_no_text_route_and_its_metrics_no_model() -> None:
    code = (
        "import sys\nfrom tokserve.config import Config\nfrom tokserve.server import app, routes\n"
        "from tokserve.base.rooms import contributions\n"
        "routes.endpoints(Config.make(tokens_only=True))\n"
        "assert len(list(contributions('metrics'))) > 1\n"
        "names = ('tokserve.dialects.openai.responses',\n"
        "         'tokserve.dialects.anthropic.messages', 'torch')\n"
        "sys.exit(' '.join(name for name in names if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_room_whose_package_is_absent_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {endpoint.path for endpoint in endpoints(Config())}
    monkeypatch.setitem(table.ROOMS, "anthropic", "tokserve.dialects.absent.room")
    monkeypatch.setattr("tokserve.server.routes.rooms", rooms.__wrapped__)
    without = {endpoint.path for endpoint in endpoints(Config())}
    assert served - without == {"/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"}


def test_a_room_that_is_broken_is_not_taken_for_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.ROOMS, "anthropic", "tokserve.dialects.anthropic.absent")
    with pytest.raises(ModuleNotFoundError):
        rooms.__wrapped__()


@pytest.mark.usefixtures("trial")
def test_options_of_a_room() -> None:
    trial_config = Config.make(trial_size=5, max_model_len=64)
    assert trial_config.options_of(TrialOptions) == TrialOptions(trial_size=5)
    assert Config().options_of(TrialOptions) == TrialOptions()
    decoded = msgspec.json.decode(msgspec.json.encode(trial_config), type=Config)
    assert decoded.options_of(TrialOptions).trial_size == 5
    assert ("trial", "trial_size", 5) in list(option_values(trial_config))
    with pytest.raises(StartError, match="option trial_size: must be at least 1, got 0"):
        Config.make(trial_size=0)


def test_an_error_names_the_option_that_serves_a_route() -> None:
    default = endpoints(Config())
    assert hint("/get_weight_version", default) == "; it needs --sglang-api"
    assert hint("/chat/completions", default) == "; did you mean /v1/chat/completions?"
    assert hint("/generate", default) == "; it needs --sglang-api"
    assert hint("/nothing_like_this", default) == ""


def test_refusals_without_text_have_the_shape_of_the_dialect() -> None:
    shapes = {endpoint.path: endpoint.errors for endpoint in endpoints(Config.make(tokens_only=True))}
    assert shapes["/v1/messages"] is ANTHROPIC
    assert shapes["/v1/chat/completions"] is OPENAI
