"""Requests leave no cycles of objects: what they have used is freed when they end, without a collection of garbage."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# The server without its collector, and a client in a thread.  What a full collection then finds is counted by type.
PROGRAM = """
import asyncio, gc, http.client, json, os, socket, sys, threading, types
from collections import Counter

from tokserve.cli import http as cli_http
from tokserve.cli.serve import serve

KEPT = ("tokserve", "uvicorn", "starlette", "fastapi")

def name(thing):
    if isinstance(thing, types.FrameType):
        return "frame " + thing.f_globals.get("__name__", "") + "." + thing.f_code.co_qualname
    if isinstance(thing, types.CoroutineType):
        return "coroutine " + thing.__qualname__
    return type(thing).__module__ + "." + type(thing).__qualname__

def garbage():
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(map(name, gc.garbage))
    return {kind: count for kind, count in found.items()
            if kind.startswith((*KEPT, "_asyncio.Task", "coroutine")) or kind.startswith(("frame tokserve",))}

def post(path, body, port, version=11):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection._http_vsn, connection._http_vsn_str = version, f"HTTP/1.{version % 10}"
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status

def leave(body, port):
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        head = b"POST /inference/v1/generate HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: %d\\r\\n\\r\\n"
        sock.sendall(head % len(raw) + raw)
        sock.recv(100)

def client(port):
    params = {"max_tokens": 4, "seed": 1, "logprobs": 1}
    generate, chat, text = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
    ids = {"token_ids": [5, 6, 7], "sampling_params": params}
    turn = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    asked = [
        (generate, ids, 200), (generate, ids | {"stream": True}, 200), (chat, turn, 200),
        (chat, turn | {"stream": True}, 200), (text, {"prompt": ["a"] * 200, "n": 2, "max_tokens": 2}, 200),
        ("/generate", {"input_ids": [[5]] * 200, "sampling_params": {"max_new_tokens": 2}}, 200),
        ("/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 2}}, 200),
        (generate, b"[", 400), (generate, {"token_ids": [5] * 5000}, 400), (text, {"prompt": "x" * 100_000}, 400),
        ("/update_weight_version", {"new_version": "a\\0b"}, 400),
        (generate, ids | {"sampling_params": {"structured_outputs": {"regex": "(a|b|ab)*" * 1800}}}, 400),
    ]
    for _ in range(2):
        for path, body, status in asked:
            for version in (10, 11):
                got = post(path, body, port, version)
                assert got == status, (path, got)
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET /health HTTP/2.0\\r\\nHost: localhost\\r\\n\\r\\n")
            assert b" 505 " in sock.recv(1000)
        leave({"token_ids": [5], "stream": True, "sampling_params": {"max_tokens": 2000, "ignore_eos": True}}, port)

class Server(cli_http.ApiServer):
    async def serve(self, sock, signals):
        port = sock.getsockname()[1]
        async def scene():
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, post, "/v1/completions", {"prompt": "a", "max_tokens": 1}, port)
            gc.collect()
            gc.disable()
            await loop.run_in_executor(None, client, port)
            while self.llm.num_inflight:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            print(json.dumps(garbage()), flush=True)
            signals.act()
        task = asyncio.create_task(scene())
        task.add_done_callback(lambda task: task.exception() and (task.print_stack(), os._exit(1)))
        return await super().serve(sock, signals)

from tokserve.config import Config
from tokserve.cli.serve import serve_config
serve_config(Config.make(model="demo", port=0, sglang_api=True), Server)
"""


@pytest.mark.slow
def test_requests_leave_no_cycles() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == {}
