"""A headless Chromium that a test drives through ChromeDriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx

from tests import needs

PATIENCE = 60.0
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of a reference to an element, as the standard has it


class Browser:
    """Use as a context manager."""

    def __init__(self, width: int = 1280, height: int = 1000) -> None:
        needs.CHROMIUM.or_skip()
        browser, driver = needs.browser()
        assert browser and driver
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        self._http = httpx.Client(timeout=PATIENCE)
        try:
            self._base = self._address()
            flags = [*FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]
            capabilities = {
                "goog:chromeOptions": {"binary": browser, "args": flags},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self._base += f"/session/{session['sessionId']}"
        except BaseException:
            self._end()
            raise

    def _address(self) -> str:
        assert self._process.stdout
        for line in self._process.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                return f"http://127.0.0.1:{match[1]}"
        raise AssertionError("ChromeDriver did not start")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._send("DELETE", "", None)
        finally:
            self._end()

    def _end(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._profile.cleanup()

    def _send(self, method: str, path: str, body: Any) -> Any:
        answer = self._http.request(method, self._base + path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        """Go there."""
        self._send("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value of a function body."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        """What one sees there."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Until it is so."""
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert time.monotonic() < end, f"{what}: does not come to pass; console: {self.console()}"
            time.sleep(0.05)
        return value

    def element(self, selector: str) -> str:
        """A reference to an element."""
        actual: dict[str, str] = self._send("POST", "/element", {"using": "css selector", "value": selector})
        return actual[ELEMENT]

    def names(self, selector: str) -> dict[str, str]:
        """What a screen reader calls each visible element, by its HTML."""
        elements = self._send("POST", "/elements", {"using": "css selector", "value": selector})
        places = [f"/element/{entry[ELEMENT]}" for entry in elements]
        return {
            self._send("GET", place + "/property/outerHTML", None): self._send("GET", place + "/computedlabel", None)
            for place in places
            if self._send("GET", place + "/displayed", None)
        }

    def click(self, selector: str) -> None:
        """Click an element as a mouse does: an element that another one covers cannot be clicked."""
        self._send("POST", f"/element/{self.element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Replace a field's content by typing."""
        place = f"/element/{self.element(selector)}"
        self._send("POST", place + "/clear", {})
        self._send("POST", place + "/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus, one after the other, as the standard names them."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def accept(self) -> None:
        """Say yes to a question."""
        self._send("POST", "/alert/accept", {})

    def scheme(self, name: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def resize(self, width: int, height: int) -> None:
        """The size of the page."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def devtools(self, command: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def console(self) -> list[str]:
        """What the browser has complained of since the last call, refused requests included."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]
