"""Grammars in EBNF as llama.cpp (GBNF), SGLang and xgrammar write it (`root ::= ...`), as Lark.

llguidance converts them, after they are written so that it can: it reads a rule from one line, needs names that differ
in more than case and dashes, drops the parentheses around a part that is repeated within another repetition, and the
zeros of escapes, and needs quadratic time for rules that come before those that they name.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

HEADER = "%llguidance {}"  # that the library writes first; a grammar within another has none
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z))|(?P<comment>\#[^\n]*)|(?P<space>\s+)
    |(?P<rule>[\w-]+)(?=\s*::=)|(?P<name>[\w-]+)|(?P<repeat>[*+?]|\{[^}]*(?:\}|\Z))|(?P<other>::=|.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


class EbnfError(ValueError):
    """The grammar cannot be read; the text says where."""


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is EBNF and not Lark, whose rules begin with a name and one colon."""
    return _RULE.search(grammar) is not None


@lru_cache(maxsize=8)  # a request is validated first, and converted again
def as_lark(grammar: str) -> str:
    """The grammar in llguidance's dialect of Lark.  Raises EbnfError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(_rewritten(grammar)).removeprefix(HEADER).lstrip()
    except RecursionError:
        raise EbnfError("is nested too deeply") from None
    except Exception as error:  # the library raises nothing more exact
        raise EbnfError(f"cannot be read as EBNF: {error}") from None
    return lark


def _rewritten(grammar: str) -> str:
    """The same grammar: a line for each rule, after those that it names, names that cannot be confused, no comments."""
    tokens = [(str(token.lastgroup), token[0]) for token in _TOKEN.finditer(grammar)]
    lines: list[list[tuple[str, str]]] = [[]]
    for token in tokens:
        if token[0] == "rule":
            lines.append([])
        if token[0] not in ("comment", "space"):
            lines[-1].append(token)
    names = _distinct(line[0][1] for line in lines[1:])
    lines[1:] = _in_order(lines[1:])
    return "\n".join(_line(line, names) for line in lines)


def _line(tokens: list[tuple[str, str]], names: dict[str, str]) -> str:
    """A rule with these names."""
    written: list[str] = []
    repeats = False  # what is written ends with a repetition, perhaps in parentheses
    for index, (kind, text) in enumerate(tokens):
        if text == ")" and kind == "other" and repeats and tokens[index + 1 : index + 2]:
            repeats = tokens[index + 1][0] != "repeat"
            written.append(")" if repeats else '"")')  # a sequence keeps its parentheses
        else:
            repeats = kind == "repeat" or (repeats and text == ")" and kind == "other")
            written.append(_ESCAPE.sub(_unescaped, text) if kind == "text" else names.get(text, text))
    return " ".join(written)


def _in_order(lines: list[list[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
    """The rules, each after those that it names: the library goes through all rules again for each that comes before
    one of these, in the front end's event loop."""
    named = {line[0][1]: [text for kind, text in line[1:] if kind == "name"] for line in lines}
    order: dict[str, int] = {}
    entered: set[str] = set()
    pending = [(name, False) for name in reversed(named)]
    while pending:
        name, left = pending.pop()
        if left:
            order[name] = len(order)
        elif name in named and name not in entered:
            entered.add(name)
            pending.append((name, True))
            pending += [(inner, False) for inner in named[name]]
    return sorted(lines, key=lambda line: order[line[0][1]])


def _unescaped(escape: re.Match[str]) -> str:
    """The character of a numeric escape, or an escape of two digits where it might be read as a sign."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    number = int(digits, 16)
    if number < 128:
        return chr(number) if chr(number).isalnum() else f"\\x{number:02x}"
    return chr(number) if number < sys.maxunicode and chr(number).isprintable() else escape[0]


def _distinct(rules: Iterator[str]) -> dict[str, str]:
    """New names for rules whose own, as the library writes it, is another's or `start`, which it calls the root."""
    names: dict[str, str] = {}
    numbers: Counter[str] = Counter()  # by what rules have in common: the last one tried
    taken = {"start"}
    for rule in dict.fromkeys(rules):
        name, common = rule, _common(rule)
        while _common(name) in taken:
            numbers[common] += 1
            name = f"{rule}_{numbers[common]}"
        names[rule] = name
        taken.add(_common(name))
    return names


def _common(name: str) -> str:
    """What the library takes the name for, but for the case."""
    return re.sub("([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
