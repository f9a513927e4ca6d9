"""Name each link of a built site that leads nowhere: `python scripts/docs/crawl.py build/site`."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of a page, and the scripts and styles that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
                if tag in ("script", "link") and dict(attrs).get("rel") in (None, "stylesheet"):
                    self.loaded.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Links of all pages that lead nowhere, and scripts and styles of other sites, as "page: link"."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    result = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("/"):  # 404.html has absolute paths
                if parts.netloc and link in page.loaded:
                    result.append(f"{path.relative_to(site.resolve())}: {link}, of another site")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            is_there = target.exists()
            if is_there and parts.fragment and target in pages and not parts.fragment.startswith("__"):
                is_there = unquote(parts.fragment) in pages[target].anchors
            if not is_there:
                result.append(f"{path.relative_to(site.resolve())}: {link}")
    return result


if __name__ == "__main__":
    broken = broken_links(Path(sys.argv[1]))
    for line in broken:
        print(line, file=sys.stderr)
    sys.exit(f"{len(broken)} links lead nowhere or load what is not here" if broken else 0)
