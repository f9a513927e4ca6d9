"""Asks a server over HTTP, and knows what the tests need to know about it: vocabulary, limits, EOS."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import msgspec

from tests import documented
from tests.replies import good

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
CHAT_TOKENS, TOKENIZE, DETOKENIZE = "/v1/chat/completions/tokens", "/tokenize", "/detokenize"
ABORTS = ("/inference/v1/abort_requests", "/abort_requests")
JSON, MSGPACK = "application/json", "application/msgpack"
PROMPT = [5, 20, 31, 44, 7]
MESSAGES = [{"role": "user", "content": "What is 47 + 38?"}]


OTHERS_CONFIG: dict[str, Any] = {  # what is taken to hold for a server without /server_info
    "model": {"max_logprobs": 20},
    "scheduler": {"scheduling_policy": "fcfs", "max_num_seqs": 128},
    "server": {"tokens_only": False, "strict": False, "api_key": 0, "max_body_mb": 64},
}


class Api:
    """One server; for one without /server_info (vLLM) vocabulary and EOS must be given."""

    def __init__(self, url: str, vocab_size: int | None = None, eos: int | None = None) -> None:
        self.url = url.rstrip("/")
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.get = self.http.get
        answer, [model] = self.get("/server_info"), self.get("/v1/models").json()["data"][:1]
        self.other = answer.status_code != 200
        known = {"config": OTHERS_CONFIG} if self.other else answer.json()
        engine = known.get("engine") or model | {"vocab_size": vocab_size, "eos_token_ids": [eos]}
        self.config: dict[str, Any] = known["config"]
        self.vocab_size: int = engine["vocab_size"]
        self.max_model_len: int = engine["max_model_len"]
        self.eos: int = engine["eos_token_ids"][0]
        self.model: str = model["id"]
        self.tokens_only: bool = self.config["server"]["tokens_only"]
        if not self.other:
            self._document = self.get("/openapi.json").json()
            self.http.event_hooks["response"].append(self._check_documented)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def _check_documented(self, response: httpx.Response) -> None:
        """Every reply of these tests is one that /openapi.json has."""
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.read()
            documented.check(self._document, response)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """POST JSON, or `content=`."""
        return self.http.post(path, **kwargs) if "content" in kwargs else self.http.post(path, json=body, **kwargs)

    def ok(self, path: str, body: Any, **kwargs: Any) -> Any:
        """The reply to a body that must be accepted."""
        return good(self.post(path, body, **kwargs))

    def generate(self, params: dict[str, Any] | None = None, **fields: Any) -> Any:
        """The reply of the token route: 8 tokens of PROMPT unless told otherwise."""
        return self.ok(GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8} | (params or {})} | fields)

    def choice(self, params: dict[str, Any] | None = None, **fields: Any) -> Any:
        """The only choice of `generate`."""
        [choice] = self.generate(params, **fields)["choices"]
        return choice

    def refused(self, answer: httpx.Response, status: int, param: str | None, message: str = "") -> dict[str, Any]:
        """Check the one error shape, and return the error."""
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == JSON
        body = answer.json()
        assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}, body
        error: dict[str, Any] = body["error"]
        assert error["message"] and error["type"] and error["param"] == param, error
        assert message in error["message"], error
        return error

    def events(self, path: str, body: Any, **kwargs: Any) -> list[Any]:
        """The events of a stream, without [DONE]."""
        with self.http.stream("POST", path, json=body | {"stream": True}, **kwargs) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def packed(self, body: Any, **headers: str) -> Any:
        """The msgpack reply of the token route to a msgpack body."""
        answer = self.post(
            GENERATE,
            content=msgspec.msgpack.encode(body),
            headers={"Content-Type": MSGPACK, "Accept": MSGPACK} | headers,
        )
        assert answer.status_code == 200 and answer.headers["content-type"] == MSGPACK, answer.text
        return msgspec.msgpack.decode(answer.content)

    def metric(self, name: str) -> float:
        """A metric, named without its prefix, summed over labels."""
        name = ("vllm:" if self.other else "tokserve:") + name
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith((name + " ", name + "{"))]
        assert lines, name
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def load(self) -> dict[str, Any]:
        """`server_load` (requests in flight), `running`, `waiting`; another server's are read off its metrics."""
        if not self.other:
            load: dict[str, Any] = self.get("/load").json()
            return load
        running, waiting = self.metric("num_requests_running"), self.metric("num_requests_waiting")
        return {"server_load": running + waiting, "running": running, "waiting": waiting}

    def wait_for(self, requests: int) -> None:
        """Until this many requests are in flight and run; 0: until the engine is idle."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            load = self.load()
            if (load["server_load"] >= requests and load["running"]) if requests else not any(load.values()):
                return
            time.sleep(0.01)
        raise AssertionError(f"there are not {requests} requests in flight: {load}")


class Long:
    """`with Long(api, "x") as call:` a request that ends only when it is aborted; then `call.reply()`."""

    def __init__(self, api: Api, request_id: str, path: str = GENERATE, n: int = 8, **fields: Any) -> None:
        self._api = api
        prefix = "generate-tokens-" if path == GENERATE else "chatcmpl-"  # vLLM aborts by the reply's id alone
        self._abort = {"request_ids": [prefix + request_id]} if api.other else {"all": True}
        params = {"ignore_eos": True, "n": n, "temperature": 1.0, "max_tokens": None}
        if path == GENERATE:
            body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": params | fields.pop("params", {})}
        else:
            body = params | {"messages": MESSAGES}
        self._body = body | {"request_id": request_id} | fields
        self._path = path
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._answers.append(self._api.post(self._path, self._body))

    def __enter__(self) -> Long:
        before = self._api.load()["server_load"]
        self._thread.start()
        self._api.wait_for(requests=before + 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._api.post(ABORTS[0], self._abort)
        self._thread.join(60)
        self._api.wait_for(requests=0)

    def reply(self) -> Any:
        """The answer, once the request has ended."""
        self._thread.join(60)
        assert self._answers and self._answers[0].status_code == 200, self._answers
        return self._answers[0].json()
