"""`admin.COMMANDS` against its users: the engine's handlers, the client's methods, the routes and the docs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.harness import Engine
from tokserve.client.admin import AdminMethods
from tokserve.engine.admin.states import GENERATION, WEIGHTS
from tokserve.features.offline.llm import LLM
from tokserve.protocol.commands import COMMANDS, AdminCommand

RL = Path(__file__).parents[2] / "docs" / "rl.md"
CLIENT_NAMES = {
    "pause": "pause_generation",
    "resume": "resume_generation",
    "update_weights_from_dir": "update_weights",
    "weights_checksum": None,
    "weight_coordinates": None,  # parts of GET /weight_info
    "release_memory": None,  # of SGLang's routes
}
ASYNC_ONLY = {"begin_weight_stream", "feed_weights", "weight_checksums", "checkpoint_checksums"}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_the_engine_takes_the_declared_parameters(command: AdminCommand) -> None:
    handler = Engine().core._commands._handlers[command.name]
    taken = inspect.signature(handler).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return  # refuses whatever comes
    declared = msgspec.structs.fields(command.parameters)
    assert set(taken) - {"caller"} == {field.name for field in declared}
    for field in declared:
        if field.required or field.default_factory is not msgspec.NODEFAULT:
            continue
        default = taken[field.name].default
        assert default is inspect.Parameter.empty or default == field.default, field.name


@pytest.mark.parametrize("name", COMMANDS)
def test_clients_have_a_method(name: str) -> None:
    method = CLIENT_NAMES.get(name, name)
    if method is not None:
        assert hasattr(AdminMethods, method)
        assert hasattr(LLM, method) or method in ASYNC_ONLY


def as_markdown(table: Any) -> str:
    """The table for the documentation: a row for each state, a column for each event."""
    events = list(dict.fromkeys(event for row in table.values() for event in row))
    lines = [f"| state | {' | '.join(events)} |", "|---|" + "---|" * len(events)]
    lines += [f"| **{state}** | {' | '.join(row.get(event, '') for event in events)} |" for state, row in table.items()]
    return "\n".join(lines)


@pytest.mark.parametrize("table", [GENERATION, WEIGHTS], ids=["generation", "weights"])
def test_the_states_of_the_docs(table: Any) -> None:
    assert as_markdown(table) in RL.read_text(), "write into docs/rl.md:\n" + as_markdown(table)
    events = {event for row in table.values() for event in row}
    assert {state for row in table.values() for state in row.values()} == set(table)
    assert all(set(row) == events for state, row in table.items() if state not in ("running", "overwriting"))


def test_the_table_of_the_docs() -> None:
    rows = [
        f"| {', '.join(f'`{path}`' for path in command.routes)} | {command.text} | {command.when} |"
        for command in COMMANDS.values()
        if command.routes
    ]
    assert "\n".join(rows) in RL.read_text(), "write into docs/rl.md:\n" + "\n".join(rows)
