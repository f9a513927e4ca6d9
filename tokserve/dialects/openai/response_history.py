"""The input items of the Responses API as chat messages.

The items of one turn of the assistant form one message.  A call of any kind is the call of the function that stands for
its tool in the prompt, and its output a message of role "tool".  Items whose content only OpenAI's servers can read or
use are left out, and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokserve.base.errors import invalid
from tokserve.dialects.openai.response_items import decoded_reasoning
from tokserve.dialects.openai.response_tools import INPUT, ToolTable, chat_name, note_left_out
from tokserve.features.chat.chat import part_text
from tokserve.features.images.parts import CHAT_KINDS, UnreadImage, chat_part
from tokserve.server.http import errors
from tokserve.server.http.body import encode_json

ROLES = ("user", "assistant", "system", "developer")
# What only OpenAI's servers can read, or made and used themselves.
LEFT_OUT = (
    "compaction",
    "computer_call",
    "computer_call_output",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "program",
    "program_output",
    "web_search_call",
)
STATELESS = "nothing is stored, send the item itself (a request with store: false makes clients do that)"
Part = dict[str, str] | UnreadImage  # of a content: text, or an image


class InputMessages:
    """An input as chat messages.  `fields`: the path in the body of each message; `left_out`: of the items that are in
    none.  `tools`: takes the tools that items bring.

    The items of one turn of the assistant form one message, as in chat: reasoning, then text, then calls.
    """

    def __init__(self, tools: ToolTable) -> None:
        self.messages: list[dict[str, Any]] = []
        self.fields: list[str] = []
        self.left_out: list[str] = []
        self._tools = tools
        self._turn: dict[str, Any] | None = None  # the assistant's message, while items may be added to it
        self._adders: dict[str, Callable[[str, dict[str, Any]], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "function_call_output": self._output,
            "custom_tool_call": self._custom_tool_call,
            "custom_tool_call_output": self._output,
            "local_shell_call": lambda field, item: self._action(field, item, "local_shell", "action"),
            "local_shell_call_output": self._output,
            "shell_call": lambda field, item: self._action(field, item, "shell", "action"),
            "shell_call_output": self._shell_output,
            "apply_patch_call": lambda field, item: self._action(field, item, "apply_patch", "operation"),
            "apply_patch_call_output": self._patch_output,
            "tool_search_call": self._tool_search,
            "tool_search_output": self._tool_search_output,
            "additional_tools": self._additional_tools,
            "mcp_call": self._mcp_call,
            "code_interpreter_call": self._code_interpreter_call,
            "file_search_call": self._file_search_call,
        }

    def append(self, field: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.fields.append(field)
        self._turn = None

    def add(self, field: str, item: Any) -> None:
        """Add the next item.  Raises RequestError naming `field` or a path in it."""
        if not isinstance(item, dict):
            raise invalid(field, "must be an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind is None:
            raise invalid(f"{field}.type", "is required")
        adder = self._adders.get(kind) if isinstance(kind, str) else None
        if adder is not None:
            adder(field, item)
        elif kind in LEFT_OUT:
            self._leave_out(field, kind)
        else:
            reason = f"it takes {', '.join(self._adders)}"
            reason = STATELESS if kind == "item_reference" else reason
            errors.refuse_unsupported(f"{field}.type", kind, reason=reason)

    def _leave_out(self, field: str, kind: str) -> None:
        note_left_out(f"items of type {kind}")
        self.left_out.append(field)

    def _message(self, field: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        content = _content(f"{field}.content", item.get("content"))
        if role != "assistant":
            self.append(field, {"role": role, "content": content})
            return
        turn = self._assistant(field)
        turn["content"] = _parts(turn["content"]) + _parts(content) if "content" in turn else content

    def _reasoning(self, field: str, item: dict[str, Any]) -> None:
        """Add the text of the reasoning: its content, or what this server encoded, or else its summary."""
        name = "content" if item.get("content") else "summary"
        parts = item.get(name) or []
        if name == "summary" and (text := decoded_reasoning(item.get("encrypted_content"))):
            name, parts = "encrypted_content", [{"text": text}]
        if not isinstance(parts, list):
            raise invalid(f"{field}.{name}", "must be a list of parts")
        texts = [_string(f"{field}.{name}[{i}]", part, "text") for i, part in enumerate(parts)]
        if any(texts):
            turn = self._assistant(field)
            turn["reasoning"] = "\n".join(([turn["reasoning"]] if "reasoning" in turn else []) + texts)

    def _assistant(self, field: str, *, calls: bool = False) -> dict[str, Any]:
        """The message of the assistant's turn: a message with content takes only calls and what follows them."""
        turn = self._turn
        if turn is None or ("content" in turn and "tool_calls" not in turn and not calls):
            turn = {"role": "assistant"}
            self.append(field, turn)
            self._turn = turn
        return turn

    # calls and their outputs

    def _call(self, field: str, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(field, calls=True).setdefault("tool_calls", []).append(call)

    def _result(self, field: str, call_id: str, content: str | list[Part]) -> None:
        self.append(field, {"role": "tool", "tool_call_id": call_id, "content": content})

    def _function_call(self, field: str, item: dict[str, Any]) -> None:
        name = _shown_name(field, item)
        arguments = item.get("arguments")  # JSON text, or the object that some clients send
        if not isinstance(arguments, dict):
            arguments = _string(field, item, "arguments")
        self._call(field, _string(field, item, "call_id"), name, arguments)

    def _custom_tool_call(self, field: str, item: dict[str, Any]) -> None:
        arguments = {INPUT: _string(field, item, "input")}
        self._call(field, _string(field, item, "call_id"), _shown_name(field, item), arguments)

    def _output(self, field: str, item: dict[str, Any]) -> None:
        name = "call_id"
        if item.get("type") == "local_shell_call_output" and item.get(name) is None:
            name = "id"  # OpenAI's schema has the id of the call there
        content = _content(f"{field}.output", item.get("output"))
        self._result(field, _string(field, item, name), content)

    def _action(self, field: str, item: dict[str, Any], name: str, key: str) -> None:
        """The call of a tool that the client runs, whose arguments are at `key`."""
        arguments = item.get(key)
        if not isinstance(arguments, dict):
            raise invalid(f"{field}.{key}", "must be an object")
        skipped = ("type",) if name == "local_shell" else ()  # of which there is one
        arguments = {k: value for k, value in arguments.items() if value is not None and k not in skipped}
        self._call(field, _string(field, item, "call_id"), name, arguments)

    def _shell_output(self, field: str, item: dict[str, Any]) -> None:
        """The outputs of all commands, as JSON."""
        outputs = item.get("output")
        if not isinstance(outputs, list):
            raise invalid(f"{field}.output", "must be a list of outputs")
        for i, output in enumerate(outputs):
            for name in ("stdout", "stderr"):
                _string(f"{field}.output[{i}]", output, name)
        self._result(field, _string(field, item, "call_id"), _json(outputs))

    def _patch_output(self, field: str, item: dict[str, Any]) -> None:
        output = item.get("output")
        if not isinstance(output, str | None):
            raise invalid(f"{field}.output", "must be a string")
        status = _string(field, item, "status")
        self._result(field, _string(field, item, "call_id"), f"{status}: {output}" if output else status)

    def _tool_search(self, field: str, item: dict[str, Any]) -> None:
        """A search of the client is a call; one of OpenAI's servers has no message."""
        if item.get("call_id") is not None:
            self._call(field, _string(field, item, "call_id"), "tool_search", item.get("arguments") or {})

    def _tool_search_output(self, field: str, item: dict[str, Any]) -> None:
        """The tools that were found can be called from now on; the message names them."""
        names = self._tools.add_all(f"{field}.tools", item.get("tools"), again=True)
        if item.get("call_id") is not None:
            self._result(field, _string(field, item, "call_id"), _json({"tools": names}))

    def _additional_tools(self, field: str, item: dict[str, Any]) -> None:
        self._tools.add_all(f"{field}.tools", item.get("tools"), again=True)

    # calls that OpenAI's servers ran

    def _mcp_call(self, field: str, item: dict[str, Any]) -> None:
        name = chat_name(_string(field, item, "name"), _string(field, item, "server_label"))
        output = item.get("output")
        failure = item.get("error")
        text = output if isinstance(output, str) else "" if failure is None else _json(failure)
        self._ran(field, item, name, _string(field, item, "arguments"), text)

    def _code_interpreter_call(self, field: str, item: dict[str, Any]) -> None:
        outputs = item.get("outputs") or []
        if not isinstance(outputs, list):
            raise invalid(f"{field}.outputs", "must be a list of outputs")
        logs = [
            output["logs"] for output in outputs if isinstance(output, dict) and isinstance(output.get("logs"), str)
        ]
        code = item.get("code")
        if not isinstance(code, str | None):
            raise invalid(f"{field}.code", "must be a string")
        self._ran(field, item, "code_interpreter", {"code": code or ""}, "\n".join(logs))

    def _file_search_call(self, field: str, item: dict[str, Any]) -> None:
        """The results, where the client asked for them; else it is left out."""
        results = item.get("results")
        if not isinstance(results, list):
            self._leave_out(field, "file_search_call")
            return
        self._ran(field, item, "file_search", {"queries": item.get("queries") or []}, _json(results))

    def _ran(self, field: str, item: dict[str, Any], name: str, arguments: str | dict[str, Any], output: str) -> None:
        """A call with its output, which are one item."""
        item_id = _string(field, item, "id")
        self._call(field, item_id, name, arguments)
        self._result(field, item_id, output)


def _shown_name(field: str, item: dict[str, Any]) -> str:
    """The name of the called function in the prompt."""
    namespace = item.get("namespace")
    if not isinstance(namespace, str | None):
        raise invalid(f"{field}.namespace", "must be a string")
    return chat_name(_string(field, item, "name"), namespace)


def _json(value: Any) -> str:
    return encode_json(value).decode()


def _string(field: str, item: Any, name: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise invalid(f"{field}.{name}", "must be a string")
    return value


def _content(field: str, content: Any) -> str | list[Part]:
    """The content for chat.  A list of one part becomes its text, which more templates accept."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(field, "must be a string or a list of parts")
    parts = [_part(f"{field}[{i}]", part) for i, part in enumerate(content)]
    return parts[0]["text"] if len(parts) == 1 and isinstance(parts[0], dict) else parts


def _part(field: str, part: Any) -> Part:
    if isinstance(part, dict) and part.get("type") in CHAT_KINDS:
        return UnreadImage(field, part, chat_part)
    return {"type": "text", "text": part_text(field, part)}


def _parts(content: str | list[Part]) -> list[Part]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
