"""Forms after the reasoning (serving-faults F7): the thought is free, and the answer begins where it ends."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.engine.grammars import Matcher
from tests.tiers import paired
from tokserve.base.errors import RequestError
from tokserve.features.chat.grammars.reasoning import after_reasoning
from tokserve.features.chat.tool_formats import THINKING, named
from tokserve.features.grammar.grammar import Compiler
from tokserve.protocol.params import StructuredOutputs
from tokserve.text.tokenizer import Tokenizer

EOS = 0
QWEN = named(THINKING, "qwen3")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANSWERS: dict[str, tuple[dict[str, Any], str, str]] = {  # the form, a text of it, another text
    "json": ({"json": SCHEMA}, '{"a": 1}', '{"b": 1}'),
    "object": ({"json_object": True}, '{"x": []}', "[]"),
    "regex": ({"regex": r" ?[a-c]/\d"}, "b/1", "b1"),
    "choice": ({"choice": ["yes", "<no>\n"]}, "<no>\n", "maybe"),
    "grammar": ({"grammar": "start: a+\na: /[x-z]/"}, "xyz", "abc"),
}
# how </think> is cut into tokens: one added token, also a special one, letters, or together with what follows
KINDS = ("added", "special", "letters", "shared")


@cache
def backend(kind: str) -> Backend:
    vocab = {"<eos>": EOS, **{char: 1 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}}
    merges: list[tuple[str, str]] = []
    if kind == "shared":  # tokens with both sides of the end
        for pair in (("k", ">"), ("k>", "Ċ"), ("k>Ċ", "Ċ"), ("k>", "{"), ("k>", "y"), ("{", '"')):
            vocab["".join(pair)] = len(vocab)
            merges.append(pair)
    grammar = Backend(models.BPE(vocab=vocab, merges=merges))
    grammar.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    grammar.decoder = decoders.ByteLevel()
    grammar.add_special_tokens(["<eos>"])
    grammar.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    if kind in ("added", "special"):
        marks = [AddedToken(mark, special=kind == "special", normalized=False) for mark in ("<think>", "</think>")]
        grammar.add_tokens(marks)
    return grammar


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiler]:
    compilers = {}
    for kind in KINDS:
        directory: Path = tmp_path_factory.mktemp(kind)
        backend(kind).save(str(directory / "tokenizer.json"))
        compilers[kind] = Compiler(str(directory), backend(kind).get_vocab_size(), [EOS])
    return compilers


def form_of(kind: str, answer: dict[str, Any], *, inside: bool) -> StructuredOutputs:
    form = after_reasoning(StructuredOutputs(**answer), QWEN, Tokenizer(backend(kind)), inside=inside)
    form.validate()
    return form


def takes(compiler: Compiler, kind: str, form: StructuredOutputs, text: str, *, letters: bool = False) -> bool:
    """Whether an output may be this text.  `letters`: its markers are written by other tokens."""
    matcher = Matcher(compiler.compile(form), ends=True)
    tokens = backend(kind).encode(text, add_special_tokens=False).ids
    if letters:
        tokens = backend("letters").encode(text, add_special_tokens=False).ids
    try:
        for token in tokens:
            if not matcher.bits[token // 32] >> np.uint32(token % 32) & 1:
                return False
            matcher.advance(token)
    except RequestError:
        return False
    return bool(matcher.bits[0] & 1)


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "kind"), paired(list(ANSWERS), KINDS))
def test_the_form_begins_after_the_thought(compilers: dict[str, Compiler], kind: str, name: str) -> None:
    answer, right, wrong = ANSWERS[name]
    inside, before = (form_of(kind, answer, inside=inside) for inside in (True, False))

    def taken(text: str, form: StructuredOutputs, **options: Any) -> bool:
        return takes(compilers[kind], kind, form, text, **options)

    thoughts = ["", 'hm {"a": 2}\n<tool_call> is <th 漢字', "a < b </thin </ think>\n"]
    for thought in thoughts:
        for gap in ("", "\n", "\n\n", " "):
            rest = f"{thought}</think>{gap}{right}"
            assert taken(rest, inside)
            assert taken(f"<think>\n{rest}", before) and taken(f"\n<think>{rest}", before)
            assert not taken(f"{thought}</think>{gap}{wrong}", inside)
            assert taken(rest, inside, letters=True) or kind == "shared"
        assert not taken(thought, inside) and not taken(f"{thought}{right}", inside)
    assert taken(right, before) and not taken(right, inside) and not taken(wrong, before)
    assert not taken(f"</think>{right}", before)
    assert not taken(f"a</think>b</think>{right}", inside)  # the first end is the end


@pytest.mark.parametrize("kind", KINDS)
def test_no_special_token_is_in_a_thought(compilers: dict[str, Compiler], kind: str) -> None:
    matcher = Matcher(compilers[kind].compile(form_of(kind, {"json": SCHEMA}, inside=True)), ends=True)
    for token in backend(kind).encode("thinking", add_special_tokens=False).ids:
        assert not matcher.bits[0] & 1 and not matcher.complete
        matcher.advance(token)
    assert not matcher.bits[0] & 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_grammar_writes_has_the_form(compilers: dict[str, Compiler], kind: str) -> None:
    """Random outputs: what comes after the first end of the thought is a sentence of the form."""
    form, letters = form_of(kind, {"choice": ["yes", "no"]}, inside=True), backend("letters")
    for seed in range(10):
        matcher, chance = Matcher(compilers[kind].compile(form), ends=True), random.Random(seed)
        thought = "".join(chance.choice("ab <>/{\n") for _ in range(20))
        tokens = letters.encode(thought).ids + backend(kind).encode("</think>").ids
        for token in tokens:
            assert matcher.bits[token // 32] >> np.uint32(token % 32) & 1
            matcher.advance(token)
        while not matcher.bits[0] & 1 and len(tokens) < 200:
            allowed = np.flatnonzero(np.unpackbits(matcher.bits.view(np.uint8), bitorder="little")).tolist()
            tokens.append(chance.choice(allowed))
            matcher.advance(tokens[-1])
        text = backend(kind).decode(tokens, skip_special_tokens=False)
        assert text.partition("</think>")[2].strip() in ("yes", "no")


def test_a_long_thought_stays_within_the_limits(compilers: dict[str, Compiler]) -> None:
    matcher = Matcher(compilers["added"].compile(form_of("added", {"json": SCHEMA}, inside=True)), ends=True)
    for token in backend("added").encode("some thought, a < b <tool_call> ", add_special_tokens=False).ids * 200:
        matcher.advance(token)
    for token in backend("added").encode('</think>\n{"a": 1}', add_special_tokens=False).ids:
        matcher.advance(token)
    assert matcher.complete or matcher.bits[0] & 1
