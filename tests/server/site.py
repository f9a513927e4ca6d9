"""The application over the real client and engine with a scripted model, and an ASGI caller that can hang up."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from tests import documented
from tests.server.byte_tokenizer import TOKENIZER
from tests.server.scripted_llm import Script, ScriptedLLM, endless, says
from tests.text.tool_templates import HERMES
from tests.waiting import PATIENCE
from tokserve.config import Config
from tokserve.server.api_process import ApiProcess
from tokserve.server.app import build_app
from tokserve.text.tokenizer import Tokenizer

DOCUMENTS: dict[Any, dict[str, Any]] = {}


@dataclass
class Site:
    """A scripted engine and the application over it."""

    llm: ScriptedLLM
    app: Any

    def client(self, **kwargs: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", **kwargs)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **kwargs)

        response = asyncio.run(send())
        documented.check(self.document(), response, without_bodies=("admin", "sglang", "trainers", "sagemaker"))
        return response

    def document(self) -> dict[str, Any]:
        """Its OpenAPI document; the names of models may be those of another site."""
        config = self.llm.config
        server = config.server
        rooms = repr(config.rooms)
        kind = (server.sglang_api, server.tokens_only, server.ui, config.model.runner, rooms)
        if kind not in DOCUMENTS:
            DOCUMENTS[kind] = self.app.openapi()
        return DOCUMENTS[kind]

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return (
            self.request("POST", path, json=body, **kwargs)
            if body is not None
            else self.request("POST", path, **kwargs)
        )

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def events(self, path: str, body: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """The events of a stream, without [DONE], which must be the last."""
        answer = self.post(path, body | {"stream": True}, **kwargs)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_events(answer.text)


def parse_events(text: str) -> list[dict[str, Any]]:
    lines = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def site(
    script: Script = endless,
    *,
    tokenizer: Tokenizer = TOKENIZER,
    keep_alive: float = 15.0,
    api_process: ApiProcess | None = None,
    **options: Any,
) -> Site:
    """A server; `options` are config fields."""
    values = {"served_model_name": ["tiny", "alias"], "generation_config": "none", "max_model_len": 512}
    values |= {"enable_prefix_caching": False, "spec_method": "none"} | options
    config = Config.make(**values)
    llm = ScriptedLLM(config, script, tokenizer)
    return Site(llm, build_app(llm, config, keep_alive=keep_alive, api_process=api_process))


def chat_site(text: str, template: str = HERMES, **options: Any) -> Site:
    """A server whose choices all answer `text`; `template` makes prompts of its conversations."""
    return site(says(text), **({"chat_template": template, "max_model_len": 2048} | options))


def command_site(**options: Any) -> Site:
    """A server whose engine replies {} to admin commands; more by `llm.answers`."""
    running = site(**options)
    running.llm.answers = {}
    return running


class Caller:
    """One ASGI request whose client can hang up, and whose writes are seen as they come."""

    def __init__(
        self, site: Site, path: str, body: Any, headers: dict[str, str] | None = None, chunks: int = 1
    ) -> None:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        size = -(-len(raw) // chunks)
        self._incoming = deque(raw[i * size : (i + 1) * size] for i in range(chunks))
        names = {"content-type": "application/json"} | (headers or {})
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "scheme": "http",
            "headers": [(k.encode(), v.encode()) for k, v in names.items()],
            "client": ("a", 1),
            "server": ("b", 2),
        }
        self.site = site
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.done = False
        self.read = 0
        self._left = asyncio.Event()
        self.task = asyncio.create_task(site.app(self.scope, self._receive, self._send))

    @property
    def is_read(self) -> bool:
        """Whether the application has read the body."""
        return not self._incoming

    def hang_up(self) -> None:
        self._left.set()

    async def wait_for(self, condition: Callable[[Caller], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition(self):
                await asyncio.sleep(0.001)

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            chunk = self._incoming.popleft()
            self.read += len(chunk)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._incoming)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        assert not self.done, "a message after the end"
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.writes.append(message.get("body", b""))
            self.done = not message.get("more_body", False)
