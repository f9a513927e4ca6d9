"""The text of a token at its place among others: characters whose bytes are divided among tokens are the last one's."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Self

LOOKBACK = 4  # tokens before one that can hold the beginning of its first character


class TokenTexts:
    """`pieces`: the bytes that tokens add to a text, by id.

    A token that ends within a character has the text before it, and the token that completes the character has all of
    it, as vLLM's `decoded_token`: one after the other, the texts of tokens are the text.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces

    def after(self, before: Sequence[int]) -> Callable[[int], str]:
        """Names tokens by their texts after these, of which the last few count."""
        rest = self._incomplete(before[-LOOKBACK:])

        def text(token: int) -> str:
            piece = self._pieces[token]
            joined = rest + piece if rest and piece and piece[0] & 0xC0 == 0x80 else piece
            return codecs.utf_8_decode(joined, "replace", False)[0]

        return text

    def only(self, tokens: Sequence[int]) -> Self:
        """The same for these tokens, without the tokenizer."""
        return type(self)({token: self._pieces[token] for token in tokens})

    def _incomplete(self, before: Sequence[int]) -> bytes:
        """The bytes of a character that ends later."""
        if not before or not (last := self._pieces[before[-1]]) or last[-1] < 0x80:
            return b""
        joined = b"".join(self._pieces[token] for token in before)
        return joined[codecs.utf_8_decode(joined, "replace", False)[1] :]
