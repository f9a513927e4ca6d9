"""The output items of calls in the Responses API, written while a call arrives.

The item's type follows the tool that was called: a function, a custom tool, or one that the client runs itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.dialects.openai.response_tools import ServedTool
from tokserve.features.chat.token_segments import OutputToken

EmitEvent = Callable[[str, dict[str, Any]], None]  # takes the name of an event, without "response.", and its fields
INPUT_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HIGH = re.compile(r"\\u[dD][89abAB]")  # the first surrogate of a pair
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BEGUN_LOW = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call, with arguments as JSON text."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomToolCall(msgspec.Struct, tag_field="type", tag="custom_tool_call", kw_only=True):
    """A call of a custom tool, with its input as text."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


class ExecAction(msgspec.Struct, tag_field="type", tag="exec", kw_only=True):
    """The command of a `local_shell`."""

    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCall(msgspec.Struct, tag_field="type", tag="local_shell_call", kw_only=True):
    """A command for the client to run."""

    id: str
    status: str
    call_id: str
    action: ExecAction


class LocalEnvironment(msgspec.Struct, frozen=True, tag_field="type", tag="local"):
    """Where the commands of a `shell` run: at the client's."""


class ShellAction(msgspec.Struct, kw_only=True):
    """The commands of a `shell`."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(msgspec.Struct, tag_field="type", tag="shell_call", kw_only=True):
    """Commands for the client's shell."""

    id: str
    status: str
    call_id: str
    action: ShellAction
    environment: LocalEnvironment = LocalEnvironment()


class FileToCreate(msgspec.Struct, tag_field="type", tag="create_file"):
    """A new file, as a diff of additions."""

    path: str
    diff: str = ""


class FileToUpdate(msgspec.Struct, tag_field="type", tag="update_file"):
    """Changes of a file."""

    path: str
    diff: str = ""


class FileToDelete(msgspec.Struct, tag_field="type", tag="delete_file"):
    """A file that goes."""

    path: str


class ApplyPatchCall(msgspec.Struct, tag_field="type", tag="apply_patch_call", kw_only=True):
    """A change of a file for the client to make."""

    id: str
    status: str
    call_id: str
    operation: FileToCreate | FileToUpdate | FileToDelete


class ToolSearchCall(msgspec.Struct, tag_field="type", tag="tool_search_call", kw_only=True):
    """A search for tools that the client answers."""

    id: str
    status: str
    call_id: str
    execution: str = "client"
    arguments: dict[str, Any]


CallItem = FunctionCallItem | CustomToolCall | LocalShellCall | ShellCall | ApplyPatchCall | ToolSearchCall
# By the tool's type: the prefix of the item's id, the item, and its field with the arguments of the call.
ACTIONS: dict[str, tuple[str, type[Any], str]] = {
    "local_shell": ("lsh", LocalShellCall, "action"),
    "shell": ("sh", ShellCall, "action"),
    "apply_patch": ("apc", ApplyPatchCall, "operation"),
    "tool_search": ("tsc", ToolSearchCall, "arguments"),
}


class OpenFunction:
    """The call of a function that is being written; emits its events."""

    kind = "call"

    def __init__(self, item: FunctionCallItem, index: int, emit: EmitEvent) -> None:
        self.item: CallItem = item
        self._function = item
        self._texts: list[str] = []
        self._position = {"item_id": item.id, "output_index": index}
        self._emit = emit
        emit("output_item.added", {"output_index": index, "item": item})

    def add(self, text: str, tokens: Sequence[OutputToken]) -> None:
        """Append JSON of the arguments."""
        if text:
            self._texts.append(text)
            self._emit("function_call_arguments.delta", self._position | {"delta": text})

    def close(self, status: str) -> None:
        """Complete the item."""
        item = self._function
        item.arguments, item.status = "".join(self._texts), status
        done = {"name": item.name, "arguments": item.arguments}
        self._emit("function_call_arguments.done", self._position | done)
        self._emit("output_item.done", {"output_index": self._position["output_index"], "item": item})


class OpenCustom:
    """The call of a custom tool that is being written; emits its events.  `raw`: the answer itself is the input; else
    it is read from the arguments of the function that stands for the tool."""

    def __init__(self, item: CustomToolCall, index: int, emit: EmitEvent, *, raw: bool) -> None:
        self.kind = "content" if raw else "call"
        self.item: CallItem = item
        self._call = item
        self._texts: list[str] = []
        self._reader = None if raw else InputReader()
        self._position = {"item_id": item.id, "output_index": index}
        self._emit = emit
        emit("output_item.added", {"output_index": index, "item": item})

    def add(self, text: str, tokens: Sequence[OutputToken]) -> None:
        """Append text of the answer, or of the arguments."""
        self._append(text if self._reader is None else self._reader.push(text))

    def _append(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._emit("custom_tool_call_input.delta", self._position | {"delta": text})

    def close(self, status: str) -> None:
        """Complete the item."""
        if self._reader is not None:
            self._append(self._reader.rest())
        item = self._call
        item.input, item.status = "".join(self._texts), status
        self._emit("custom_tool_call_input.done", self._position | {"input": item.input})
        self._emit("output_item.done", {"output_index": self._position["output_index"], "item": item})


class OpenAction:
    """The call of a tool that the client runs.  Its item is made at its end, as only then its action is known.

    Arguments that are not of the tool's form, or that lack their end, are given to the client as the call of a
    function of this name.
    """

    kind = "call"

    def __init__(self, tool: ServedTool, call: FunctionCallItem, index: int, emit: EmitEvent) -> None:
        self.item: CallItem = call
        self._tool, self._call = tool, call
        self._index, self._emit = index, emit
        self._texts: list[str] = []

    def add(self, text: str, tokens: Sequence[OutputToken]) -> None:
        """Append JSON of the arguments."""
        self._texts.append(text)

    def close(self, status: str) -> None:
        """Make the item, and emit all of its events."""
        text, action = "".join(self._texts), None
        if status == "completed":
            action = self._action(text)
        if action is None:
            function = OpenFunction(self._call, self._index, self._emit)
            function.add(text, ())
            function.close(status)
            return
        self.item = action
        action.status = "in_progress"
        self._emit("output_item.added", {"output_index": self._index, "item": action})
        if isinstance(action, ShellCall):
            for i, command in enumerate(action.action.commands):
                at = {"output_index": self._index, "command_index": i}
                self._emit("shell_call_command.added", at | {"command": ""})
                self._emit("shell_call_command.delta", at | {"delta": command})
                self._emit("shell_call_command.done", at | {"command": command})
        action.status = status
        self._emit("output_item.done", {"output_index": self._index, "item": action})

    def _action(self, text: str) -> Any:
        """The item; None: the arguments are not those of the tool."""
        prefix, kind, field = ACTIONS[self._tool.kind]
        call = self._call
        try:
            arguments = msgspec.json.decode(text)
            if isinstance(arguments, dict) and kind is LocalShellCall:
                arguments["type"] = "exec"
            item_id = prefix + call.id.removeprefix("fc")
            head = {"type": kind.__struct_config__.tag, "id": item_id, "status": "completed", "call_id": call.call_id}
            return msgspec.convert(head | {field: arguments}, kind)
        except (msgspec.DecodeError, RecursionError):
            return None


OpenCall = OpenFunction | OpenCustom | OpenAction


def open_call(
    tool: ServedTool | None, call_id: str, item_id: str, name: str, index: int, emit: EmitEvent, *, raw: bool
) -> OpenCall:
    """Begin the item of a call.

    `tool`: what the function `name` stands for; None: the model calls a function that it was not given.  `call_id`,
    `item_id`: the ids of the call and, without its prefix, of the item; `index`: its place in the output; `raw`: as of
    `OpenCustom`.
    """
    namespace: str | UnsetType = UNSET
    if tool is not None:
        name, namespace = tool.name, tool.namespace or UNSET
    if tool is not None and tool.kind == "custom":
        custom = CustomToolCall(id=f"ctc_{item_id}", call_id=call_id, name=name, namespace=namespace)
        return OpenCustom(custom, index, emit, raw=raw)
    item = FunctionCallItem(id=f"fc_{item_id}", call_id=call_id, name=name, namespace=namespace)
    if tool is not None and tool.kind in ACTIONS:
        return OpenAction(tool, item, index, emit)
    return OpenFunction(item, index, emit)


class InputReader:
    """Reads the input of a custom tool from {"input": "..."} while it arrives.  Arguments that begin otherwise are the
    input as they are."""

    def __init__(self) -> None:
        self._text = ""  # that is not read yet
        self._read = self._head

    def push(self, text: str) -> str:
        """Take more of the arguments; returns more of the input."""
        self._text += text
        return self._read()

    def rest(self) -> str:
        """What is left at the end of the arguments: an escape without its end, or what may have been the beginning."""
        rest, self._text = self._text, ""
        return "" if self._read == self._after else rest

    def _head(self) -> str:
        head = INPUT_HEAD.match(self._text)
        if head is not None:
            self._text = self._text[head.end() :]
            self._read = self._string
        elif not '{"input":"'.startswith("".join(self._text.split())):
            self._read = self._as_it_is
        else:
            return ""
        return self._read()

    def _as_it_is(self) -> str:
        text, self._text = self._text, ""
        return text

    def _after(self) -> str:
        self._text = ""
        return ""

    def _string(self) -> str:
        out: list[str] = []
        text, at = self._text, 0
        while at < len(text):
            if plain := _PLAIN.match(text, at):
                out.append(plain.group())
                at = plain.end()
                continue
            if text[at] == '"':
                self._text, self._read = "", self._after
                return "".join(out)
            size = self._escape_size(text, at)
            if size == 0:
                break
            out.append(_unescaped(text[at : at + size]))
            at += size
        self._text = text[at:]
        return "".join(out)

    def _escape_size(self, text: str, at: int) -> int:
        """The length of the escape at `at`; 0: more text is needed.  What is no escape is a text of two characters."""
        escape = _ESCAPE.match(text, at)
        if escape is None:
            digits = text[at + 2 :] if text.startswith("\\u", at) else ""
            may_go_on = len(text) - at < 2 or (text[at + 1] == "u" and re.fullmatch(r"[0-9a-fA-F]{0,3}", digits))
            return 0 if may_go_on else 2
        end = escape.end()
        if _HIGH.match(text, at):
            if low := _LOW.match(text, end):
                return low.end() - at
            if _BEGUN_LOW.fullmatch(text, end):
                return 0
        return end - at


def _unescaped(escape: str) -> str:
    try:
        value: str = msgspec.json.decode(f'"{escape}"', type=str)
    except msgspec.DecodeError:
        return escape
    return value
