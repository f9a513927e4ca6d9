"""Compiles and renders chat templates, in a sandbox that offers what templates for transformers use.

A template may come with a request: what it raises becomes a RequestError.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokserve.base.errors import RequestError

# exceptions that a template may raise
FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    MemoryError,
)


_MARKS: ContextVar[tuple[str, str]] = ContextVar("generation marks", default=("", ""))
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


class _Refusal(jinja2.TemplateError):
    """Raised when the template calls raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for trainers: only its body is rendered, between two marks if
    `render_marked` asks for them."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    @staticmethod
    def _print(caller: Callable[[], str]) -> str:
        begin, end = _MARKS.get()
        return f"{begin}{caller()}{end}"


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


@lru_cache(maxsize=32)
def compiled(source: str) -> jinja2.Template:
    """A template, ready to render.  Raises TemplateSyntaxError."""
    return _ENVIRONMENT.from_string(source)


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads."""
    return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))


def render(source: str, variables: dict[str, Any], field: str) -> str:
    """The template's text.  Raises RequestError naming `field`, or `messages` if the template itself refuses them."""
    try:
        return compiled(source).render(variables)
    except _Refusal as error:
        raise RequestError(f"messages: {error} (raised by the model's chat template)", field="messages") from None
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template is not a valid Jinja template: {error}", field=field) from None
    except FAULTS as error:
        raise RequestError(f"the chat template cannot render these messages: {error}", field=field) from None


def render_marked(source: str, variables: dict[str, Any], field: str) -> tuple[str, list[tuple[int, int]]] | None:
    """The template's text, and where its `{% generation %}` blocks lie in it; None: it has none.  Raises RequestError
    as `render` does."""
    if not _GENERATION.search(source):
        return None
    begin, end = (f"{{{secrets.token_hex(16)}}}" for _ in range(2))
    token = _MARKS.set((begin, end))
    try:
        marked = render(source, variables, field)
    finally:
        _MARKS.reset(token)
    parts, spans, length = [], [], 0
    for index, piece in enumerate(re.split(f"{re.escape(begin)}|{re.escape(end)}", marked)):
        if index % 2:  # between a first mark and a second
            spans.append((length, length + len(piece)))
        parts.append(piece)
        length += len(piece)
    return "".join(parts), spans
