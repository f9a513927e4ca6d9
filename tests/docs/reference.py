"""Writes the pages of the documentation that are made from the code: `python -m tests.docs.reference`."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from pydantic import BaseModel

from tests.route_table import ENDPOINTS
from tokserve.base.rooms import imported, rooms
from tokserve.cli.options import add_flags
from tokserve.server.endpoint import Endpoint

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS_HEAD = """# Options

This page lists every option of `tokserve serve`. `LLM(...)` and `AsyncLLM(...)` take the same options with underscores.
`tokserve serve --help` shows the ten that are needed most, `--help=WORD` those about a word, `--help=all` all of them.

- `--config FILE` reads options from a YAML file (`max-model-len: 4096`, and `model`); the command line overrides it.
- `--option.key value` sets one key of a JSON option. Underscores are equivalent to dashes. An option may be
  shortened as long as no other option begins in the same way (`--lora-mod`).
- Numbers of tokens may be written as `4k` (4000) or `4K` (4096).
- vLLM's options that are not listed here are known too: as another name of a listed option (`--enable-log-requests`),
  without effect but with a warning (`--swap-space`, `--trust-remote-code`), or refused with an error that names the
  alternative (`--revision`).
"""
TITLES = {"kv": "KV transfer and storage", "lora": "LoRA", "cors": "CORS", "tls": "TLS"}
ROUTES_HEAD = """# Routes

This page lists every route. `GET /openapi.json` has the schemas of bodies and replies. *Control* routes require the
admin key, if one is set, and are otherwise restricted ([security](security.md#access-to-control-routes)). *Guarded*
routes show the server's state: like control routes, they accept only the `Host` names of `--allowed-hosts`. *Text*
routes need a tokenizer.
"""


def options_page() -> str:
    """docs/options.md."""
    parser = argparse.ArgumentParser(prog="tokserve serve")
    add_flags(parser)
    lines = [OPTIONS_HEAD]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if "-h" not in action.option_strings]
        if actions:
            title = group.title or ""
            lines += [f"## {TITLES.get(title, title.capitalize())}\n", "| option | what it does |", "|---|---|"]
            lines += [_row(action) for action in actions] + [""]
    return "\n".join(lines)


def _row(action: argparse.Action) -> str:
    flag = ", ".join(f"`{one}`" for one in action.option_strings)
    if action.choices:
        values = ", ".join(f"`{choice}`" for choice in action.choices)
    else:
        values = f"`{action.metavar}`" if action.metavar else ""
    text = (action.help or "").replace("%%", "%").replace("|", "\\|")
    return f"| {flag} {values} | {text} |".replace("  ", " ")


def routes_page() -> str:
    """docs/routes.md."""
    lines = [ROUTES_HEAD]
    optional = [
        (f"With --{room.needs.replace('_', '-')}", imported(room.endpoints)) for room in rooms().values() if room.needs
    ]
    for title, endpoints in (("Routes", ENDPOINTS), *optional):
        lines += [f"## {title}\n", "| method and path | what it does | body | |", "|---|---|---|---|"]
        lines += [_route(endpoint) for endpoint in endpoints] + [""]
    return "\n".join(lines)


def _route(endpoint: Endpoint) -> str:
    kinds = [
        word
        for word, holds in (
            ("control", endpoint.control),
            ("guarded", endpoint.guarded),
            ("text", endpoint.text),
        )
        if holds
    ]
    path = endpoint.path.replace(":path}", "}")
    return (
        f"| {', '.join(endpoint.methods)} `{path}` | {endpoint.summary} | {_fields(endpoint.body)} "
        f"| {', '.join(kinds)} |"
    )


def _fields(body: type[msgspec.Struct] | type[BaseModel] | None) -> str:
    if body is None:
        return ""
    if issubclass(body, BaseModel):
        names = list(body.model_fields)
    else:
        names = [field.encode_name for field in msgspec.structs.fields(body)]
    shown = ", ".join(f"`{name}`" for name in names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")


PAGES = {"options.md": options_page, "routes.md": routes_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
