"""Documents and search results in Anthropic's blocks, as text and images of the turn that has them.

The texts of a block are joined by empty lines: its title, what else it says of itself, and its content.
"""

from __future__ import annotations

from typing import Any

from tokserve.base.errors import LONGEST_SHOWN, RequestError, invalid
from tokserve.features.images.parts import UnreadImage, anthropic_block

BETWEEN = "\n\n"
ABOUT = {"document": ("title", "context"), "search_result": ("title", "source")}  # texts that stand before the content
UNREAD = "no PDF, URL or file is read here; send its text"


def parts_of(path: str, block: dict[str, Any]) -> list[dict[str, str] | UnreadImage]:
    """The parts of the block at `path`.  Raises RequestError."""
    kind = block["type"]
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise invalid(f"{path}.citations", "are not supported by this server", code="unsupported")
    texts = []
    for name in ABOUT[kind]:
        value = block.get(name)
        if value is None and (kind == "document"):
            continue
        texts.append(_text(f"{path}.{name}", value))
    parts = _content(f"{path}.content", block.get("content")) if kind == "search_result" else _source(path, block)
    return _joined([*({"type": "text", "text": text} for text in texts), *parts])


def _source(path: str, block: dict[str, Any]) -> list[dict[str, str] | UnreadImage]:
    path += ".source"
    source = block.get("source")
    if not isinstance(source, dict):
        raise _missing(path, source, "an object")
    match source.get("type"):
        case "text":
            return [{"type": "text", "text": _text(f"{path}.data", source.get("data"))}]
        case "content":
            return _content(f"{path}.content", source.get("content"))
        case kind:
            shown = f", got {kind[:LONGEST_SHOWN]!r}" if isinstance(kind, str) else ""
            raise invalid(f"{path}.type", f"must be text or content{shown}: {UNREAD}", code="unsupported")


def _content(path: str, content: Any) -> list[dict[str, str] | UnreadImage]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _missing(path, content, "a string or a list of blocks")
    parts: list[dict[str, str] | UnreadImage] = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        match block:
            case {"type": "text"}:
                parts.append({"type": "text", "text": _text(f"{at}.text", block.get("text"))})
            case {"type": "image"}:
                parts.append(UnreadImage(at, block, anthropic_block))
            case _:
                raise invalid(at, "must be a text or image block", code="unsupported")
    return parts


def _joined(parts: list[dict[str, str] | UnreadImage]) -> list[dict[str, str] | UnreadImage]:
    """The parts, with texts that follow each other as one."""
    joined: list[dict[str, str] | UnreadImage] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, dict) and isinstance(last, dict):
            last["text"] += BETWEEN + part["text"]
        else:
            joined.append(part)
    return joined


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _missing(path, value, "a string")
    return value


def _missing(path: str, value: Any, kind: str) -> RequestError:
    return invalid(path, "is required" if value is None else f"must be {kind}")
