"""The status page in a real browser: what it shows, what its buttons do, keys, keyboard, narrow and dark."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import Browser
from tests.e2e.server import Server
from tests.models.pictures import png, write_served

pytestmark = pytest.mark.slow
ARROW_RIGHT, END, TAB, ENTER = "\ue014", "\ue010", "\ue004", "\ue007"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("demo", "--max-num-seqs", "2", "--api-server-count", "2") as server:
        yield server


def visit(browser: Browser, server: Server) -> None:
    browser.open(server.url + "/")
    browser.wait(lambda: browser.text("#health") == "serving", "the page says that the server serves")
    browser.console()


def rows(browser: Browser) -> dict[str, list[str]]:
    script = "return [...document.querySelectorAll('#live tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    return {cells[0]: cells for cells in browser.run(script)}


@contextmanager
def in_flight(server: Server, *names: str) -> Iterator[list[Any]]:
    """Requests that take minutes, aborted at the end."""
    params = {"max_tokens": 1900, "ignore_eos": True, "n": 100}
    with ThreadPoolExecutor(len(names)) as pool:
        try:
            yield [
                pool.submit(
                    server.post,
                    "/inference/v1/generate",
                    {"token_ids": [5, 6, 7], "request_id": name, "group_id": "g", "sampling_params": params},
                )
                for name in names
            ]
        finally:
            server.post("/abort_requests", {"all": True})


def test_live_requests_and_their_abort(browser: Browser, server: Server) -> None:
    visit(browser, server)
    assert "Nothing is being served" in browser.text("main") and "demo" in browser.text("#facts")
    hostile = "<img src=x onerror=alert(1)>"
    with in_flight(server, "first", hostile) as (first, second):
        browser.wait(lambda: len(rows(browser)) == 2, "both requests are listed")
        browser.wait(lambda: browser.text("#running") == "2", "two choices run")
        assert int(browser.text("#waiting")) > 100
        actual = rows(browser)
        assert actual.keys() == {"first", hostile} and not browser.run("return document.images.length")
        running, choices = actual["first"][6].split(" of ")  # of those that have not ended
        assert int(running) <= 2 < int(choices) <= 100 and actual["first"][3] == "3" and actual["first"][7] == "g"
        browser.wait(lambda: browser.text("#output-rate").strip("0.kM\u2013"), "tokens are counted")
        browser.click("[aria-label='Abort first']")
        ends = {choice["finish_reason"] for choice in first.result(60).json()["choices"]}
        assert "abort" in ends and ends <= {"abort", "length"}  # length: choices that ended before
        browser.wait(lambda: rows(browser).keys() == {hostile}, "the aborted request is gone")
        browser.click("#abort-all")
        browser.accept()
        assert second.result(60).status_code == 200
        browser.wait(lambda: not rows(browser), "all are gone")
    assert browser.run("return document.querySelector('#rate-chart polyline').getAttribute('points').length") > 10
    assert browser.console() == []
    server.post("/pause", {})
    browser.wait(lambda: browser.text("#health") == "paused", "a pause is noticed")
    server.post("/resume", {})
    browser.wait(lambda: browser.text("#health") == "serving", "and its end")


def test_the_playground_shows_tokens_ids_and_logprobs(browser: Browser, server: Server) -> None:
    visit(browser, server)
    browser.type("#temperature", "0")
    browser.type("#seed", "9007199254740993")  # not a number of JavaScript's
    browser.click("#go")
    status = browser.wait(lambda: "ended" in browser.text("#play-status") and browser.text("#play-status"), "an end")
    assert "stop (eos)" in status and "3 output tokens" in status and "seed 9007199254740993" in status
    assert browser.text("#tokens") == "85<|im_end|>"
    body = {
        "messages": [{"role": "user", "content": "What is 47 + 38?"}],
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
    }
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert browser.run("return document.querySelector('#ids').textContent") == ", ".join(map(str, choice["token_ids"]))
    details = browser.text("#token")
    assert f"{choice['logprobs']['content'][0]['logprob']:.6f}" in details and '"8"' in details
    assert browser.run("return document.querySelectorAll('#alternatives tbody tr').length") == 5
    browser.click("#tokens")
    browser.press(END)
    assert "3 of the output" in browser.text("#token")
    browser.press("\ue012", "\ue012", ARROW_RIGHT)
    assert "2 of the output" in browser.text("#token")
    assert browser.console() == []


def test_sessions_and_the_picture_of_a_tree(browser: Browser, server: Server) -> None:
    visit(browser, server)
    assert not browser.run("return document.querySelector('#sessions-card').checkVisibility()")
    hostile, question = "<img src=x>", {"role": "user", "content": "q"}
    with Server("demo", "--sessions") as other:
        visit(browser, other)
        browser.wait(lambda: "No session yet." in browser.text("#sessions-card"), "there is no session")
        body = {"messages": [question], "max_tokens": 4}
        message = other.post("/v1/chat/completions", body, headers={"X-Session-ID": hostile}).json()["choices"][0]
        branches = {"messages": [question, message["message"], question], "max_tokens": 4, "n": 2}
        assert other.post("/v1/chat/completions", branches, headers={"X-Session-ID": hostile}).status_code == 200
        browser.wait(lambda: hostile in browser.text("#sessions"), "the session is listed")
        browser.click("#sessions button")
        circles = "return [...document.querySelectorAll('#tree circle')].map(c => c.getAttribute('class'))"
        browser.wait(lambda: browser.run(circles) == ["root", "turn", "turn"], "its tree is drawn")
        assert not browser.run("return document.images.length") and browser.console() == []
        browser.run("document.querySelector('#tree-scroll').focus()")
        browser.press(ARROW_RIGHT, ARROW_RIGHT)
        assert browser.text("#turn-note").startswith("t1: ")
        browser.press(END)
        assert browser.text("#turn-note").startswith("t2: ")
        browser.click("#sessions button")
        browser.wait(lambda: not browser.run(circles) or "Show" in browser.text("#sessions"), "it is hidden")


def test_a_picture_is_part_of_the_prompt(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(40, 32))
    with Server(write_served(tmp_path / "vl"), "--max-model-len", "512") as server:
        visit(browser, server)
        browser.type("#max-tokens", "4")
        browser.type("#seed", "3")
        browser.type("#picture", str(tmp_path / "one.png"))
        browser.click("#go")
        browser.wait(lambda: "ended" in browser.text("#play-status"), "an end")
        assert "data:" not in browser.text("#curl") and "features" in browser.run(
            "return document.querySelector('#curl').textContent"
        )


def test_it_streams_and_stops(browser: Browser, server: Server) -> None:
    visit(browser, server)
    browser.run("document.querySelector('#kind').value = 'ids'")
    browser.type("#prompt", "5, 6 7")
    browser.type("#temperature", "2")
    browser.type("#max-tokens", "1900")
    with in_flight(server, "slow"):
        browser.wait(lambda: int(browser.text("#waiting")) > 50, "others are before it")
        browser.click("#go")
        browser.wait(lambda: not browser.run("return document.querySelector('#stop').disabled"), "it can be stopped")
        browser.click("#stop")
        browser.wait(lambda: "stopped after" in browser.text("#play-status"), "it stops")
    browser.type("#prompt", "five")
    browser.click("#go")
    browser.wait(lambda: "whole numbers" in browser.text("#play-error"), "it says what is wrong")
    browser.type("#prompt", "999999")
    browser.click("#go")
    browser.wait(lambda: "999999" in browser.text("#play-error"), "it says what the server says")


def test_all_of_it_can_be_reached_by_keyboard(browser: Browser, server: Server) -> None:
    visit(browser, server)
    browser.run("document.activeElement.blur()")
    seen = []
    for _ in range(16):
        browser.press(TAB)
        seen.append(browser.run("return document.activeElement.id || document.activeElement.tagName"))
    order = ["key", "prompt", "kind", "max-tokens", "temperature", "seed", "top", "go"]
    assert [name for name in seen if name in order][: len(order)] == order
    browser.run("document.querySelector('#go').focus()")
    browser.press(ENTER)
    browser.wait(lambda: "ended" in browser.text("#play-status"), "an end")


def test_a_screen_reader_has_a_name_for_each_control(browser: Browser, server: Server) -> None:
    visit(browser, server)
    with in_flight(server, "one", "two"):
        browser.wait(lambda: len(rows(browser)) == 2, "the requests are listed")
        names = browser.names("a, button, input, select, textarea, summary, [tabindex], svg[role]")
    assert len(names) > 15 and all(names.values()), names
    assert {"Abort one", "Abort two", "Abort the group g"} <= set(names.values())


CUT = """
return [...document.querySelectorAll('body *')].filter(node => {
  const style = getComputedStyle(node), clips = /hidden|clip|auto|scroll/.test(style.overflowX);
  return node.checkVisibility() && node.innerText && !node.closest('textarea, select, thead, svg')
    && (clips && node.scrollWidth > node.clientWidth + 1 || node.getBoundingClientRect().right > innerWidth + 1);
}).map(node => node.outerHTML.slice(0, 120));
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 1400])
def test_under_load_no_text_is_cut_and_all_can_be_read(
    browser: Browser, server: Server, width: int, scheme: str
) -> None:
    """newcomer-3 D12, and the same for long ids, versions and notes."""
    browser.scheme(scheme)
    browser.resize(width, 800)
    try:
        visit(browser, server)
        with in_flight(server, "a-request-with-a-long-name-" * 4, "another"):
            browser.wait(lambda: len(rows(browser)) == 2, "the requests are listed")
            text = "accepted: 11.4 tokens per step with drafts, and a text that is longer than any of its kind"
            browser.run("document.querySelector('#drafts-note').textContent = arguments[0]", text)
            browser.run("document.querySelector('#versions td').textContent = 'step-0012-'.repeat(12)")
            assert browser.run(CUT) == []
            assert browser.run("return document.documentElement.scrollWidth") <= width
            low = browser.run(CONTRASTS)
        assert not low, low
    finally:
        browser.devtools("Emulation.clearDeviceMetricsOverride")
        browser.scheme("light")


def table(browser: Browser, name: str) -> list[list[str]]:
    script = "return [...document.querySelectorAll(arguments[0])].map(row => [...row.cells].map(c => c.innerText))"
    cells: list[list[str]] = browser.run(script, f"#{name} tbody tr")
    return cells


def test_groups_waits_failures_and_versions(browser: Browser) -> None:
    with Server("demo", "--max-num-seqs", "1", "--max-queued-requests", "150") as server:
        visit(browser, server)
        browser.wait(lambda: table(browser, "versions"), "the version is listed")
        assert table(browser, "versions")[0][:2] == ["0", "0"] and "None." in browser.text("main")
        with in_flight(server, "one"):
            browser.wait(lambda: table(browser, "groups"), "the group is listed")
            refused = {"token_ids": [5], "sampling_params": {"n": 100}}
            assert server.post("/inference/v1/generate", refused).status_code == 429
            params = {"max_tokens": 4}
            with ThreadPoolExecutor(1) as pool:
                body = {"token_ids": [5], "request_id": "two", "group_id": "g", "sampling_params": params}
                pool.submit(server.post, "/inference/v1/generate", body)
                browser.wait(lambda: "waiting for a slot" in browser.text("#live"), "it says what it waits for")
                assert [row[:2] for row in table(browser, "groups")] == [["g", "2"]]
                browser.click("[aria-label='Abort the group g']")
            browser.wait(lambda: not rows(browser), "the group is aborted")
        browser.wait(lambda: ["refused", "queue full", "1"] in table(browser, "errors"), "the refusal is listed")
        server.post("/update_weight_version", {"new_version": "7"})
        browser.wait(lambda: [row[0] for row in table(browser, "versions")] == ["7", "0"], "the new version is listed")
        roles = (
            "return [...document.querySelectorAll('table.rows tbody td')].every(c => c.getAttribute('role') === 'cell')"
        )
        assert browser.run(roles) and browser.console() == []


CONTRASTS = """
const luminance = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const parse = color => color.match(/[\\d.]+/g).map(Number);
const below = node => {
  for (let at = node; at; at = at.parentElement) {
    const color = parse(getComputedStyle(at).backgroundColor);
    if (color.length < 4 || color[3] === 1) return color.slice(0, 3);
  }
};
const low = [];
for (const node of document.querySelectorAll('body *')) {
  const text = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!text || !node.checkVisibility() || node.disabled || node.closest('svg, script')) continue;
  const [a, b] = [luminance(parse(getComputedStyle(node).color).slice(0, 3)), luminance(below(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) low.push([node.outerHTML.slice(0, 80), ratio]);
}
return low;
"""


def test_the_page_asks_for_a_key_and_uses_it(browser: Browser) -> None:
    with Server("demo", "--api-key", "sesame", "--tokens-only") as server:
        browser.open(server.url + "/")
        browser.wait(lambda: browser.text("#health") == "locked", "the page says that it needs a key")
        assert "API key" in browser.text("#trouble")
        browser.type("#key", "wrong")
        browser.press(ENTER)
        browser.wait(lambda: "not accepted" in browser.text("#trouble"), "a wrong key is said to be wrong")
        browser.type("#key", "sesame")
        browser.press(ENTER)
        browser.wait(lambda: browser.text("#health") == "serving", "the key opens")
        assert browser.run("return [...document.querySelector('#kind').options].map(o => o.value)") == ["ids"]
        browser.click("#go")
        browser.wait(lambda: "ended" in browser.text("#play-status"), "an end")
        assert browser.run("return document.querySelector('#tokens span').className") == "id"
    browser.wait(lambda: browser.text("#health") in ("unreachable", "not serving"), "the server's end is noticed")
