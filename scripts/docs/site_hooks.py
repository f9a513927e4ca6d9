"""Hooks of mkdocs: files outside of docs/ that its pages link to become part of the site.

A Markdown file becomes a page, a folder its README.md or a list of its files; any other file is copied as it is.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LISTED = "index-of-files.md"
SHIM, WORKER = "https://unpkg.com/iframe-worker/shim", "assets/javascripts/worker.js"
FIRST = ("getting-started.md", "token-api.md", "options.md", "troubleshooting.md", "deploying.md")  # in search


def resolve(page: str, link: str) -> str | None:
    """The path in the repository that a page (its path in the repository) links to; None for other links and for what
    does not exist."""
    name = link.partition("#")[0]
    if not name or re.match(r"[a-z]+:", name):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def site_source(path: str) -> str:
    """The path below the site's sources of a path in the repository: docs/ is the site's root."""
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md" if (ROOT / path / "README.md").exists() else LISTED)
    return path.removeprefix("docs/") if path.startswith("docs/") else posixpath.join("repository", path)


def rewrite(page: str, text: str) -> str:
    """The text of a page (its path in the repository) with links as they are in the site."""
    here = posixpath.dirname(site_source(page))

    def new(match: re.Match[str]) -> str:
        path = resolve(page, match[2])
        if path is None:
            return match[0]
        anchor = match[2].partition("#")[2]
        target = posixpath.relpath(site_source(path), here or ".")
        return f"{match[1]}{target}{'#' + anchor if anchor else ''}{match[3]}"

    parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)  # code stays as it is
    return "".join(part if part.startswith("```") else LINK.sub(new, part) for part in parts)


def linked(page: str, text: str) -> Iterator[str]:
    """Paths in the repository, outside of docs/, that a page links to."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for match in LINK.finditer(prose):
        path = resolve(page, match[2])
        if path is not None and not path.startswith("docs/"):
            yield path


def listing(folder: str) -> str:
    """A page that lists the files of a folder without README.md."""
    names = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
    return f"# {folder}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def outside(pages: dict[str, str]) -> dict[str, str | None]:
    """What the site needs beside docs/, by path in the repository: the text of pages, None for files that are copied.

    `pages` are the texts of the pages in docs/, by path in the repository.
    """
    result: dict[str, str | None] = {}
    pending = list(pages.items())
    while pending:
        page, text = pending.pop()
        for path in linked(page, text):
            source = site_source(path).removeprefix("repository/")
            if source.startswith("docs/") or source in result:
                continue
            if source.endswith(LISTED):
                content: str | None = listing(path)
            else:
                content = (ROOT / source).read_text(encoding="utf-8") if source.endswith(".md") else None
            result[source] = content
            if content is not None:
                pending.append((source, content))
    return result


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' hook: adds what pages link to."""
    from mkdocs.structure.files import File

    pages = {
        f"docs/{file.src_uri}": Path(file.abs_src_path).read_text(encoding="utf-8")
        for file in files.documentation_pages()
    }
    for path, content in outside(pages).items():
        uri = f"repository/{path}"
        if content is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' hook: links lead to where the site has it."""
    uri = page.file.src_uri
    if uri.startswith(("decisions/", "repository/benchmarks/")):  # records for those who follow a link
        page.meta["search"] = {"exclude": True}
    elif uri in FIRST:
        page.meta["search"] = {"boost": 2}
    return rewrite(uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}", markdown)


def on_post_build(config: Any) -> None:
    """mkdocs' hook: search from the disk uses a script of the site's, not one of another site."""
    site = Path(config.site_dir)
    shutil.copy(Path(__file__).parent / "worker.js", site / WORKER)
    for page in site.rglob("*.html"):
        to_root = posixpath.relpath(".", page.parent.relative_to(site).as_posix())
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(SHIM, posixpath.join(to_root, WORKER)), encoding="utf-8")
