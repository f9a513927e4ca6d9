"""Grammars in EBNF as llama.cpp (GBNF), SGLang and xgrammar write it (`root ::= ...`), as Lark."""

from __future__ import annotations

import re

HEADER = "%llguidance {}"  # that the library writes first; a grammar within another has none
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class EbnfError(ValueError):
    """The grammar cannot be read; the text says where."""


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is EBNF and not Lark, whose rules begin with a name and one colon."""
    return _RULE.search(grammar) is not None


def as_lark(grammar: str) -> str:
    """The grammar in llguidance's dialect of Lark.  Raises EbnfError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(grammar).removeprefix(HEADER).lstrip()
    except RecursionError:
        raise EbnfError("is nested too deeply") from None
    except Exception as error:  # the library raises nothing more exact
        raise EbnfError(f"cannot be read as EBNF: {error}") from None
    return lark
