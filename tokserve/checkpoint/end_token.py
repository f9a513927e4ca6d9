"""The token that the tokenizer's files say ends a text, without the tokenizer.

Checkpoints that were trained to chat often name it there alone: their config.json still has that of the base model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tokserve.base.errors import StartError
from tokserve.checkpoint import read_json

_ADDED = re.compile(r'"added_tokens"\s*:\s*')


def end_token_id(directory: Path) -> int | None:
    """The id of the `eos_token` of a checkpoint's tokenizer; None: its files name none, or cannot be read."""
    try:
        config = read_json(directory, "tokenizer_config.json") or {}
        spelled = _text(config.get("eos_token"))
        if spelled is None and "added_tokens_decoder" not in config:
            spelled = _text((read_json(directory, "special_tokens_map.json") or {}).get("eos_token"))
        if spelled is None:
            return None
        known = (id_ for id_, token in _config_tokens(config) if _text(token) == spelled)
        added = (id_ for id_, token in _added_tokens(directory) if _text(token) == spelled)
        return next(chain(known, added), None)
    except (StartError, OSError, ValueError):  # the tokenizer's own reader reports it
        return None


def _text(token: Any) -> str | None:
    """The text of a token, which may be an object with a content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _config_tokens(config: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """The tokens of tokenizer_config.json by id."""
    tokens = config.get("added_tokens_decoder")
    for number, token in tokens.items() if isinstance(tokens, dict) else ():
        yield int(number), token


def _added_tokens(directory: Path) -> Iterator[tuple[int, Any]]:
    """The added tokens of tokenizer.json by id; the vocabulary behind them, of megabytes, is not parsed."""
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    if (match := _ADDED.search(text)) is None:
        return
    tokens, _ = json.JSONDecoder().raw_decode(text, match.end())
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int:
            yield token["id"], token
