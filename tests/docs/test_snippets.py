"""Code blocks of the documentation: syntax, options, routes and files of all; those with curl and Python are run."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from functools import cache

from tests.docs.snippets import ROOT, Snippet, commands, requests, snippets
from tests.route_table import ENDPOINTS
from tokserve.base.rooms import imported, rooms
from tokserve.cli.main import parser

ALL = list(snippets())
COMMAND = parser()
SHELLS = ("sh", "bash")
LANGUAGES = {"sh", "bash", "python", "json", "toml", ""}
FILES = re.compile(r"^(?:examples|benchmarks|scripts|tests|docs)/[\w./-]+\.(?:py|sh|md|yml|json)$")


@cache
def routes() -> list[re.Pattern[str]]:
    optional = [endpoint for room in rooms().values() if room.needs for endpoint in imported(room.endpoints)]
    paths = [endpoint.path for endpoint in [*ENDPOINTS, *optional]]
    return [re.compile(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(path))) for path in paths]


def check_shell(snippet: Snippet) -> None:
    done = subprocess.run(["bash", "-n"], input=snippet.text, text=True, capture_output=True)
    assert done.returncode == 0, f"{snippet}: {done.stderr}"
    for request in requests(snippet.text):
        path = request.path.partition("?")[0]
        assert any(route.fullmatch(path) for route in routes()), f"{snippet}: there is no route {path}"
        if request.body is not None:
            json.loads(request.body)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(snippet.text):
        folder = ROOT / snippet.page
        for word in words:
            assert not FILES.match(word) or (ROOT / word).exists(), f"{snippet}: there is no {word}"
        program = words[0].removeprefix(".venv/bin/")
        if program == "tokserve":
            end = next((i for i, word in enumerate(words) if word in ("&", "&&")), len(words))
            COMMAND.parse_args(words[1:end])
        elif program == "make":
            named = [word for word in words[1:] if re.fullmatch("[a-z-]+", word)]
            assert set(named) <= targets, f"{snippet}: make {named}"
        elif program == "python" and words[1].endswith(".py") and "/" not in words[1]:
            assert (folder.parent / words[1]).exists(), f"{snippet}: there is no {words[1]}"


def check_python(snippet: Snippet) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    tree = compile(snippet.text, str(snippet), "exec", flags=flags)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tokserve":
            folder = ROOT / node.module.replace(".", "/")
            source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            for name in node.names:
                is_module = (folder / f"{name.name}.py").exists()
                assert is_module or re.search(rf"\b{name.name}\b", source.read_text()), f"{snippet}: {name.name}"


def check_json(snippet: Snippet) -> None:
    text = snippet.text.strip()
    json.loads(text if text[0] in "{[" else f"{{{text}}}")


def test_every_block_can_be_read() -> None:
    for snippet in ALL:
        assert snippet.language in LANGUAGES, f"{snippet}: {snippet.language}"
        if snippet.language in SHELLS:
            check_shell(snippet)
        elif snippet.language == "python":
            check_python(snippet)
        elif snippet.language == "json":
            check_json(snippet)
        elif snippet.language == "":
            assert not re.match(r"(tokserve|curl|make|pip|export|python|scripts/\S+) ", snippet.text), f"{snippet}: sh"
    assert sum(snippet.is_run for snippet in ALL) > 60


def test_notes_are_of_a_known_kind() -> None:
    for snippet in ALL:
        assert re.fullmatch(r"|not run: .{8,}|server: --.+", snippet.note), f"{snippet}: {snippet.note}"
