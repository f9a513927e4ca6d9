"""Texts of tokens at their places: joined they are the text, whatever characters are divided among them (A27)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from tests.text.checkpoints import KINDS
from tokserve.text.token_texts import TokenTexts
from tokserve.text.tokenizer import Tokenizer

SMILE = "\N{GRINNING FACE}".encode()
BYTES = TokenTexts(
    {byte: bytes([byte]) for byte in range(256)} | {300: b"a" + SMILE[:2], 301: SMILE[2:] + b"b", 302: b"<end>"}
)
TOKENIZERS = {name: Tokenizer(Backend.from_str(make())) for name, make in KINDS.items()}


def texts(tokens: list[int]) -> list[str]:
    return [BYTES.after(tokens[:place])(token) for place, token in enumerate(tokens)]


def test_a_character_is_the_text_of_its_last_token() -> None:
    assert texts([*SMILE]) == ["", "", "", SMILE.decode()]
    assert texts([300, 301]) == ["a", SMILE.decode() + "b"]
    assert texts([65, *"é".encode(), 66]) == ["A", "", "é", "B"]


def test_alternatives_are_named_by_what_they_would_add() -> None:
    name = BYTES.after([*SMILE[:3]])
    assert (name(SMILE[3]), name(66), name(302), name(SMILE[0])) == (SMILE.decode(), "B", "<end>", "")


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert texts([0x80, 65]) == ["\ufffd", "A"] and texts([SMILE[0], 65]) == ["", "A"]


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30))
def test_joined_they_are_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    names = [tokenizer.token_texts.after(tokens[:place])(token) for place, token in enumerate(tokens)]
    pieces = tokenizer.pieces(skip_special_tokens=False)
    assert "".join(names) == b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")


def test_they_survive_without_the_tokenizer() -> None:
    small = BYTES.only([*SMILE])
    assert small.after([*SMILE[:3]])(SMILE[3]) == SMILE.decode()
