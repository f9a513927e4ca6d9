"""The site: links to files beside docs/ lead to pages or copies of them, and the crawler names what leads nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from tests.docs.reference import DOCS

ROOT = DOCS.parent


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks, crawl = load("site_hooks"), load("crawl")


def test_links_out_of_docs_lead_into_the_site() -> None:
    text = (
        "[a](rl.md#state) [b](../examples/deploy/README.md) [c](../examples/rl_loop.py) [d](../examples/monitoring) "
        "[e](https://example.org/x) [f](#here)\n```\n[g](../examples/rl_loop.py)\n```\n"
    )
    assert hooks.rewrite("docs/scale.md", text) == (
        "[a](rl.md#state) [b](repository/examples/deploy/README.md) [c](repository/examples/rl_loop.py) "
        "[d](repository/examples/monitoring/README.md) [e](https://example.org/x) [f](#here)\n"
        "```\n[g](../examples/rl_loop.py)\n```\n"
    )
    inner = hooks.rewrite(
        "examples/deploy/README.md", "[how](../../docs/scale.md#prefill) [f](Dockerfile) [k](kubernetes)"
    )
    assert inner == "[how](../../../scale.md#prefill) [f](Dockerfile) [k](kubernetes/index-of-files.md)"


def test_every_linked_file_is_in_the_site() -> None:
    pages = {f"docs/{path.relative_to(DOCS)}": path.read_text() for path in DOCS.rglob("*.md")}
    added = hooks.outside(pages)
    assert {"CONTRIBUTING.md", "examples/deploy/Dockerfile", "examples/trainers/trl/README.md"} <= added.keys()
    texts = pages | {path: text for path, text in added.items() if text is not None}
    for page, text in texts.items():
        for path in hooks.linked(page, text):
            assert hooks.site_source(path).removeprefix("repository/") in added, f"{page} links to {path}"


def test_the_crawler_names_broken_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="a/b.html#part">1</a> <a href="a/b.html#no">2</a> <a href="c.py">3</a>'
        '<script src="https://example.org/x.js"></script><a href="https://example.org">4</a>'
    )
    (tmp_path / "a" / "b.html").write_text(
        '<a id="part"></a> <a href="../index.html#top">4</a> <a href="../">5</a> <a href="#x">6</a>'
    )
    assert crawl.broken_links(tmp_path) == [
        "index.html: a/b.html#no",
        "index.html: c.py",
        "index.html: https://example.org/x.js, of another site",
        "a/b.html: #x",
    ]


def test_project_files_name_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        named = set(re.findall(r"run: make ([a-z-]+)(?: check)? PYTHON", text))
        for row in re.findall(r"target: \[(.*)\]", text):
            named |= set(row.split(", "))
        assert named <= targets, f"{path.name}: {named - targets}"
        assert named or "make ${{" in text
