"""The events of a streamed response, checked for their order and put together to the response."""

from __future__ import annotations

from typing import Any

from tests.replies import named_events

ENDS = ("response.completed", "response.incomplete", "response.failed")


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which are numbered."""
    numbered = named_events(text)
    assert [event["sequence_number"] for event in numbered] == list(range(len(numbered)))
    return numbered


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event's response, after a look at the order of all events and at what they add up to."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert event["response"]["status"] == "in_progress" and event["response"]["output"] == []
    assert events[-1]["type"] in ENDS
    rest = iter(events[2:-1])
    items = [item_of(rest, event, place) for place, event in enumerate(iter_added(rest))]
    response: dict[str, Any] = events[-1]["response"]
    assert response["output"] == items and events[-1]["type"] == f"response.{response['status']}"
    return response


def iter_added(rest: Any) -> Any:
    for event in rest:
        assert event["type"] == "response.output_item.added", event
        yield event


def item_of(rest: Any, added: dict[str, Any], place: int) -> dict[str, Any]:
    """One item from its events, up to its last."""
    item: dict[str, Any] = added["item"]
    assert added["output_index"] == place and item["status"] == "in_progress"
    at = {"item_id": item["id"], "output_index": place}
    name, part, key = "function_call_arguments", None, "arguments"
    if item["type"] == "function_call":
        assert item["arguments"] == ""
    elif item["type"] == "custom_tool_call":
        name, key = "custom_tool_call_input", "input"
        assert item["input"] == ""
    elif "action" in item or "operation" in item or "execution" in item:
        return whole_item_of(rest, item, place)
    else:
        event = next(rest)
        part = event["part"]
        name = {"summary_text": "reasoning_summary_text"}.get(part["type"], part["type"])
        place_of, of_part = ("summary", "reasoning_summary_part") if "summary" in name else ("content", "content_part")
        at |= {f"{place_of}_index": 0}
        assert item["content"] == [] and part["text"] == "" and event["type"] == f"response.{of_part}.added"
        assert ("message" if name == "output_text" else "reasoning") == item["type"]
    text, entries = "", []
    for event in rest:
        assert {key: event[key] for key in at} == at and len(event) > 3
        if event["type"] != f"response.{name}.delta":
            break
        text += event["delta"]
        entries += event.get("logprobs", [])
    assert event["type"] == f"response.{name}.done" and event[key if part is None else "text"] == text
    assert event.get("logprobs", []) == entries
    if part is None:
        item[key] = text
        assert key == "input" or event["name"] == item["name"]
    else:
        part |= {"text": text} | ({"logprobs": entries} if name == "output_text" else {})
        item[place_of] = [part]
        event = next(rest)
        assert event["type"] == f"response.{of_part}.done" and event["part"] == part
    event = next(rest)
    assert event["type"] == "response.output_item.done" and event["output_index"] == place
    item |= {name: event["item"][name] for name in ("status", "encrypted_content") if name in event["item"]}
    assert event["item"] == item and item["status"] in ("completed", "incomplete")
    return item


def whole_item_of(rest: Any, item: dict[str, Any], place: int) -> dict[str, Any]:
    """An item that comes whole: only the commands of a shell have events of their own."""
    commands: list[str] = []
    for event in rest:
        assert event["output_index"] == place
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.done":
            break
        assert event["command_index"] == len(commands) - (kind != "shell_call_command.added")
        if kind == "shell_call_command.added":
            assert event["command"] == ""
            commands.append("")
        elif kind == "shell_call_command.delta":
            commands[-1] += event["delta"]
        else:
            assert kind == "shell_call_command.done" and event["command"] == commands[-1]
    assert commands == (item["action"]["commands"] if item["type"] == "shell_call" else [])
    assert event["item"] == item | {"status": "completed"}
    complete: dict[str, Any] = event["item"]
    return complete
