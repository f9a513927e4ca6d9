"""Grammars in EBNF, as llama.cpp and SGLang write them, become Lark (serving-faults F6)."""

from __future__ import annotations

import pytest
from llguidance.gbnf_to_lark import RuleRefNode

from tokserve.base.errors import RequestError
from tokserve.protocol.ebnf import EbnfError, as_lark, is_ebnf
from tokserve.protocol.params import StructuredOutputs

OBJECT = 'root ::= "{" pair ("," pair)* "}"\npair ::= [a-z]+ ":" number # a comment\nnumber ::= [0-9]{1,3}\n'


@pytest.mark.parametrize("grammar", ['root ::= "a"', OBJECT, '\n  root-rule ::= "a"', '# a comment\nroot::="a"'])
def test_ebnf_is_told_by_its_sign(grammar: str) -> None:
    assert is_ebnf(grammar)


@pytest.mark.parametrize("grammar", ['start: "a"', 'start: "x ::= y"', "start: /a ::= b/", "", 'start: b\nb: "::="'])
def test_lark_is_no_ebnf(grammar: str) -> None:
    assert not is_ebnf(grammar)
    assert StructuredOutputs(grammar=grammar).plain().grammar == grammar


def test_it_is_compiled_as_lark() -> None:
    plain = StructuredOutputs(grammar=OBJECT).plain().grammar
    assert plain is not None and plain == as_lark(OBJECT) and "start:" in plain and "::=" not in plain


@pytest.mark.parametrize("grammar", ['root ::= ( "a"', "root ::= missing", 'other ::= "a"', "root ::= " + "(" * 5000])
def test_what_cannot_be_read_is_refused_by_the_field(grammar: str) -> None:
    with pytest.raises(EbnfError):
        as_lark(grammar)
    with pytest.raises(RequestError) as caught:
        StructuredOutputs(grammar=grammar).validate()
    assert caught.value.field == "structured_outputs.grammar"


@pytest.mark.parametrize("sign", ['"', "[", "{", "(", "a ::= ", "#", '"\\', "[\\", "\\", "\n| ", " ", "a-"])
def test_what_is_not_closed_is_read_once(sign: str) -> None:
    with pytest.raises(EbnfError):  # of quadratic time, some of these would take minutes
        as_lark("root ::= )" + sign * (60_000 // len(sign)))


def test_a_long_chain_of_rules_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules may come in any order: the library goes through all again for each that comes before one that it names."""
    num_visits = 0
    is_terminal = RuleRefNode.is_terminal

    def counting(node: RuleRefNode) -> bool:
        nonlocal num_visits
        num_visits += 1
        return is_terminal(node)

    monkeypatch.setattr(RuleRefNode, "is_terminal", counting)
    rules = [f'a{i} ::= "x" a{i + 1}' for i in range(1000)] + ['a1000 ::= "y"']
    for order in (rules, rules[::-1]):
        num_visits = 0
        assert "A0:" in as_lark("\n".join(["root ::= a0", *order]))
        assert num_visits <= 3000


def test_looking_for_the_sign_takes_no_time() -> None:
    assert not is_ebnf("\n" * 65_000 + " " * 65_000 + "a-" * 30_000)
