"""Texts of grammars in llguidance's dialect of Lark: literals, tokens, embedded schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokserve.protocol import jsonschema
from tokserve.protocol.params import StructuredOutputs
from tokserve.text.tokenizer import Tokenizer

SPACES = r"\x20?"  # between the parts of a forced call: more would let a weak model write spaces without end
ONE_SPACE = {"whitespace_pattern": SPACES}
ANY_TEXT = r"/(.|\n)*/"
_TAG = re.compile(r"(<[^<>]*>)")


def grammar_of(rules: Mapping[str, str]) -> StructuredOutputs:
    """The grammar with these rules, of which "start" is one."""
    return StructuredOutputs(grammar="\n".join(f"{name}: {rule}" for name, rule in rules.items()))


def literal(text: str) -> str:
    """The text, as a grammar writes one."""
    return json.dumps(text).replace("\x7f", r"\u007f")


def token_ranges(ids: Iterable[int]) -> str:
    """Token ids as ranges in Lark's brackets."""
    ranges: list[list[int]] = []
    for token in sorted(ids):
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return ",".join(f"{first}-{last}" for first, last in ranges)


def added_token(text: str, tokenizer: Tokenizer) -> int | None:
    """The added token that is this text, if there is one: the text of a grammar never matches it."""
    token = tokenizer.id_of(text)
    return token if token in tokenizer.added_ids else None


def spelled(text: str, tokenizer: Tokenizer) -> str:
    """The text as a grammar writes it: tags that are added tokens as these, the rest as literals."""
    whole = added_token(text, tokenizer)
    if whole is not None:
        return f"<[{whole}]>"
    parts: list[str | int] = []
    for piece in filter(None, _TAG.split(text)):
        token = added_token(piece, tokenizer)
        if token is not None:
            parts.append(token)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += piece
        else:
            parts.append(piece)
    return " ".join(literal(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)


def up_to(mark: str, tokenizer: Tokenizer, name: str) -> tuple[str, dict[str, str]]:
    """What matches any text up to the first `mark`, and the rules that it needs, one of which may have this `name`."""
    token = added_token(mark, tokenizer)
    if token is not None:
        return f"TEXT <[{token}]>", {"TEXT": ANY_TEXT}
    return name, {f"{name}[lazy]": rf"/(.|\n)*{in_regex(mark)}/"}


def in_regex(text: str) -> str:
    """The text in a regex between slashes."""
    return re.escape(text).replace("/", r"\/")


def embedded(schema: dict[str, Any], white: dict[str, Any]) -> str:
    """A schema inside a grammar; character classes of its patterns mean the same as in `StructuredOutputs`.  `white`:
    llguidance's options for the white space between the parts of JSON."""
    text = json.dumps(schema | {"x-guidance": white}, ensure_ascii=False)
    if '"pattern' in text:
        copy = json.loads(text)
        jsonschema.spell_classes(copy, unicode=False)
        text = json.dumps(copy, ensure_ascii=False)
    return f"%json {text}"
