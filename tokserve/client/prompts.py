"""The forms of a prompt in the Python API: text, token ids, or vLLM's mappings of either; all else is refused.

A mapping must be recognised first: iterated over, it is a sequence of its keys.  HTTP has its
own schemas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokserve.client.images import read_images
from tokserve.errors import RequestError
from tokserve.image_parts import ImageUrl
from tokserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
NOT_BYTES = "bytes are no prompt: decode them to a text, or give a list of token ids"


class ParsedPrompt(NamedTuple):
    """A prompt as ids, the text if it was given as text, its cache_salt ("": none), what its output may be, its
    images, for each of which the ids have one placeholder, and `second` as in `TokenPrompt`."""

    ids: Sequence[int]
    text: str | None = None
    cache_salt: str = ""
    draft_token_ids: list[int] | None = None
    images: tuple[ImageUrl, ...] = ()
    second: int = -1


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; an array or a tensor counts as the lists that it stands for."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray):
        raise RequestError(NOT_BYTES, field="prompts")
    if not isinstance(prompts, Iterable):
        raise RequestError(f"a prompt is {FORMS}, got {type(prompts).__name__}", field="prompts")
    several: list[Any] = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    is_one = bool(several) and isinstance(several[0], int | np.integer)
    return [several] if is_one else several


def read(prompt: Prompt, tokenizer: Tokenizer | None) -> ParsedPrompt:
    """The prompt's ids.  Raises RequestError for an unknown form or key, and for text without a tokenizer.  A mapping
    may hold both, as in vLLM: the ids are then used, and the text is only returned with the output."""
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, tokenizer)
    if isinstance(prompt, bytes | bytearray):
        raise RequestError(NOT_BYTES, field="prompts")
    return ParsedPrompt(_encode(prompt, tokenizer), prompt) if isinstance(prompt, str) else ParsedPrompt(prompt)


def _from_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> ParsedPrompt:
    fields = {key: value for key, value in prompt.items() if value is not None and value != {}}
    text, ids, salt = fields.pop("prompt", None), fields.pop("prompt_token_ids", None), fields.pop("cache_salt", "")
    drafts = fields.pop("draft_token_ids", None)
    images = read_images(fields.pop("multi_modal_data", None), fields.pop("multi_modal_uuids", None))
    if fields:
        raise RequestError(f"unknown key {next(iter(fields))!r} in a prompt, which is {FORMS}", field="prompts")
    if not isinstance(text, str | None) or (text is None and ids is None) or not isinstance(salt, str):
        raise RequestError(f"a prompt must be {FORMS}", field="prompts")
    if drafts is not None:
        drafts = _drafts(drafts)
    if ids is None and text is not None:
        ids = _encode(text, tokenizer)
    return ParsedPrompt(ids, text, salt, drafts, images)


def _drafts(ids: Any) -> list[int]:
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(listed, list | tuple) or not all(type(token) is int for token in listed):
        raise RequestError("draft_token_ids must be a list of token ids", field="draft_token_ids")
    return list(listed)


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise RequestError("text prompts need a tokenizer, and this LLM was made with tokens_only", field="prompts")
    return tokenizer.encode(text)
