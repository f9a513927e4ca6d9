"""Code blocks of the documentation that need no framework do what the page says: curl against a server, and Python."""

from __future__ import annotations

import ast
import asyncio
import base64
import inspect
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
import requests as http
import torch
from transformers import AutoModelForCausalLM

from tests.docs.snippets import ROOT, Snippet, requests, snippets
from tests.threads import ServerThread
from tests.waiting import PATIENCE
from tokserve import LLM, SamplingParams
from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import AsyncClient, Client, PromptsFailed
from tokserve.train import PolicyModel

pytestmark = pytest.mark.slow
RUN = [
    snippet for snippet in snippets() if snippet.is_run and snippet.page not in ("README.md", "benchmarks/README.md")
]
PYTHON = [snippet for snippet in RUN if snippet.language == "python"]
CURL = [snippet for snippet in RUN if snippet.language in ("sh", "bash") and requests(snippet.text)]
PROMPTS = [[286, 84, 82], [5, 6, 7, 9]]
FLAGS = {"docs/on-policy.md": ("--enable-lora", "--max-lora-rank", "16")}


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    """Servers by their options, started when a block needs one."""
    started: dict[tuple[str, ...], ServerThread] = {}

    def server(flags: tuple[str, ...]) -> ServerThread:
        if flags not in started:
            started[flags] = ServerThread("demo", *flags).__enter__()
            if "--sessions" in flags:
                started[flags].post("/sessions", {"session_id": "task-17"})
        return started[flags]

    yield server
    for one in started.values():
        one.__exit__(None, None, None)


async def names(page: str, url: str) -> dict[str, Any]:
    """What a block of this page may use without defining it."""
    local: dict[str, Any] = {"prompts": PROMPTS, "url": url, "torch": torch}
    local["policy"] = local["model"] = PolicyModel.from_pretrained(DEMO_DIR)
    if page == "docs/client.md":
        return local | {"client": Client(url), "PromptsFailed": PromptsFailed}
    if page == "docs/token-api.md":
        return local | {"prompt": PROMPTS[0], "output": [7, 8], "student_ids": [[5, 6], [7, 8]]}
    if page in ("docs/on-policy.md", "docs/rl.md"):
        client = AsyncClient(url)
        sampling = {
            "max_tokens": 8,
            "temperature": 0.8,
            "top_p": 0.95,
            "return_sampling_mask": True,
            "ignore_eos": True,
        }
        rollouts = await client.generate(PROMPTS, n=8, **sampling)
        rows = [[*one.prompt_ids.tolist(), *one.token_ids.tolist()] for one in rollouts]
        logits = [torch.randn(len(one.token_ids), 288, requires_grad=True) for one in rollouts]
        ids = torch.tensor([PROMPTS[1] + [17] * 4])
        local |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "teacher": client, "student_logits": logits}
        if page == "docs/rl.md":
            local["model"] = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.bfloat16)
        return local | {"client": client, "rows": rows, "starts": [len(one.prompt_ids) for one in rollouts]}
    return local


async def run_python(snippet: Snippet, url: str, code: str) -> None:
    modules = {"httpx": httpx, "requests": http, "numpy": numpy, "io": io, "base64": base64, "pytest": pytest}
    classes = {"AutoModelForCausalLM": AutoModelForCausalLM, "LLM": LLM, "SamplingParams": SamplingParams}
    scope = {"__name__": "snippet", **modules, **classes, **await names(snippet.page, url)}
    program = compile(code, str(snippet), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waits = bool(program.co_flags & inspect.CO_COROUTINE)
    if waits:
        await eval(program, scope)
    else:
        await asyncio.to_thread(exec, program, scope)
    client = scope.get("client")
    if isinstance(client, AsyncClient):
        await client.close()


@pytest.mark.parametrize("snippet", PYTHON, ids=str)
@pytest.mark.usefixtures("engine_threads")
def test_python_runs(snippet: Snippet, servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = servers(snippet.flags or FLAGS.get(snippet.page, ())).url
    code = snippet.text.replace("http://127.0.0.1:8000", url).replace("from tokserve_client", "from tokserve.rl")
    code = code.replace("/tmp/", f"{tmp_path}/").replace('"DIR"', repr(str(DEMO_DIR)))
    if snippet.page == "docs/lora.md":
        subprocess.run([sys.executable, ROOT / "examples" / "lora.py", "--write", "adapters/sql"], check=True)
    asyncio.run(run_python(snippet, url, code))


@pytest.mark.parametrize("snippet", CURL, ids=str)
def test_curl_is_answered(snippet: Snippet, servers: Any) -> None:
    url = servers(snippet.flags).url
    for request in requests(snippet.text):
        done = httpx.request(
            request.method, url + request.path, headers=request.headers, content=request.body, timeout=PATIENCE
        )
        assert done.status_code == 200, f"{request.method} {request.path}: {done.text}"
