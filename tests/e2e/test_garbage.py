"""Generated bad bodies over every POST route of a real server: refused in one format, and other requests are served."""

import json
import random

import httpx
import msgspec

from tests.e2e.server import Server
from tests.route_table import CONTROL
from tests.server.test_refusals import error_of, garbage, is_json, may_succeed

FIXED = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 1}
BODIES = 300


def test_bad_bodies_are_refused_and_leave_the_engine_as_it_was(demo: Server) -> None:
    before = demo.generate([5, 20, 31, 44, 7], **FIXED)
    paths = demo.get("/openapi.json").json()["paths"]
    routes = sorted(path for path, methods in paths.items() if "post" in methods and path not in {"/ping"} | CONTROL)
    assert len(routes) >= 8
    rng = random.Random(7)
    refused = 0
    with httpx.Client(base_url=demo.url, timeout=60) as client:
        for i in range(BODIES):
            route, packed, raw = routes[i % len(routes)], i % 5 == 0, garbage(rng)
            if packed and is_json(raw):
                raw = msgspec.msgpack.encode(json.loads(raw))
            headers = {"Content-Type": "application/msgpack" if packed else "application/json"}
            answer = client.post(route, content=raw, headers=headers)
            if answer.status_code == 200 and may_succeed(route.removesuffix("/render"), raw, packed):
                continue
            assert 400 <= answer.status_code < 500, (route, raw, answer.text)
            assert error_of(answer), (route, raw)
            refused += 1
    assert refused > BODIES * 0.8
    demo.wait_idle()
    assert demo.get("/health?deep=1").status_code == 200
    after = demo.generate([5, 20, 31, 44, 7], **FIXED)
    assert after["choices"] == before["choices"] and after["prompt_logprobs"] == before["prompt_logprobs"]
