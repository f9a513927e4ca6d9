"""The tools of /v1/responses as functions of a chat, and which kind of tool each function stands for.

A function of a namespace has the name NAMESPACE__NAME in the prompt.  A custom tool is a function of one string.  Tools
that the client runs itself (`local_shell`, `shell`, `apply_patch`, a `tool_search` of the client) are functions with
the parameters of their actions.  Tools that only OpenAI's servers run are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from tokserve.base.errors import LONGEST_SHOWN, RequestError, invalid
from tokserve.server.http import errors

log = logging.getLogger(__name__)

# Tools that only OpenAI's servers run; some have a date at the end of their name.
HOSTED = (
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "tool_search",
    "web_search",
    "web_search_preview",
)
DATE = re.compile(r"_\d{4}_\d{2}_\d{2}$")
CHAT_FIELD = re.compile(r"tools\[(\d+)\]\.function\b")
INPUT = "input"  # the parameter of a custom tool
ANY_TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
V4A = (
    "The diff has no file headers. For create_file every line begins with '+'. For update_file each hunk begins with "
    "'@@' and, if it helps to find the place, a line of the file; then come lines that begin with ' ' (unchanged), '-' "
    "(removed) or '+' (added)."
)


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


# The functions that stand for the tools that a client runs itself, by type.
CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "local_shell": (
        "Runs a command on the user's machine and returns its output.",
        _object(
            {
                "command": {"type": "array", "items": ANY_TEXT, "description": "The program and its arguments."},
                "working_directory": ANY_TEXT,
                "env": {"type": "object", "additionalProperties": ANY_TEXT},
                "timeout_ms": COUNT,
                "user": ANY_TEXT,
            },
            "command",
        ),
    ),
    "shell": (
        "Runs commands in a shell, one after the other, and returns the output of each.",
        _object(
            {
                "commands": {"type": "array", "items": ANY_TEXT},
                "timeout_ms": COUNT,
                "max_output_length": COUNT,
            },
            "commands",
        ),
    ),
    "apply_patch": (
        f"Creates, updates or deletes a file. {V4A}",
        _object(
            {
                "type": {"enum": ["create_file", "update_file", "delete_file"]},
                "path": ANY_TEXT,
                "diff": {"type": "string", "description": "Not needed for delete_file."},
            },
            "type",
            "path",
        ),
    ),
}
SERVED = ("function", "custom", "namespace", *CLIENT_TOOLS)


class ServedTool(NamedTuple):
    """A tool that a function of the chat stands for.

    `kind`: its type; `name` and `namespace`: as the client has them; `field`: its path in the body; `lark`: the grammar
    of a custom tool's input in Lark, if it has one.
    """

    kind: str
    name: str
    namespace: str | None
    field: str
    lark: str | None = None


class ChatTools(NamedTuple):
    """The tools and the choice for a chat.  `grammar`: the answer is the input of the custom tool `raw`, a name in the
    chat, and keeps to this Lark grammar."""

    functions: list[dict[str, Any]] | None
    choice: Any
    raw: str | None = None
    grammar: str | None = None


def chat_name(name: str, namespace: str | None) -> str:
    """The name that a function has in the prompt."""
    return f"{namespace}__{name}" if namespace else name


@cache
def note_left_out(kind: str) -> None:
    """Write to the log, once, that requests have such tools or items and get none of them.  `kind`: of HOSTED, or of
    the items that only OpenAI's servers can read."""
    log.warning("requests to /v1/responses contain %s, which only OpenAI's servers can use: it is left out", kind)


def hosted_kind(kind: Any) -> str | None:
    """The type of a tool that only OpenAI's servers run, without a date; None: it is another tool."""
    undated = DATE.sub("", kind) if isinstance(kind, str) else ""
    return undated if undated in HOSTED else None


class ToolTable:
    """The tools of one request.  `served`: by name in the chat; `left_out`: the paths of tools that are not served;
    `grammar_field`: the path of the Lark grammar that the whole answer keeps to, if it is the input of a tool."""

    def __init__(self) -> None:
        self.served: dict[str, ServedTool] = {}
        self.left_out: list[str] = []
        self.grammar_field: str | None = None
        self._functions: list[dict[str, Any]] = []
        self._fields: list[ServedTool] = []  # of the functions

    def add_all(self, field: str, tools: Any, *, again: bool = False) -> list[str]:
        """Add the tools of a list at `field`; returns their names in the chat.  `again`: those that are there already
        are skipped."""
        if not isinstance(tools, list):
            raise invalid(field, "must be a list of tools")
        return [name for i, tool in enumerate(tools) for name in self._add(f"{field}[{i}]", tool, again)]

    def _add(self, field: str, tool: Any, again: bool) -> list[str]:
        if not isinstance(tool, dict):
            raise invalid(field, "must be an object")
        kind = tool.get("type")
        if kind == "namespace":
            return self._add_namespace(field, tool, again)
        if kind in ("function", "custom"):
            return self._add_function(field, tool, again)
        environment = tool.get("environment")
        contained = isinstance(environment, dict) and environment.get("type") != "local"
        if kind in CLIENT_TOOLS and not (kind == "shell" and contained):
            description, parameters = CLIENT_TOOLS[kind]
            return self._serve(kind, {"description": description, "parameters": parameters}, kind, field, again)
        if kind == "tool_search" and tool.get("execution") == "client":
            description = tool.get("description") or "Searches for tools that can be used in later turns."
            function = {"description": description, "parameters": tool.get("parameters") or {"type": "object"}}
            return self._serve(kind, function, kind, field, again)
        hosted = "shell in a container" if kind == "shell" else hosted_kind(kind)
        if hosted is None:
            errors.refuse_unsupported(f"{field}.type", kind, reason=f"it serves {', '.join(SERVED)}")
            raise invalid(f"{field}.type", f"must be one of {', '.join(SERVED)}")
        note_left_out(f"tools of type {hosted}")
        self.left_out.append(field)
        return []

    def _add_namespace(self, field: str, tool: dict[str, Any], again: bool) -> list[str]:
        namespace, inner = _name(field, tool), tool.get("tools")
        if not isinstance(inner, list) or not inner:
            raise invalid(f"{field}.tools", "must be a list of functions that is not empty")
        description = tool.get("description")
        if not isinstance(description, str | None):
            raise invalid(f"{field}.description", "must be a string")
        names: list[str] = []
        for i, function in enumerate(inner):
            at = f"{field}.tools[{i}]"
            if not isinstance(function, dict):
                raise invalid(at, "must be an object")
            if function.get("type") not in ("function", "custom"):
                raise invalid(f"{at}.type", "must be 'function' or 'custom'")
            if i == 0 and description:
                text = function.get("description") or ""
                function = function | {"description": f"[{namespace}: {description}] {text}".rstrip()}
            names += self._add_function(at, function, again, namespace)
        return names

    def _add_function(self, field: str, tool: dict[str, Any], again: bool, namespace: str | None = None) -> list[str]:
        name, kind = _name(field, tool), tool["type"]
        if kind == "function":
            function, lark = {key: value for key, value in tool.items() if key != "type"}, None
        else:
            function, lark = _custom_function(field, tool)
        return self._serve(name, function, kind, field, again, namespace, lark)

    def _serve(
        self,
        name: str,
        function: dict[str, Any],
        kind: str,
        field: str,
        again: bool,
        namespace: str | None = None,
        lark: str | None = None,
    ) -> list[str]:
        shown, tool = chat_name(name, namespace), ServedTool(kind, name, namespace, field, lark)
        if shown not in self.served:
            self.served[shown] = tool
        elif again:
            return [shown]
        self._functions.append({"type": "function", "function": function | {"name": shown}})
        self._fields.append(tool)
        return [shown]

    def field_of(self, chat_field: str) -> str:
        """The path in the body for a path to a function of the chat."""
        match = CHAT_FIELD.match(chat_field)
        if match is None:
            return chat_field
        tool, rest = self._fields[int(match[1])], chat_field[match.end() :]
        if tool.kind == "custom" and rest.startswith(".parameters"):
            return f"{tool.field}.format.definition"
        return tool.field + rest

    # the choice

    def for_chat(self, choice: Any) -> ChatTools:
        """The tools for the chat, with the `tool_choice` of the body."""
        functions = self._functions or None
        kind = choice.get("type") if isinstance(choice, dict) else None
        if choice == "required":
            return self._required(functions, self._functions_named([*self.served]), choice)
        if kind == "allowed_tools":
            return self._allowed(functions, choice)
        if isinstance(kind, str):
            name = self._chosen("tool_choice", choice)
            if name is None:
                raise invalid(
                    "tool_choice",
                    f"of type {kind[:LONGEST_SHOWN]!r} is not supported by this server: only OpenAI's servers run it",
                    code="unsupported",
                )
            if self.served[name].lark is not None:
                return self._raw(functions, name)
            return ChatTools(functions, {"type": "function", "function": {"name": name}})
        return ChatTools(functions, choice)

    def _functions_named(self, names: list[str]) -> list[ServedTool]:
        return [self.served[name] for name in names]

    def _required(self, functions: list[dict[str, Any]] | None, tools: list[ServedTool], choice: Any) -> ChatTools:
        """A call of one of these tools is forced.  One with a grammar in Lark must be the only one: calls of several
        are JSON, which has no such grammar."""
        if not tools and self.left_out:
            reason = "tool_choice demands a call, and only OpenAI's servers run the tools"
            raise invalid(f"{self.left_out[0]}.type", f"is not supported by this server: {reason}", code="unsupported")
        constrained = [tool for tool in tools if tool.lark is not None]
        if constrained and len(tools) > 1:
            reason = "a call is demanded, and a Lark grammar can be kept to only if tool_choice names this tool"
            raise invalid(f"{constrained[0].field}.format", f"is not supported here: {reason}", code="unsupported")
        if constrained:
            return self._raw(functions, chat_name(tools[0].name, tools[0].namespace))
        return ChatTools(functions, choice)

    def _raw(self, functions: list[dict[str, Any]] | None, name: str) -> ChatTools:
        """The answer is the input of a custom tool with a grammar."""
        tool = self.served[name]
        self.grammar_field = f"{tool.field}.format.definition"
        return ChatTools(functions, "none", name, tool.lark)

    def _allowed(self, functions: list[dict[str, Any]] | None, choice: dict[str, Any]) -> ChatTools:
        """A choice among some of the tools; tools that only OpenAI's servers run are left out of it."""
        mode, entries, names = choice.get("mode"), choice.get("tools"), list[str]()
        if mode not in ("auto", "required"):
            raise invalid("tool_choice.mode", "must be 'auto' or 'required'")
        if not isinstance(entries, list) or not entries:
            raise invalid("tool_choice.tools", "must be a list of tools that is not empty")
        for i, entry in enumerate(entries):
            field = f"tool_choice.tools[{i}]"
            if not isinstance(entry, dict):
                raise invalid(field, "must be an object")
            if entry.get("type") == "namespace":
                inside = [name for name, tool in self.served.items() if tool.namespace == entry.get("name")]
                if not inside:
                    raise _not_a_tool(f"{field}.name", entry)
                names += inside
            elif (name := self._chosen(field, entry)) is not None:
                names.append(name)
            else:
                note_left_out(f"tools of type {hosted_kind(entry['type'])}")
        if not names and mode == "required":
            reason = "tool_choice demands a call, and only OpenAI's servers run these tools"
            raise invalid("tool_choice.tools", f"is not supported by this server: {reason}", code="unsupported")
        if not names:
            return ChatTools(functions, "none")
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}
        chat_choice = {"type": "allowed_tools", "allowed_tools": allowed}
        if mode == "required":
            return self._required(functions, self._functions_named(list(dict.fromkeys(names))), chat_choice)
        return ChatTools(functions, chat_choice)

    def _chosen(self, field: str, choice: dict[str, Any]) -> str | None:
        """The name in the chat of the tool that a choice at `field` refers to; None: only OpenAI's servers run it."""
        kind = choice.get("type")
        if kind in ("function", "custom"):
            name, namespace = _name(field, choice), choice.get("namespace")
            if not isinstance(namespace, str | None):
                raise invalid(f"{field}.namespace", "must be a string")
            same = [
                shown
                for shown, tool in self.served.items()
                if (tool.kind, tool.name) == (kind, name) and namespace in (None, tool.namespace)
            ]
            if not same:
                raise _not_a_tool(field if field == "tool_choice" else f"{field}.name", choice)
            if len(same) > 1 and name not in same:
                raise invalid(f"{field}.namespace", "is required: several namespaces have a tool of this name")
            return name if name in same else same[0]
        if isinstance(kind, str) and kind in self.served and self.served[kind].kind == kind:
            return kind
        if hosted_kind(kind) is not None or (kind == "shell" and self.left_out):
            return None
        if kind in CLIENT_TOOLS:
            raise _not_a_tool(field if field == "tool_choice" else f"{field}.type", {"name": kind})
        if field != "tool_choice" or not isinstance(kind, str):
            raise invalid(f"{field}.type", "must be the type of a tool")
        raise invalid(
            field,
            f"of type {kind[:LONGEST_SHOWN]!r} is not supported by this server: send none, auto, required, "
            "allowed_tools, or name one tool",
            code="unsupported",
        )


def _not_a_tool(field: str, choice: Mapping[str, Any]) -> RequestError:
    name = str(choice.get("name"))[:LONGEST_SHOWN]
    return RequestError(f"{field}: {name!r} is not one of the tools", field=field)


def _name(field: str, tool: dict[str, Any]) -> str:
    name = tool.get("name")
    if name is None and isinstance(tool.get("function"), dict):
        raise invalid(
            f"{field}.name", 'is required: name, description and parameters are beside "type" here, not nested'
        )
    if not isinstance(name, str) or not name:
        raise invalid(f"{field}.name", "must be a string that is not empty")
    return name


def _custom_function(field: str, tool: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The function of one string that stands for a custom tool, and the Lark grammar of that string."""
    description = tool.get("description") or ""
    if not isinstance(description, str):
        raise invalid(f"{field}.description", "must be a string")
    text, lark = ANY_TEXT, None
    form = tool.get("format")
    if form is not None:
        syntax, definition = _custom_format(f"{field}.format", form)
        if syntax == "regex":
            text = ANY_TEXT | {"pattern": f"^(?:{definition})$"}
        elif syntax == "lark":
            lark = definition
            description += f"\n\n{INPUT} must be a sentence of this Lark grammar:\n{definition}"
    return {"description": description.strip(), "parameters": _object({INPUT: text}, INPUT)}, lark


def _custom_format(field: str, form: Any) -> tuple[str, str]:
    """The syntax of a custom tool's format, "text", "regex" or "lark", and its definition."""
    if not isinstance(form, dict):
        raise invalid(field, "must be an object")
    kind = form.get("type")
    if kind == "text":
        return "text", ""
    if kind != "grammar":
        raise invalid(f"{field}.type", "must be 'text' or 'grammar'")
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex"):
        raise invalid(f"{field}.syntax", "must be 'lark' or 'regex'")
    if not isinstance(definition, str) or not definition:
        raise invalid(f"{field}.definition", "must be a string that is not empty")
    return syntax, definition
