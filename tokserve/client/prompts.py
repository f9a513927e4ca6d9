"""What a prompt may be in Python: text, token ids, or vLLM's mappings of either, and nothing else by mistake.

A mapping is itself a sequence of its keys, so it must be known before anything iterates over it.  HTTP has its own
schemas; nothing here is for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokserve.errors import RequestError
from tokserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


class Asked(NamedTuple):
    """A prompt as ids, with the text it was given as (None: it was ids) and the cache's namespace ("": none)."""

    ids: Sequence[int]
    text: str | None = None
    cache_salt: str = ""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    is_one = bool(several) and isinstance(several[0], int | np.integer)
    return [several] if is_one else several


def read(prompt: Prompt, tokenizer: Tokenizer | None) -> Asked:
    """The prompt's ids.  Raises RequestError for a form or a key that is not known, and for text without a tokenizer.

    A mapping may have both forms, as vLLM's: the ids are then what is asked for, and the text what is told again.
    """
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, tokenizer)
    return Asked(_encode(prompt, tokenizer), prompt) if isinstance(prompt, str) else Asked(prompt)


def _from_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> Asked:
    given = {key: value for key, value in prompt.items() if value is not None and value != {}}
    text, ids, salt = given.pop("prompt", None), given.pop("prompt_token_ids", None), given.pop("cache_salt", "")
    if given:
        raise RequestError(f"a prompt has no {next(iter(given))!r} here: it is {FORMS}", field="prompts")
    if not isinstance(text, str | None) or (text is None and ids is None) or not isinstance(salt, str):
        raise RequestError(f"a prompt is {FORMS}", field="prompts")
    return Asked(_encode(text, tokenizer) if ids is None and text is not None else ids, text, salt)


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise RequestError("text prompts need a tokenizer, and this LLM was made with tokens_only", field="prompts")
    return tokenizer.encode(text)
