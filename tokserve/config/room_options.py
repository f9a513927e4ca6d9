"""Options that need a room: where it is absent, they are refused by name."""

from __future__ import annotations

from tokserve.base.errors import StartError
from tokserve.base.rooms import ROOMS, rooms
from tokserve.config import Config, option_values

GROUPS = {"media": "images"}  # groups of options of a room that has another name; others have its name
OPTIONS = {  # of groups of the core
    "tensor_parallel_size": "ranks",
    "pipeline_parallel_size": "ranks",
    "headless": "ranks",
    "data_parallel_size": "fleet",
    "api_server_count": "fleet",
    "otlp_traces_endpoint": "observe",
    "sglang_api": "sglang",
}


def refuse_absent_rooms(config: Config) -> None:
    """Raise StartError naming an option that was given and needs a room that is absent."""
    for (group, name, value), (_, _, default) in zip(option_values(config), option_values(Config()), strict=True):
        room = OPTIONS.get(name) or GROUPS.get(group, group)
        if room in ROOMS and room not in rooms() and value != default:
            package = ROOMS[room].removesuffix(".room")
            raise StartError(f"option {name} needs {package}, which is not part of this installation")
