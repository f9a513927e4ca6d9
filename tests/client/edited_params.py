"""A process for `test_new_option`: a server and a client with another `params.py`, in front of a fake engine.

`python -m tests.client.edited_params PARAMS.PY ADDRESS MODEL < CASES`: each case is [path, body].  Prints, as JSON, the
options and the task that reached the engine, or the error, of each case, and the schemas of the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from typing import Any

import httpx
import msgspec


def load_params(path: str) -> None:
    """Make the file the module `tokserve.protocol.params`, before anything imports that."""
    spec = importlib.util.spec_from_file_location("tokserve.protocol.params", path)
    assert spec is not None and spec.loader is not None and "tokserve.protocol.params" not in sys.modules
    sys.modules["tokserve.protocol.params"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


async def serve(address: str, model: str, cases: list[Any]) -> list[Any]:
    """The results of all cases, then the schemas."""
    from tests.client.fake_engine import FakeEngine, config, echo
    from tokserve.client.async_llm import AsyncLLM
    from tokserve.protocol.messages import EngineRequest
    from tokserve.server.app import build_app

    results: list[Any] = []
    with FakeEngine(address, script=echo) as engine:
        llm = AsyncLLM.from_config(config(model))
        await llm.connect(address)
        transport = httpx.ASGITransport(build_app(llm, llm.config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path, body in cases:
                answer = await client.post(path, json=body)
                if answer.status_code == 200:
                    request = engine.wait(EngineRequest)[-1]
                    results.append([msgspec.to_builtins(request.options), msgspec.to_builtins(request.task)])
                else:
                    results.append([answer.status_code, answer.json()["error"]])
            results.append((await client.get("/openapi.json")).json()["components"]["schemas"])
        await llm.shutdown()
    return results


if __name__ == "__main__":
    load_params(sys.argv[1])
    print(json.dumps(asyncio.run(serve(sys.argv[2], sys.argv[3], json.load(sys.stdin)))))
