"""The process of a `ScriptedServer`: the real front end and the real engine around a `ScriptedModel`.

    python -m tokserve.testing.scripted_process FD

The engine runs in a thread.  The descriptor is a socket to the process that runs the tests, which holds the script:
a line of JSON for each choice goes there, and its reply comes back.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tempfile
import threading
from contextvars import ContextVar
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.base.processes import wait_for_hangup
from tokserve.cli.http import ApiServer
from tokserve.cli.serve import serve_config
from tokserve.client.inputs import bare_id
from tokserve.config import Config
from tokserve.engine.process import run
from tokserve.engine.socket import EngineSocket, Received
from tokserve.protocol.messages import EngineRequest, Submit, SubmitReply, ToEngine
from tokserve.protocol.prompt import unpack_ids
from tokserve.testing.executor import Faults, ScriptedChoice, ScriptedModel
from tokserve.testing.script import Choice, Scripted
from tokserve.testing.serve import end_with, opening

REFUSALS = {503: "draining", 429: "queue_full"}  # codes of a `SubmitReply`
FLUSH_SECONDS = 0.1  # for the tokens before a disconnection to reach the client
_transport: ContextVar[asyncio.Transport] = ContextVar("transport")  # of the request's connection


class ScriptedApiServer(ApiServer):
    """Serves HTTP, with the engine in a thread of this process."""

    def __init__(self, config: Config, channel: socket.socket) -> None:
        super().__init__(config)
        self._channel = channel
        self._transports: dict[str, asyncio.Transport] = {}  # by the engine's name of a request, without the choice
        self._directory = tempfile.mkdtemp(prefix="tokserve-")

    async def start(self, joining: Any = None) -> None:
        """Start the engine's thread, and join it."""
        self._loop = asyncio.get_running_loop()
        config = self.llm.config
        hf = checkpoint.hf_config(checkpoint.locate(config.model.model, weights=False))
        block_size = config.cache.block_size
        assert block_size is not None, "it is resolved"
        model = ScriptedModel(int(hf["vocab_size"]), (config.model.eos_token_ids or [0])[0], block_size)
        model.faults = Faults(
            abort=lambda request_id: self._run(self.llm.abort(bare_id(request_id.rpartition("#")[0]))),
            disconnect=lambda request_id: self._disconnect(request_id.rpartition("#")[0]),
            set_version=lambda version: self._run(self.llm.call("update_weight_version", new_version=version)),
            has_version=lambda version: self.llm.status.weight_version == version,
        )
        address = f"ipc://{self._directory}/engine.sock"
        bind = partial(ScriptedSocket, model=model, channel=self._channel)
        threading.Thread(target=run, args=(address, config, model, bind), daemon=True).start()
        await super().start(self.llm.connect(address))
        submit = self.llm.submit

        def recording(requests: Any, client: str = "", announcement: Any = None) -> Any:
            for request in requests:
                self._transports[request.choices[0].request_id.rpartition("#")[0]] = _transport.get()
            return submit(requests, client, announcement)

        self.llm.submit = recording  # type: ignore[method-assign]
        server = self._http[0]
        server.config.loaded_app = _with_transport(server.config.loaded_app)

    async def end(self) -> None:
        """Disconnect, and end the engine."""
        await super().end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _disconnect(self, key: str) -> None:
        def soon() -> None:
            self._loop.call_later(FLUSH_SECONDS, self._transports.pop(key).abort)

        self._loop.call_soon_threadsafe(soon)


def _with_transport(app: ASGIApp) -> ASGIApp:
    """The app, with the request's connection in `_transport` while it runs."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _transport.set(receive.__self__.transport)  # type: ignore[attr-defined]  # of uvicorn's cycle
        await app(scope, receive, send)

    return call


class ScriptedSocket(EngineSocket):
    """The engine's socket; a submission passes once the script has replied to its choices."""

    def __init__(self, address: str, model: ScriptedModel, channel: socket.socket) -> None:
        super().__init__(address)
        self._model = model
        self._channel = channel.makefile("rwb")

    def take(self, timeout: float | None) -> list[Received]:
        """The messages that the engine takes, without the submissions that the script refuses."""
        return [received for received in super().take(timeout) if not self._refused(*received)]

    def _refused(self, identity: bytes, message: ToEngine, _: float) -> bool:
        if not isinstance(message, Submit):
            return False
        replies = [self._scripted(request) for request in message.requests]
        refusal = next((scripted for scripted in replies if scripted.error or scripted.reply.refuse), None)
        if refusal is not None:
            code = "internal" if refusal.error else REFUSALS[refusal.reply.refuse or 503]
            self.send(identity, SubmitReply(message.call_id, code, refusal.error or "refused by the script"))
            return True
        for request, scripted in zip(message.requests, replies, strict=True):
            self._model.choices[request.request_id] = ScriptedChoice(scripted.reply)
        return False

    def _scripted(self, request: EngineRequest) -> Scripted:
        request_id, _, index = request.request_id.rpartition("#")
        choice = Choice(request_id, unpack_ids(request.prompt.ids), int(index))
        self._channel.write(msgspec.json.encode(choice) + b"\n")
        self._channel.flush()
        return msgspec.json.decode(self._channel.readline() or sys.exit(), type=Scripted)


def main() -> int:
    """Serve until a signal or the end of the tests; returns the exit code."""
    config, channel = opening()
    end_with(lambda: wait_for_hangup(channel.fileno()))
    try:
        return serve_config(config, lambda resolved: ScriptedApiServer(resolved, channel))
    except StartError as error:
        print(f"tokserve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
