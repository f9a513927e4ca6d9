"""The forms of a prompt in the Python API: text, token ids, or vLLM's mappings of either; all else is refused.

A mapping must be recognised first: iterated over, it is a sequence of its keys.  HTTP has its
own schemas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tokserve.base.errors import RequestError, invalid
from tokserve.features.images.python_images import read_images
from tokserve.protocol.images import ImageUrl
from tokserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
Side = Literal["left", "right"]
NOT_BYTES = "bytes are no prompt: decode them to a text, or give a list of token ids"


class ParsedPrompt(NamedTuple):
    """A prompt as ids, the text if it was given as text, its cache_salt ("": none), what its output may be, its
    images, for each of which the ids have one placeholder, `second` as in `TokenPrompt`, and how many special tokens
    were added before and after the text."""

    ids: Sequence[int]
    text: str | None = None
    cache_salt: str = ""
    draft_token_ids: list[int] | None = None
    images: tuple[ImageUrl, ...] = ()
    second: int = -1
    frame: tuple[int, int] = (0, 0)


class Tokenization(NamedTuple):
    """How texts become ids.  `special`: special tokens are added; None: to texts, not to conversations.  `keep`: so
    many ids are kept (-1: as the context has room for), at the other end than `side` (None: the usual one)."""

    special: bool | None = None
    keep: int | None = None
    side: Side | None = None
    lower: bool = False

    def shorten(self, prompt: ParsedPrompt, context: int, side: Side = "left") -> ParsedPrompt:
        """The prompt without the ids that are not kept; `context`: how many it may have, `side`: the usual one."""
        keep = context if self.keep == -1 else self.keep
        if keep is None:
            return prompt
        if keep > context:
            raise invalid("truncate_prompt_tokens", f"must be at most {context}, the room for a prompt, got {keep}")
        if len(prompt.ids) > keep and prompt.images:
            raise invalid("truncate_prompt_tokens", "cannot cut a prompt with images", code="unsupported")
        ids, second = cut(list(prompt.ids), keep, self.side or side, prompt.frame, prompt.second)
        return prompt._replace(ids=ids, second=second)


AS_USUAL = Tokenization()
MEANINGS: dict[str, tuple[Any, ...]] = {  # of vLLM's names, with the values that are the default
    "padding": (None, False, "do_not_pad"),
    "pad_prompt_tokens": (None,),
    "return_token_offsets": (None, False),
}


def tokenization(values: Mapping[str, Any] | None) -> Tokenization:
    """What vLLM's `tokenization_kwargs` say.  Raises RequestError naming the key."""
    at = "tokenization_kwargs"
    given = dict(values or {})
    keep = given.pop("truncate_prompt_tokens", None)
    side, longest = given.pop("truncation_side", None), given.pop("max_length", None)
    truncation = given.pop("truncation", None)
    special, lower = given.pop("add_special_tokens", None), given.pop("do_lower_case", None)
    given.pop("needs_detokenization", None)
    for name, value in given.items():
        if name not in MEANINGS:
            raise RequestError(f"unknown field '{at}.{name}'", field=f"{at}.{name}", code="unknown_field")
        if value not in MEANINGS[name]:
            raise invalid(f"{at}.{name}", "is not supported: prompts are not padded", code="unsupported")
    if truncation in (True, "longest_first"):
        keep = -1 if longest is None else longest
    elif truncation not in (None, False, "do_not_truncate"):
        raise invalid(f"{at}.truncation", f'must be a boolean, or "longest_first", got {truncation!r}')
    elif truncation is not None:
        keep = None
    if keep is not None and (type(keep) is not int or keep < -1 or keep == 0):
        raise invalid(f"{at}.truncate_prompt_tokens", f"must be -1 or at least 1, got {keep!r}")
    if side not in (None, "left", "right"):
        raise invalid(f"{at}.truncation_side", f"must be left or right, got {side!r}")
    return Tokenization(None if special is None else bool(special), keep, side, bool(lower))


def cut(
    ids: list[int], limit: int, side: Side, frame: tuple[int, int] = (0, 0), second: int = -1
) -> tuple[list[int], int]:
    """Cut the ids to `limit`, at this side of the text; `frame`: special tokens before and after it, which stay; and
    `second`, as in `TokenPrompt`, of what is left."""
    excess = len(ids) - limit
    if excess <= 0:
        return ids, second
    before, after = frame if sum(frame) < limit else (0, 0)
    if side == "right":
        last = len(ids) - after
        return ids[: last - excess] + ids[last:], min(second, last - excess)
    return ids[:before] + ids[before + excess :], second if second < 0 else max(before, second - excess)


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


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, how: Tokenization = AS_USUAL) -> ParsedPrompt:
    """The prompt's ids.  Raises RequestError for an unknown form or key, and for text without a tokenizer.  A mapping
    may hold both, as in vLLM: the ids are then used, and the text is only returned with the output."""
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, tokenizer, how)
    if isinstance(prompt, bytes | bytearray):
        raise RequestError(NOT_BYTES, field="prompts")
    return _of_text(prompt, tokenizer, how) if isinstance(prompt, str) else ParsedPrompt(prompt)


def read_for_generation(
    prompt: Prompt, tokenizer: Tokenizer | None, options: Mapping[str, Any] | None, keep: int | None, context: int
) -> ParsedPrompt:
    """A prompt as vLLM's `generate` takes it.  `options`: its `tokenization_kwargs`; `keep`: how many of the last
    tokens are kept, None: all; `context`: the tokens that there is room for.  Raises RequestError."""
    how = tokenization(options)
    return Tokenization(keep=keep).shorten(how.shorten(read_prompt(prompt, tokenizer, how), context), context)


def _from_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer | None, how: Tokenization) -> ParsedPrompt:
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
    parsed = ParsedPrompt(ids, text) if text is None or ids is not None else _of_text(text, tokenizer, how)
    return parsed._replace(cache_salt=salt, draft_token_ids=drafts, images=images)


def _drafts(ids: Any) -> list[int]:
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(listed, list | tuple) or not all(type(token) is int for token in listed):
        raise RequestError("draft_token_ids must be a list of token ids", field="draft_token_ids")
    return list(listed)


def _of_text(text: str, tokenizer: Tokenizer | None, how: Tokenization) -> ParsedPrompt:
    if tokenizer is None:
        raise RequestError("text prompts need a tokenizer, and this LLM was made with tokens_only", field="prompts")
    special = how.special is not False
    ids = tokenizer.encode(text.lower() if how.lower else text, add_special_tokens=special)
    return ParsedPrompt(ids, text, frame=tokenizer.frame if special else (0, 0))
