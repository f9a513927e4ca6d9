"""Two versions of the documentation side by side, in a browser: the list of versions, search, and dark colours; and one
opened from the disk."""

from __future__ import annotations

import functools
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.docs.reference import DOCS
from tests.e2e.browser import Browser

pytestmark = pytest.mark.slow
AUTHOR = {f"GIT_{who}_{what}": "docs@test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
RESULTS = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
VERSIONS = "return [...document.querySelectorAll('.md-version__link')].map(link => link.innerText)"


class Files(SimpleHTTPRequestHandler):
    """A folder, without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, as they are on the branch that `make docs-version` writes, in a repository of its own."""
    needs.DOCS_BUILDER.or_skip()
    repository, site = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("site")
    path = f"{needs.MIKE.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **AUTHOR, "PATH": path, "NO_MKDOCS_2_WARNING": "1"}
    config = ["--config-file", str(DOCS.parent / "mkdocs.yml")]

    def execute(*words: str) -> None:
        subprocess.run(words, cwd=repository, env=environment, check=True)

    execute("git", "init", "--quiet")
    execute("git", "commit", "--quiet", "--allow-empty", "--message", "first")
    for version in ("0.1", "0.2"):
        execute("mike", "--quiet", "deploy", *config, "--update-aliases", version, "latest")
    execute("mike", "--quiet", "set-default", *config, "latest")
    execute("git", f"--work-tree={site}", "checkout", "--quiet", "gh-pages", "--", ".")
    return site


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the two versions are served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_versions_search_and_darkness(address: str) -> None:
    with Browser() as browser:
        browser.open(f"{address}/")
        browser.wait(lambda: browser.run("return location.pathname").startswith("/latest/"), "the newest version")
        browser.wait(lambda: browser.run(VERSIONS) == ["0.2", "0.1"], "the list of versions")

        browser.open(f"{address}/0.1/options.html")
        browser.wait(lambda: browser.text(".md-version__current") == "0.1", "the name of the version")
        browser.type(".md-search__input", "max_tokens")
        results = browser.wait(lambda: browser.run(RESULTS), "results of a search")
        assert all(result.startswith(f"{address}/0.1/") for result in results)
        assert any("token-api.html" in result for result in results), results

        for scheme, name in (("dark", "slate"), ("light", "default")):
            browser.scheme(scheme)
            browser.open(f"{address}/0.2/index.html")
            shown = browser.wait(lambda: browser.run("return document.body.dataset.mdColorScheme"), "colours")
            assert shown == name


def test_search_of_a_site_on_the_disk(site: Path) -> None:
    with Browser() as browser:
        browser.open((site / "0.2" / "decisions" / "001-shape-of-the-first-version.html").as_uri())
        browser.type(".md-search__input", "max_tokens")
        results = browser.wait(lambda: browser.run(RESULTS), "results of a search")
        assert any("/0.2/token-api.html" in result for result in results), results
