"""The model of the agents' tests: a script that calls the shell of the agent once or fifty times, reports what it
printed, remembers it in the next turn, and then writes without end."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.clients.agent_prompts import (
    AGAIN,
    COMMAND,
    ENDLESS,
    LONG,
    MAKE,
    PATCH,
    PREFACE,
    PRINTED,
    REMEMBERED,
    REPORTED,
    RUN,
    TURNS,
    WRITTEN,
)
from tokserve.checkpoint import DEMO_DIR
from tokserve.testing import ScriptedReply
from tokserve.text.tokenizer import Tokenizer

CONTEXT = 1 << 20  # bytes, which are the tokens of the demo's tokenizer
HELD_AT, HELD_SECONDS = 24, 3600.0  # where an endless answer waits for its client to leave
# The shells of agents by the names of their tools, with the arguments that run a command.
SHELLS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "exec_command": lambda command: {"cmd": command},
    "Bash": lambda command: {"command": command, "description": "Runs the command of the test"},
    "bash": lambda command: {"command": command, "description": "Runs the command of the test"},
    "run_shell_command": lambda command: {"command": command, "is_background": False},
    "run_command": lambda command: {"command": command},
    "host__run_command": lambda command: {"command": command},
    "local_shell": lambda command: {"command": ["bash", "-c", command]},
    "shell": lambda command: {"commands": [command]},
    "functions__exec": lambda command: {
        "input": f"const done = await tools.exec_command({json.dumps({'cmd': command})}); text(done);"
    },
}


def model_with_context(place: Path) -> Path:
    """A directory with the demo's tokenizer and template, and a context for the prompts of agents.  It has no weights:
    a script needs none."""
    place.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(DEMO_DIR / name, place)
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        values = json.loads((DEMO_DIR / name).read_text())
        (place / name).write_text(json.dumps(values | {field: CONTEXT}))
    return place


class Script:
    """The replies to prompts; `tokenizer` is that of the served model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, prompt_ids: list[int], index: int) -> ScriptedReply:
        """The reply to a prompt."""
        turns = self._tokenizer.decode(prompt_ids, False).split("<|im_start|>")
        # the last turn is to be written, and an agent may have a note of its own before it
        role, _, last = next(t for t in reversed(turns[:-1]) if t.startswith(("user\n", "tool\n"))).partition("\n")
        shell = next((name for name in SHELLS if re.search(rf"\b{name}\b", turns[1])), None)
        begun = next((i for i, t in enumerate(turns) if t.startswith("user\n") and LONG in t), len(turns))
        count = sum(turn.startswith("tool\n") for turn in turns[begun:])
        if shell is not None and begun < len(turns) and count < TURNS:
            return self._calls(shell, SHELLS[shell](f"{COMMAND}; echo {count} of {TURNS}"))
        if role == "tool":
            return self._says(REPORTED if PRINTED in last else f"It failed: {last}")
        if ENDLESS in last:
            return self._says("word " * HELD_AT, {HELD_AT: HELD_SECONDS})
        if AGAIN in last:
            results = [turn for turn in turns if turn.startswith("tool\n")]
            return self._says(REMEMBERED if PRINTED in "".join(results) else "I have forgotten.")
        if MAKE in last and "edit" in turns[1].split("\n")[1]:
            return self._calls("edit", {"input": PATCH})
        if MAKE in last and "apply_patch" in turns[1]:
            if "local_shell" in turns[1]:  # the tool of its own type, whose operations have no envelope
                return self._calls("apply_patch", {"type": "create_file", "path": WRITTEN, "diff": f"+{PRINTED}"})
            return self._calls("apply_patch", {"input": PATCH})
        if RUN in last and shell is not None:
            return self._calls(shell, SHELLS[shell](COMMAND))
        return self._says("A title")  # or a summary

    def _calls(self, name: str, arguments: dict[str, Any]) -> ScriptedReply:
        call = json.dumps({"name": name, "arguments": arguments})
        return self._says(f"{PREFACE}\n<tool_call>\n{call}\n</tool_call>")

    def _says(self, text: str, delays: Mapping[int, float] | None = None) -> ScriptedReply:
        return ScriptedReply(self._tokenizer.encode(text), delays=delays or {})
