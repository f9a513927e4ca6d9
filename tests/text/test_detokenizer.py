"""Detokenizer: joined deltas continue a text as a full decode does, and stops do not depend on how ids were cut into
pushes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from tests.text.checkpoints import KINDS
from tokserve.text.detokenizer import Detokenizer, StopHit
from tokserve.text.tokenizer import Tokenizer

TOKENIZERS = {name: Tokenizer(Backend.from_str(make())) for name, make in KINDS.items()}
BYTES = TOKENIZERS["byte_level"]
OF_BYTE = {piece[0]: token for token in range(BYTES.vocab_size) if len(piece := BYTES.token_bytes(token)) == 1}
IDS = st.lists(st.integers(0, 440), max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=6)


def portions(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def run(detokenizer: Detokenizer, parts: list[list[int]]) -> tuple[list[str], StopHit | None]:
    """All deltas, that of the end last, and the hit."""
    deltas, actual = [], None
    for part in parts:
        text, hit = detokenizer.push(part)
        deltas.append(text)
        actual = actual or hit
    text, hit = detokenizer.push((), True)
    return [*deltas, text], actual or hit


@pytest.mark.some(6)
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(derandomize=True, max_examples=30, deadline=None)
@given(ids=IDS, cuts=CUTS)
def test_joined_deltas_equal_the_full_continuation(name: str, skip: bool, ids: list[int], cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [token % (tokenizer.vocab_size + 2) for token in ids]
    full = tokenizer.continuation(ids, skip)
    deltas, _ = run(Detokenizer(tokenizer, skip_special=skip), portions(ids, cuts))
    assert "".join(deltas) == full
    deltas, _ = run(Detokenizer(tokenizer, ["no such text"], skip_special=skip), portions(ids, cuts))
    assert "".join(deltas) == full


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_output_continues_its_prompt(name: str) -> None:
    """Prompt and output are the text of all their ids, though a decoder strips or adds a space at its beginning."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the win the win", False)
    for cut in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if not prompt:
            continue
        deltas, _ = run(Detokenizer(tokenizer), [[token] for token in ids[cut:]])
        assert prompt + "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "metaspace", "word_piece"])
@pytest.mark.parametrize("include", [True, False])
@settings(derandomize=True, max_examples=30, deadline=None)
@given(data=st.data(), ids=IDS, cuts=CUTS, min_tokens=st.integers(0, 8))
def test_stops_do_not_depend_on_the_cutting(
    name: str, include: bool, data: st.DataObject, ids: list[int], cuts: list[int], min_tokens: int
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [token % (tokenizer.vocab_size + 2) for token in ids]
    text = tokenizer.continuation(ids, True)
    pieces = [text[i : i + n] for i in range(len(text)) for n in (1, 2, 4)] + ["aa", "never"]
    stop = data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=3))
    results = []
    for parts in (portions(ids, cuts), [ids], [[token] for token in ids]):
        detokenizer = Detokenizer(tokenizer, stop, include_stop=include, min_tokens=min_tokens)
        deltas, hit = run(detokenizer, parts)
        results.append(("".join(deltas), hit))
    assert results[0] == results[1] == results[2]
    joined, hit = results[0]
    assert text.startswith(joined)
    if hit is None:
        assert joined == text
        assert min_tokens or not any(s in text for s in stop)
    else:
        assert hit.index >= min(min_tokens, len(ids) - 1) and hit.text in stop
        at = len(joined) - (len(hit.text) if include else 0)
        assert text.startswith(hit.text, at)
    if not min_tokens and hit:
        ends = [text.find(s) + len(s) for s in stop if s in text]
        assert len(joined) == min(ends) - (0 if include else len(hit.text))


def test_half_a_character_is_never_emitted() -> None:
    ids = BYTES.encode("漢🙂", False)
    assert len(ids) > 2
    deltas, _ = run(Detokenizer(BYTES), [[token] for token in ids])
    assert "".join(deltas) == "漢🙂" and all("\ufffd" not in delta for delta in deltas)


def test_invalid_utf8_is_replaced_once_it_is_certain() -> None:
    first = BYTES.encode("漢", False)[0]
    space = BYTES.encode(" ", False)[0]
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([first]) == ("", None)
    assert detokenizer.push([space]) == ("\ufffd ", None)
    assert detokenizer.push([first]) == ("", None)
    assert detokenizer.push((), True) == ("\ufffd", None)


def test_a_possible_stop_is_held_and_released() -> None:
    ids = [BYTES.encode(char, False)[0] for char in "a##b##!c"]
    detokenizer = Detokenizer(BYTES, ["##!"])
    deltas = [detokenizer.push([token]) for token in ids]
    assert [text for text, _ in deltas] == ["a", "", "", "##b", "", "", "", ""]
    assert deltas[6][1] == StopHit("##!", 6) and detokenizer.hit == StopHit("##!", 6)
    assert detokenizer.push((), True) == ("", None)


@pytest.mark.parametrize(
    ("stop", "actual"),
    [
        (["cd", "b"], "b"),  # ends first
        (["abcd", "cd"], "abcd"),  # ends with the other, begins earlier
        (["bcd", "c"], "c"),
        (["x", "d"], "d"),
    ],
)
def test_the_match_that_ends_first_wins(stop: list[str], actual: str) -> None:
    ids = [BYTES.encode(char, False)[0] for char in "abcde"]
    for parts in ([ids], [[token] for token in ids]):
        deltas, hit = run(Detokenizer(BYTES, stop), parts)
        assert hit is not None and hit.text == actual
        assert "".join(deltas) == "abcde"[: "abcde".index(actual)]
        assert hit.index == "abcde".index(actual) + len(actual) - 1


def test_stop_inside_one_token_cuts_the_text_not_the_token() -> None:
    token = next(i for i in range(BYTES.vocab_size) if len(BYTES.token(i)) >= 4 and i not in BYTES.special_ids)
    word = BYTES.token(token)
    for include, text in ((False, word[:1]), (True, word[:2])):
        assert Detokenizer(BYTES, [word[1]], include_stop=include).push([token, token]) == (text, StopHit(word[1], 0))


def test_stop_strings_across_special_tokens_and_min_tokens() -> None:
    a, end, b = BYTES.encode("a<|im_end|>b", False)
    assert Detokenizer(BYTES, ["ab"]).push([a, end, b]) == ("", StopHit("ab", 2))
    assert Detokenizer(BYTES, ["ab"], skip_special=False).push([a, end, b, a])[1] is None
    assert Detokenizer(BYTES, ["a"], min_tokens=2).push([a, b, b, a]) == ("abb", StopHit("a", 3))


def test_special_tokens_in_a_row_without_spaces() -> None:
    tokenizer = TOKENIZERS["word_piece"]
    sep, hello = tokenizer.id_of("[SEP]") or 0, tokenizer.id_of("hello") or 0
    ids = [hello, sep, sep, hello]
    with_spaces, _ = run(Detokenizer(tokenizer, skip_special=False), [ids])
    without, _ = run(Detokenizer(tokenizer, skip_special=False, spaces_between_special=False), [[i] for i in ids])
    assert "".join(with_spaces) == tokenizer.continuation(ids, False) == " hello [SEP] [SEP] hello"
    assert "".join(without) == " hello [SEP][SEP] hello"


def test_cost_does_not_grow_with_the_length() -> None:
    """The state a stream keeps is bounded: nothing of the output's past is decoded again."""
    for name in ("byte_level", "llama2", "gemma"):
        tokenizer = TOKENIZERS[name]
        decoded = 0
        counted = Tokenizer(Backend.from_str(KINDS[name]()))

        def decode(ids: list[int], skip_special_tokens: bool = True, tokenizer: Tokenizer = tokenizer) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

        counted.decode = decode  # type: ignore[method-assign, assignment]
        ids = tokenizer.encode("the win and a wing 漢 é \u200b" * 100, False)
        detokenizer = Detokenizer(counted, ["never"])
        joined = "".join(detokenizer.push([token])[0] for token in ids) + detokenizer.push((), True)[0]
        assert joined == tokenizer.continuation(ids)
        assert decoded <= 10 * len(ids)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.binary(max_size=12), st.integers(1, 4))
def test_any_bytes_read_as_a_full_decode(raw: bytes, step: int) -> None:
    ids = [OF_BYTE[byte] for byte in raw]
    deltas, _ = run(Detokenizer(BYTES), [ids[i : i + step] for i in range(0, len(ids), step)])
    assert "".join(deltas) == BYTES.decode(ids) == raw.decode("utf-8", "replace")


def test_a_decoder_of_unknown_kind_waits_for_the_end_of_a_character() -> None:
    """It decodes bytes, but not only that; what never becomes a character is not waited for without end."""
    backend = Backend.from_str(KINDS["byte_level"]())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("quick", "slow")])
    tokenizer = Tokenizer(backend)
    assert not tokenizer.is_byte_level and not tokenizer.byte_ids
    text = "the 漢🙂 quick 🚀"
    deltas, _ = run(Detokenizer(tokenizer), [[token] for token in tokenizer.encode(text)])
    assert "".join(deltas) == text.replace("quick", "slow") and not any("\ufffd" in delta for delta in deltas)
    endless = Detokenizer(tokenizer)
    deltas = [endless.push([OF_BYTE[0xFF]])[0] for _ in range(40)]
    assert "" in deltas and len("".join(deltas)) >= 17
    assert "".join(deltas) + endless.push((), final=True)[0] == "\ufffd" * 40
