"""The status page: its headers, and that every route it requests exists.  A browser reads it in tests/e2e."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from tests.server.site import Site, site
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.features.observe.status_page import FILE

PAGE = FILE.read_text()
SCRIPT = PAGE[PAGE.index("<script>") : PAGE.index("</script>")]


def shown(**options: object) -> Site:
    return site(ui=True, **options)


def test_the_page_is_served_only_if_ui_is_set() -> None:
    answer = shown().get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == PAGE
    answer = site(ui=False).get("/")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_route"


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc"])
def test_without_pages_a_browser_gets_a_page_that_says_so(path: str) -> None:
    """newcomer-3 D15."""
    answer = site(ui=False).get(path, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer.status_code == 404 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "--ui" in answer.text and 'href="openapi.json"' in answer.text
    assert site(ui=False).get(path, headers={"Accept": "*/*"}).json()["error"]["code"] == "unknown_route"


@pytest.mark.parametrize(
    ("options", "has_page"),
    [
        ({}, True),
        ({"host": "127.3.2.1"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "box"}, False),
        ({"host": "0.0.0.0", "uds": "/tmp/x"}, True),
        ({"host": "0.0.0.0", "ui": True}, True),
        ({"ui": False}, False),
    ],
)
def test_by_default_only_a_local_server_has_the_page(options: dict[str, object], has_page: bool) -> None:
    assert resolve(Config.make(**options)).server.ui is has_page


def test_a_browser_may_run_this_script_and_nothing_else() -> None:
    headers = shown().get("/").headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy.pop("img-src") == "data:" and policy.pop("connect-src") == "'self'"
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert set(policy.values()) == {"'none'"}
    assert policy.keys() == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_the_page_has_no_inline_code_and_no_foreign_address() -> None:
    markup = PAGE.replace(SCRIPT, "")
    assert not re.search(r"\son\w+\s*=", markup) and not re.search(r"\sstyle\s*=", markup)
    assert not re.search(r"\b(src|href|action)=(?!\"(?:data:,|#[\w-]+)\")", markup)
    assert not re.search(r"\b(eval|Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", SCRIPT)
    assert "http://" not in SCRIPT.replace("http://www.w3.org/2000/svg", "") and "https://" not in SCRIPT


def test_the_routes_that_the_script_calls_exist() -> None:
    s = shown(sessions=True)
    requested = set(re.findall(r'(?:call|ask)\([`"]([\w/]+)', SCRIPT))
    assert requested == {
        "health",
        "metrics",
        "inference/v1/requests",
        "inference/v1/generate",
        "abort_requests",
        "server_info",
        "v1/models",
        "tokenizer_info",
        "tokenize",
        "v1/chat/completions/render",
        "sessions",
        "sessions/",
    }
    requested = requested - {"sessions/"} | {"sessions/{id}/tree"}
    routes = {route.path for route in s.app.routes}
    assert {f"/{path}" for path in requested} <= routes
    names = set(re.findall(r'"?\b(\w+_(?:total|sum|count|perc|running|waiting))\b', SCRIPT)) - {"requests_waiting"}
    exported = set(re.findall(r"^tokserve:(\w+)", s.get("/metrics").text, re.MULTILINE))
    assert len(names) >= 8 and names <= exported, names - exported


def test_every_element_the_script_names_is_in_the_page() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', PAGE))
    used = set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT))
    assert used <= ids, used - ids
    for name in re.findall(r'(?:aria-labelledby|aria-describedby|for)="([\w-]+)"', PAGE):
        assert name in ids
    assert len(re.findall(r'\bid="', PAGE)) == len(ids)


def test_no_rule_cuts_text() -> None:
    """newcomer-3 D12: a version, an id or a note may be long."""
    assert "ellipsis" not in PAGE
    for selector, style in re.findall(r"^  (\S[^{]*)\{([^}]*)\}", PAGE, re.MULTILINE):
        is_text = re.search(r"\.tiles|\.value|\.id|\.facts|pre|dd", selector)
        assert not is_text or not re.search(r"nowrap|overflow: hidden", style), selector


def test_columns_have_names_on_narrow_pages() -> None:
    """A row is a card there, whose cells say their column; every table of rows has a head for that."""
    tables = re.findall(r'<table id="(\w+)" class="rows"[^>]*>\s*<thead>(.*?)</thead>', PAGE, re.DOTALL)
    assert {name for name, _ in tables} == {"live", "groups", "sessions", "versions", "errors"}
    assert all(head and not re.search("<th[^>]*></th>", head) for _, head in tables)
    assert "content: attr(data-label)" in PAGE


def test_the_page_needs_no_key_and_its_routes_do() -> None:
    s = shown(api_key=["sesame"])
    assert s.get("/").status_code == 200
    for path in ("/metrics", "/inference/v1/requests", "/server_info", "/v1/models", "/tokenizer_info"):
        assert s.get(path).status_code == 401, path
