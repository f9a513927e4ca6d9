"""`make test-clients`: real clients, each in an environment of its own, against one demo server.

Environments are made under build/clients/NAME from tests/clients/NAME.txt (pinned) and kept until that file changes;
a client may use another's.  Agents are npm packages, of tests/clients/agents/package.json, and are skipped without npm.
What a client needs at run time it finds here: the hub is switched off.  With --record the traffic goes through a small
proxy and one example of each kind of request is written to tests/conformance/recorded/NAME.jsonl, which `make test`
sends again.  A client that has no driver here is recorded with `--record NAME=COMMAND`, where {url} is the server's
address.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.clients.agent_script import Script, model_with_context
from tests.conformance.shapes import reply_shape, shape
from tests.e2e.server import Server
from tests.environments import OFFLINE, environment, npm_environment
from tests.models.classifiers import classifier
from tests.models.pictures import write_served
from tokserve.checkpoint import DEMO_DIR
from tokserve.testing import scripted_server
from tokserve.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
RECORDED = HERE.parent / "conformance" / "recorded"
CLIENTS = {
    "openai2": "openai",
    "openai3": "openai",
    "anthropic": "anthropic",
    "renderers": "renderers",
    "trl": "trl",
    "trl_exact": "trl_exact",
    "lm_eval": "lm_eval",
    "frameworks": "frameworks",
    "closed": "closed",
    "loop": "loop",
    "schemathesis": "schemathesis",
    "verifiers": "verifiers",
    "images": "images",
    "trl_images": "trl_images",
    "embeddings": "embeddings",
    "rewards": "rewards",
    "sglang": "sglang",
    "schemathesis_sglang": "schemathesis",
    "schemathesis_pooling": "schemathesis",
    "schemathesis_classifier": "schemathesis",
    "schemathesis_sglang_classifier": "schemathesis",
    "agents": "agents",
    "agent_loops": "agent_loops",
    "agent_scores": "agent_scores",
}
ENVIRONMENTS = {  # of clients that have none of their own
    "closed": "frameworks",
    "loop": "openai3",
    "trl_exact": "trl",
    "images": "verifiers",
    "trl_images": "trl",
    "embeddings": "frameworks",
    "rewards": "frameworks",
    "schemathesis_sglang": "schemathesis",
    "schemathesis_pooling": "schemathesis",
    "schemathesis_classifier": "schemathesis",
    "schemathesis_sglang_classifier": "schemathesis",
    "agent_loops": "frameworks",
    "agent_scores": "frameworks",
}
SHORT = ("--max-model-len", "48")  # schemathesis asks for 1024 choices of the whole context
FLAGS = {  # of clients that have a server of their own
    "schemathesis": (*SHORT, "--sessions"),
    "schemathesis_sglang": (*SHORT, "--sglang-api", "--profiler-dir", str(BUILD / "profiles")),
    "schemathesis_pooling": (*SHORT, "--runner", "pooling"),
    "schemathesis_classifier": SHORT,
    "schemathesis_sglang_classifier": (*SHORT, "--sglang-api", "--profiler-dir", str(BUILD / "profiles")),
    "closed": ("--structured-outputs-closed",),
    "verifiers": ("--return-sampling-mask",),
    "loop": ("--chat-template", str(HERE / "plain.jinja")),
    "trl_exact": ("--enable-lora", "--dtype", "bfloat16"),
    "embeddings": ("--runner", "pooling", "--dtype", "float32"),
    "sglang": ("--sglang-api",),
    "agent_scores": ("--sessions", "--hf-overrides", '{"max_position_embeddings": 16384}'),
}
CLASSIFIERS = {"rewards", "schemathesis_classifier", "schemathesis_sglang_classifier"}  # served a reward model
IMAGES = {"images", "trl_images"}  # of clients whose server has a model that reads images
SCRIPTED = {"agents", "agent_loops"}  # whose server has a script instead of a model
NPM = {"agents"}  # npm packages
WITH_OPS = {"trl_exact"}  # run by this project's interpreter, which finds their packages at CLIENT_PACKAGES
# the options of a script's server; Codex knows the last two names
OF_SCRIPT: dict[str, Any] = {"served_model_name": ["demo", "gpt-5.5", "gpt-6.2-sol"], "sessions": True}
SECONDS = 1200.0
LARGEST = 4000  # bytes of a recorded body


def python_of(name: str) -> Path:
    """The interpreter of a client's environment, which is made if it is not there or not the one that is wanted."""
    name = ENVIRONMENTS.get(name, name)
    if name in NPM:
        npm_environment(HERE / name / "package.json", BUILD / name)
        return Path(sys.executable)
    return environment(HERE / f"{name}.txt", BUILD / name)


def drive(name: str, url: str, model: Path) -> dict[str, Any] | None:
    """Run a client's driver against a server of `model`; its report, or None if it failed."""
    python = python_of(name)
    env = {**os.environ, **OFFLINE}
    if name in WITH_OPS:
        env |= {"CLIENT_PACKAGES": str(next(python.parents[1].glob("lib/python*/site-packages")))}
        python = Path(sys.executable)
    if name in NPM:
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        env |= {"AGENTS_BIN": str(BUILD / name / "node_modules" / ".bin"), "PYTHONPATH": path}
    command = [str(python), str(HERE / f"run_{CLIENTS[name]}.py"), url, str(model)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{name}: FAILED, no end after {SECONDS:.0f} s")
        return None
    if done.returncode:
        print(f"{name}: FAILED\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return None
    actual: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    versions = " ".join(f"{package} {number}" for package, number in actual["versions"].items())
    print(f"{name}: {actual['checks']} checks passed in {time.monotonic() - began:.0f} s ({versions})", flush=True)
    if actual["not_served"]:
        print(f"  left out, not served: {' '.join(sorted(set(actual['not_served'])))}")
    return actual


class Recorder(BaseHTTPRequestHandler):
    """A proxy that remembers one exchange of each kind."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    kinds: dict[str, dict[str, Any]] = {}

    def do_POST(self) -> None:
        """Pass on, and remember."""
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower().startswith(("content-type", "accept", "x-"))
        }
        answer = httpx.request(self.command, self.upstream + self.path, content=raw, headers=headers, timeout=SECONDS)
        self._remember(raw, answer)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name not in ("content-length", "connection", "transfer-encoding", "content-encoding"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST

    def _remember(self, raw: bytes, answer: httpx.Response) -> None:
        if len(raw) > LARGEST or self.path == "/openapi.json":
            return
        body = json.loads(raw) if raw else None
        sent = {name.lower(): value for name, value in self.headers.items() if name.lower().startswith("x-")}
        sent = {name: value for name, value in sent.items() if not name.startswith("x-stainless")}
        entry = {"method": self.command, "path": self.path, "headers": sent, "body": body, "status": answer.status_code}
        kind = json.dumps([self.command, self.path, sorted(sent), shape(body), answer.status_code])
        actual = reply_shape(answer.headers.get("content-type", ""), answer.text)
        self.kinds.setdefault(kind, entry | {"reply": actual})

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Proxy(ThreadingHTTPServer):
    """Takes as many connections at once as a client opens."""

    request_queue_size = 512
    daemon_threads = True


@contextmanager
def recording(stem: str, url: str) -> Iterator[str]:
    """The address of a proxy to `url`; what went through it is written at the end, to `stem`.jsonl."""
    handler = type("Handler", (Recorder,), {"upstream": url, "kinds": {}})
    with Proxy(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()
    RECORDED.mkdir(exist_ok=True)
    lines = [json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in handler.kinds.values()]
    (RECORDED / f"{stem}.jsonl").write_text("\n".join(lines) + "\n")


def run(name: str, url: str, model: Path, record: bool) -> bool:
    """Drive a client, perhaps through the proxy; whether it passed."""
    if not record:
        return drive(name, url, model) is not None
    with recording(CLIENTS[name], url) as proxy:
        return drive(name, proxy, model) is not None


@cache
def model_of(name: str) -> Path:
    """The checkpoint that the client's server serves as "demo"."""
    if name in SCRIPTED:
        return model_with_context(BUILD / "models" / "scripted")
    if name in CLASSIFIERS:
        return classifier(BUILD / "models" / "reward", "qwen3", {"0": "reward"})
    return write_served(BUILD / "models" / "vl") if name in IMAGES else DEMO_DIR


def record(requested: str) -> int:
    """Record what a command sends; `command` is NAME=COMMAND."""
    stem, _, command = requested.partition("=")
    with Server("demo") as server, recording(stem, server.url) as proxy:
        return subprocess.run([word.replace("{url}", proxy) for word in shlex.split(command)]).returncode


def main() -> int:
    """All clients, or those that are named."""
    parser = argparse.ArgumentParser(description="Run real clients against a demo server.")
    parser.add_argument(
        "names", nargs="*", choices=[*CLIENTS, []], metavar="CLIENT", help=f"Of {', '.join(CLIENTS)}. Default: all."
    )
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="NAME=COMMAND",
        help="Write tests/conformance/recorded/NAME.jsonl: of the clients, or of a command that talks to {url}.",
    )
    args = parser.parse_args()
    if args.record:
        return record(args.record)
    names = args.names or list(CLIENTS)
    if shutil.which("npm") is None:
        for name in NPM.intersection(names):
            print(f"{name}: SKIPPED, there is no npm: install Node.js")
        names = [name for name in names if name not in NPM]
    for name in names:
        python_of(name)
    failed = []
    alive = True
    scripted = [name for name in names if name in SCRIPTED]
    for name in scripted:
        model = model_of(name)
        with scripted_server(Script(Tokenizer.load(model)), model, **OF_SCRIPT) as running:
            if not run(name, running.url, model, False):
                failed.append(name)
    for model, flags in sorted({(model_of(name), FLAGS.get(name, ())) for name in names if name not in SCRIPTED}):
        with Server(model, *flags, "--served-model-name", "demo") as server:
            for name in names:
                if name in SCRIPTED or (model_of(name), FLAGS.get(name, ())) != (model, flags):
                    continue
                records = args.record == "" and not flags and model == DEMO_DIR
                if not run(name, server.url, model, records):
                    failed.append(name)
            alive &= server.get("/health?deep=1").status_code == 200
    print(f"{len(names) - len(failed)} of {len(names)} clients passed" + ("" if alive else "; THE SERVER IS NOT WELL"))
    return 1 if failed or not alive else 0


if __name__ == "__main__":
    sys.exit(main())
