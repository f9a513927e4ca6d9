"""Grammars in EBNF allow the texts that llama.cpp and xgrammar read them to allow."""

from __future__ import annotations

import pytest

from tests.engine.test_grammar import compiler
from tests.engine.test_schema_values import accepts
from tokserve.protocol.params import StructuredOutputs

CASES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a"\n  | "b"\n  "c" # c |\n | "d"\nx ::= "y"\n', ["a", "bc", "d"], ["b", "y", "ad"]),
    ('root ::= ("ab"{2})? "c"', ["c", "ababc"], ["abc", "abababc", "ab"]),
    ('root ::= (("a"?){2} "-")+', ["-", "a-", "aa-a-"], ["", "aaa-"]),
    ("root ::= ([0-9]{3})*", ["", "123", "123456"], ["12", "1234"]),
    ('root ::= (x*)? "."\nx ::= "(" root ")"', [".", "(.).", "(.)(.)."], ["", "()."]),
    ('root ::= start\nstart ::= "s" | "t" start', ["s", "ts", "tts"], ["t", ""]),
    ('root ::= a-b a_b A-B\na-b ::= "1"\na_b ::= "2"\nA-B ::= "3"', ["123"], ["111", "222", "122"]),
    ('root ::= fooBar foo_bar foo-Bar\nfooBar ::= "1"\nfoo_bar ::= "2"\nfoo-Bar ::= "3"', ["123"], ["111", "222"]),
    ('root ::= "a" | start\nstart ::= "b"\nstart-2 ::= "c"', ["a", "b"], ["c"]),
    (r'root ::= "\x41\u0042\U00000043\u005c" [\u0030-\x32] "\"#" [#\]]', ['ABC\\1"##', 'ABC\\0"#]'], ['ABC\\3"##']),
    (r'root ::= "\u00e9\U000000e8" [\u00e0-\u00e2]', ["éèà", "éèá"], ["éèã", "eea"]),
    (r'root ::= "\\u0041" "\n"', ["\\u0041\n"], ["A\n"]),
]


@pytest.mark.parametrize(("grammar", "texts", "others"), CASES, ids=[grammar for grammar, *_ in CASES])
def test_a_grammar_in_ebnf_has_its_texts(grammar: str, texts: list[str], others: list[str]) -> None:
    outputs = StructuredOutputs(grammar=grammar)
    outputs.validate()
    compiled = compiler().compile(outputs.plain())
    for text in texts + others:
        assert accepts(compiled, text) == (text in texts), text
