"""Texts in a conversation that spell special tokens: encoded as the plain text that they are, or refused.

A chat template writes special tokens as text, so once it has rendered a conversation nothing tells its own from one
that a user or a tool wrote.  Therefore what spells one in a message is replaced before, by a placeholder that templates
pass on as they do words, and the whole text is encoded at once by a copy of the tokenizer that knows special tokens by
secret names only: those of the template get these names, and the placeholders become the texts that they stand for.
All other text is tokenized as ever.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import tokenizers

from tokserve.base.errors import RequestError
from tokserve.text.tokenizer import Tokenizer

Treatment = Literal["allow", "text", "refuse"]
SHOWN = 60  # characters of a token in an error


class SpecialTexts:
    """The texts that are special tokens in a conversation: those that the tokenizer marks or names so, and
    other added tokens that a chat template writes.

    `templates`: the texts of the templates, and samples of what they write.  `thoughts`: markers of reasoning; an
    assistant's content may hold those, which templates look for there.
    """

    def __init__(self, tokenizer: Tokenizer, templates: Iterable[str], thoughts: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        sources = "\n".join(templates)
        named = set(tokenizer.special_tokens.values())
        self.all = frozenset(
            text
            for token in tokenizer.added_ids
            if (text := tokenizer.spelling(token))
            and text.strip()
            and (token in tokenizer.special_ids or text in named or text in sources)
        )
        self._beginnings = {text[:n] for text in self.all for n in range(1, len(text))}
        self._ends = {text[-n:] for text in self.all for n in range(1, len(text))}
        self._first = {text[0] for text in self.all}
        self._last = {text[-1] for text in self.all}
        self._longest = max(map(len, self.all), default=0)
        self.pattern = _any_of(self.all)
        self._answer_pattern = _any_of(self.all.difference(thoughts))

    def in_text(self, text: str, *, answer: bool = False) -> str | None:
        """The first special token that the text spells.  `answer`: it is an assistant's content."""
        match = (self._answer_pattern if answer else self.pattern).search(text)
        return None if match is None else match[0]

    def replaced(self, text: str, name: Callable[[str], str], *, answer: bool = False) -> str:
        """The text with what spells a special token, or could together with another text, given by `name`."""
        text = (self._answer_pattern if answer else self.pattern).sub(lambda match: name(match[0]), text)
        if head := self._head(text):
            text = name(head) + text[len(head) :]
        if tail := self._tail(text):
            text = text[: len(text) - len(tail)] + name(tail)
        return text

    def _tail(self, text: str) -> str:
        """The longest end of the text that begins a special token."""
        for at in range(max(0, len(text) - self._longest), len(text)):
            if text[at] in self._first and text[at:] in self._beginnings:
                return text[at:]
        return ""

    def _head(self, text: str) -> str:
        """The longest beginning of the text that ends a special token."""
        for end in range(min(len(text), self._longest), 0, -1):
            if text[end - 1] in self._last and text[:end] in self._ends:
                return text[:end]
        return ""

    @cached_property
    def encoder(self) -> RenamedTokens:
        """The tokenizer under whose vocabulary the texts are not special tokens."""
        return RenamedTokens(self._tokenizer, self.all)


class HiddenTexts:
    """The placeholders in one conversation."""

    def __init__(self, special: SpecialTexts, treatment: Treatment) -> None:
        self._special = special
        self._treatment = treatment
        self._secret = secrets.token_hex(16)
        self._placeholders: dict[str, str] = {}

    def hide(self, field: str, value: Any) -> Any:
        """A copy of a field's value without special tokens in its texts.  Raises RequestError that names a path in
        `field` if they are refused."""
        if isinstance(value, str):
            return self._hidden(field, value)
        if isinstance(value, Mapping):
            return {
                self._hidden(field, name) if isinstance(name, str) else name: self.hide(f"{field}.{name}", inner)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [self.hide(f"{field}[{index}]", inner) for index, inner in enumerate(value)]
        return value

    def hide_messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages without special tokens in their texts."""
        hidden = []
        for index, message in enumerate(messages):
            field = f"messages[{index}]"
            copy = self.hide(field, {name: value for name, value in message.items() if name != "content"})
            if "content" in message:
                is_answer = message["role"] == "assistant"
                copy["content"] = self._content(f"{field}.content", message["content"], is_answer)
            hidden.append(copy)
        return hidden

    def _content(self, field: str, content: Any, is_answer: bool) -> Any:
        if isinstance(content, str):
            return self._hidden(field, content, is_answer)
        if not isinstance(content, list) or not is_answer:
            return self.hide(field, content)
        return [
            {name: self._hidden(f"{field}[{index}].{name}", text, name == "text") for name, text in part.items()}
            for index, part in enumerate(content)
        ]

    def _hidden(self, field: str, text: str, is_answer: bool = False) -> str:
        if self._treatment == "refuse" and (spelled := self._special.in_text(text, answer=is_answer)):
            raise RequestError(
                f"{field} holds the text {spelled[:SHOWN]!r}, which is a special token of this model; this server "
                "refuses those in contents (--special-tokens-in-content refuse)",
                field=field,
                code="special_token",
            )
        return self._special.replaced(text, self._placeholder, answer=is_answer)

    def _placeholder(self, text: str) -> str:
        return self._placeholders.setdefault(text, f"x{self._secret}n{len(self._placeholders)}x")

    def restored(self, rendered: str) -> str:
        """The rendered text as it is read.  Raises RequestError if contents that are refused together spell a special
        token."""
        restored = self._restored(rendered)
        if self._treatment == "refuse" and self._placeholders:
            pattern = self._special.pattern
            if len(pattern.findall(restored)) > len(pattern.findall(rendered)):
                raise RequestError(
                    "messages: their texts together spell a special token of this model; this server refuses those in "
                    "contents (--special-tokens-in-content refuse)",
                    field="messages",
                    code="special_token",
                )
        return restored

    def encode(self, rendered: str, *, add_special_tokens: bool) -> list[int] | None:
        """Token ids of the rendered text; None: nothing is hidden, so they are the tokenizer's own.  Raises
        RequestError for invalid Unicode."""
        if not self._placeholders:
            return None
        encoder = self._special.encoder
        return encoder.encode(self._restored(encoder.rename(rendered)), add_special_tokens=add_special_tokens)

    def _restored(self, rendered: str) -> str:
        for text, placeholder in reversed(self._placeholders.items()):
            rendered = rendered.replace(placeholder, text)
        return rendered


class RenamedTokens:
    """A copy of a tokenizer in which added tokens have secret names instead of their texts, and the same ids."""

    def __init__(self, tokenizer: Tokenizer, texts: Collection[str]) -> None:
        secret = secrets.token_hex(16)
        self._names = {text: f"x{secret}s{index}x" for index, text in enumerate(sorted(texts))}
        self._pattern = _any_of(texts)
        described = json.loads(tokenizer.described())
        for entry in described["added_tokens"]:
            entry["content"] = self._names.get(entry["content"], entry["content"])
        _rename_model(described["model"], self._names)
        backend = tokenizers.Tokenizer.from_str(json.dumps(described))
        spelled = {name: text for text, name in self._names.items()}
        ids = ((new, spelled.get(entry.content, entry.content)) for new, entry in _added(backend).items())
        self._moved = {new: old for new, text in ids if (old := tokenizer.id_of(text)) is not None and old != new}
        self._tokenizer = Tokenizer(backend)

    def rename(self, text: str) -> str:
        """The text with the secret names of the tokens that it spells."""
        return self._pattern.sub(lambda match: self._names[match[0]], text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text with secret names.  Raises RequestError for invalid Unicode."""
        ids = self._tokenizer.encode(text, add_special_tokens)
        return [self._moved.get(token, token) for token in ids] if self._moved else ids


def _added(backend: tokenizers.Tokenizer) -> dict[int, tokenizers.AddedToken]:
    added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
    return added


def _rename_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename pieces of a vocabulary, where they are; no text becomes one of them then."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"])
        model["merges"] = [
            [left, right] for left, right in pairs if names.keys().isdisjoint((left, right, left + right))
        ]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of these texts at a place."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
