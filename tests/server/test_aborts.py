"""/abort_requests: by id, by group, all; its reply and the replies of the aborted requests."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.server.byte_tokenizer import VOCAB
from tests.server.site import Caller, Site, site
from tokserve.client.inputs import GenerateRequest, token_prompt
from tokserve.features.observe.observers import metrics_of
from tokserve.protocol.params import SamplingParams
from tokserve.text.tokenizer import Tokenizer

GENERATE = "/inference/v1/generate"
ROUTES = ["/abort_requests", "/inference/v1/abort_requests"]
BODIES = {
    GENERATE: {"token_ids": [5, 6, 8], "sampling_params": {"max_tokens": 400}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "x"}]},
}

Scene = Callable[[Site, httpx.AsyncClient], Awaitable[None]]


def play(scene: Scene) -> Site:
    async def run() -> Site:
        s = site()
        s.llm.hold = True
        async with s.client() as client:
            await scene(s, client)
        assert not s.llm.num_inflight and not metrics_of(s.app.state.serving).inflight
        return s

    return asyncio.run(run())


async def begin(s: Site, rid: str, path: str = GENERATE, **fields: Any) -> Caller:
    before = s.llm.num_inflight
    caller = Caller(s, path, BODIES[path] | {"request_id": rid} | fields)
    await caller.wait_for(lambda _: s.llm.num_inflight > before)
    return caller


@pytest.mark.parametrize("route", ROUTES)
def test_an_abort_is_acknowledged_by_the_id_as_given(route: str) -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        a, b = await begin(s, "a"), await begin(s, "b")
        answer = await client.post(route, json={"request_ids": ["generate-tokens-a", "b", "nobody"]})
        assert answer.json() == {
            "status": "aborted",
            "aborted": 2,
            "results": {"generate-tokens-a": "aborted", "b": "aborted", "nobody": "not_found"},
        }
        await asyncio.gather(a.task, b.task)
        again = await client.post(route, json={"request_ids": ["a"]})
        assert again.json() == {"status": "aborted", "aborted": 0, "results": {"a": "finished"}}

    play(scene)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"request_ids": null}', b'{"request_ids": []}'])
def test_the_bare_route_aborts_all_that_it_is_not_told_to_choose_from(content: bytes) -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        callers = [await begin(s, "a"), await begin(s, "b", "/v1/chat/completions")]
        headers = {"Content-Type": "application/json"} if content.strip() else {}
        answer = await client.post(ROUTES[0], content=content, headers=headers)
        assert answer.json() | {"results": {}} == {"status": "aborted", "aborted": 2, "results": {}}
        assert not s.llm.num_inflight, "the reply comes after the requests have ended"
        await asyncio.gather(*(caller.task for caller in callers))

    play(scene)


@pytest.mark.parametrize("unsaid", [{"group_id": ""}, {"group_id": None, "all": False}])
def test_empty_abort_fields_equal_absent_ones(unsaid: dict[str, Any]) -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        a, b = await begin(s, "a"), await begin(s, "b")
        answer = await client.post(ROUTES[0], json={"request_ids": ["a"]} | unsaid)
        assert answer.json() == {"status": "aborted", "aborted": 1, "results": {"a": "aborted"}}
        await a.task
        s.llm.wake()
        await b.task

    play(scene)


def test_a_request_that_is_named_twice_counts_once() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        a = await begin(s, "a")
        answer = (await client.post(ROUTES[0], json={"request_ids": ["a", "generate-tokens-a", "a"]})).json()
        assert answer == {
            "status": "aborted",
            "aborted": 1,
            "results": {"a": "aborted", "generate-tokens-a": "aborted"},
        }
        await a.task

    play(scene)


def test_an_aborted_call_returns_200_with_what_it_has() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        s.llm.hold = False
        caller = await begin(s, "a", stream=True)
        await caller.wait_for(lambda c: len(c.writes) > 2)
        await client.post("/abort_requests", json={"request_ids": ["a"]})
        await caller.task
        assert caller.status == 200
        last = caller.writes[-2].decode()
        assert '"finish_reason":"abort"' in last and '"stop_detail":{"kind":"abort_user"}' in last
        assert '"token_ids":[]' in last and caller.writes[-1] == b"data: [DONE]\n\n"

    s = play(scene)
    assert 'request_aborts_total{cause="abort_user",engine="0",model_name="tiny"} 1.0' in s.get("/metrics").text


def test_an_abort_with_zero_tokens_is_200_with_empty_lists() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        params = {"logprobs": 1, "prompt_logprobs": 1}
        waiting = asyncio.create_task(
            client.post(GENERATE, json=BODIES[GENERATE] | {"request_id": "a", "sampling_params": params})
        )
        while not s.llm.num_inflight:
            await asyncio.sleep(0)
        await client.post("/abort_requests", json={"request_ids": ["a"]})
        answer = await waiting
        choice = answer.json()["choices"][0]
        assert answer.status_code == 200 and choice["token_ids"] == [] and choice["logprobs"] == {"content": []}
        assert answer.json()["prompt_logprobs"] == [None, None, None]

    play(scene)


def test_an_abort_with_zero_tokens_of_the_text_routes() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        chat, completions = "/v1/chat/completions", "/v1/completions"
        fields = {"echo": True, "logprobs": 1, "prompt_logprobs": 1, "request_id": "b"}
        waiting = [
            asyncio.create_task(client.post(chat, json=BODIES[chat] | {"logprobs": True, "request_id": "a"})),
            asyncio.create_task(client.post(completions, json=BODIES[completions] | fields)),
        ]
        while s.llm.num_inflight < 3:
            await asyncio.sleep(0)
        await client.post("/abort_requests", json={"request_ids": ["a", "b"]})
        choice = (await waiting[0]).json()["choices"][0]
        assert choice["logprobs"] == {"content": []} and choice["message"]["content"] == ""
        for choice in (await waiting[1]).json()["choices"]:
            assert choice["logprobs"]["token_logprobs"] == [None] and choice["prompt_logprobs"] == [None]

    play(scene)


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/v1/chat/completions", "chatcmpl-"),
        ("/v1/completions", "cmpl-"),
        ("/v1/responses", "resp_"),
        ("/v1/messages", "msg_"),
        (GENERATE, "generate-tokens-"),
    ],
)
@pytest.mark.parametrize("bare", [True, False])
def test_ids_of_every_route_with_and_without_their_prefix(path: str, prefix: str, bare: bool) -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        caller = await begin(s, "x", path)
        request_id = "x" if bare else prefix + "x"
        answer = await client.post("/abort_requests", json={"request_ids": [request_id]})
        assert answer.json() == {"status": "aborted", "aborted": 1, "results": {request_id: "aborted"}}
        await caller.task
        assert caller.status == 200

    play(scene)


def test_a_batch_of_prompts_is_one_request() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"], "request_id": "x"}))
        while s.llm.num_inflight < 2:
            await asyncio.sleep(0)
        await client.post("/abort_requests", json={"request_ids": ["x"]})
        assert [c["finish_reason"] for c in (await waiting).json()["choices"]] == ["abort", "abort"]

    play(scene)


def test_a_group() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        members = [await begin(s, rid, group_id="g") for rid in ("a", "b")]
        chat = await begin(s, "c", "/v1/chat/completions", group_id="g")
        other = await begin(s, "d", group_id="h")
        answer = await client.post("/abort_requests", json={"group_id": "g"})
        assert answer.json() == {"status": "aborted", "aborted": 3, "results": dict.fromkeys("abc", "aborted")}
        await asyncio.gather(chat.task, *(caller.task for caller in members))
        assert not other.task.done()
        again = await client.post("/abort_requests", json={"group_id": "g"})
        assert again.json() == {"status": "aborted", "aborted": 0, "results": {}}
        s.llm.wake()
        await other.task
        assert b'"finish_reason":"length"' in other.writes[0]

    s = play(scene)
    assert not metrics_of(s.app.state.serving).inflight


def test_all() -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        callers = [await begin(s, rid) for rid in ("a", "b")]
        request = GenerateRequest(
            request_id="of another front end", prompt=token_prompt([5], VOCAB), task=SamplingParams()
        )
        [other] = s.llm.submit([s.llm.prepare(request)])
        answer = await client.post("/abort_requests", json={"all": True})
        expected = dict.fromkeys(["a", "b", "of another front end"], "aborted")
        assert answer.json() == {"status": "aborted", "aborted": 3, "results": expected}
        await asyncio.gather(*(caller.task for caller in callers))
        assert [delta.finish_reason async for delta in other] == ["abort"]
        assert (await client.post("/abort_requests", json={"all": True})).json() == {
            "status": "aborted",
            "aborted": 0,
            "results": {},
        }

    play(scene)


@pytest.mark.some(2)
@pytest.mark.parametrize("selector", [{"request_ids": ["cmpl-a"]}, {"group_id": "g"}, {"all": True}])
def test_a_request_whose_text_is_being_tokenized(monkeypatch: pytest.MonkeyPatch, selector: dict[str, Any]) -> None:
    began, go_on = threading.Event(), threading.Event()
    encode = Tokenizer.encode_each

    def slow(*args: Any, **options: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return encode(*args, **options)

    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        monkeypatch.setattr(Tokenizer, "encode_each", slow)
        body = {"prompt": ["a"] * 200, "n": 2, "request_id": "a", "group_id": "g"}  # enough for a thread
        waiting = asyncio.create_task(client.post("/v1/completions", json=body))
        assert await asyncio.to_thread(began.wait, 60)
        answer = (await client.post(ROUTES[0], json=selector)).json()
        assert answer["aborted"] == 1 and set(answer["results"].values()) == {"aborted"}
        assert (await client.post(ROUTES[0], json=selector)).json()["aborted"] == 0
        go_on.set()
        choices = (await waiting).json()["choices"]
        assert len(choices) == 400 and {choice["finish_reason"] for choice in choices} == {"abort"}
        assert not s.llm.announced

    play(scene)


CHAT = {
    "messages": [{"role": "user", "content": "a"}],
    "model": "tiny",
    "max_tokens": 4,
    "chat_template_kwargs": {"unused": "a" * 50_000},  # enough for a thread
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions/render", {"prompt": ["a"] * 200}),
        ("/v1/chat/completions/render", CHAT),
        ("/v1/messages/render", CHAT),
    ],
)
def test_a_rendering_is_not_aborted(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]) -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        began, go_on = threading.Event(), threading.Event()
        encode, encode_each = Tokenizer.encode, Tokenizer.encode_each

        def slow(call: Any) -> Any:
            def wait(*args: Any, **options: Any) -> Any:
                began.set()
                assert go_on.wait(60)
                return call(*args, **options)

            return wait

        monkeypatch.setattr(Tokenizer, "encode", slow(encode))
        monkeypatch.setattr(Tokenizer, "encode_each", slow(encode_each))
        waiting = asyncio.create_task(client.post(path, json=body | {"request_id": "a"}))
        assert await asyncio.to_thread(began.wait, 60)
        for selector in ({"all": True}, {"request_ids": ["a"]}):
            assert (await client.post(ROUTES[0], json=selector)).json()["aborted"] == 0
        go_on.set()
        assert (await waiting).status_code == 200

    play(scene)


def test_a_refused_request_is_not_announced_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        body = {"prompt": ["a"] * 200 + ["b" * 5000], "request_id": "a"}
        assert (await client.post("/v1/completions", json=body)).status_code == 400
        assert not s.llm.announced
        answer = await client.post(ROUTES[0], json={"request_ids": ["a"]})
        assert answer.json() == {"status": "aborted", "aborted": 0, "results": {"a": "not_found"}}

    play(scene)


def test_an_empty_body_that_should_be_json_aborts_nothing() -> None:
    answer = site().post(ROUTES[0], content=b"", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


def test_a_dead_engine() -> None:
    s = site()
    s.llm.die()
    answer = s.post("/abort_requests", {"request_ids": ["a"]})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("path", sorted(BODIES))
def test_an_id_whose_client_has_left_is_no_conflict(path: str) -> None:
    """rl-faults E5: the second request comes before the server knows that the first one's client has gone."""

    async def scene(s: Site, client: httpx.AsyncClient) -> None:
        first = await begin(s, "a", path)
        again = Caller(s, path, BODIES[path] | {"request_id": "a"})
        while not again.read:
            await asyncio.sleep(0)
        first.hang_up()
        await asyncio.gather(first.task)
        s.llm.hold = False
        await again.task
        assert again.status == 200
        s.llm.hold = True
        taken = await begin(s, "b", path)
        assert (await client.post(path, json=BODIES[path] | {"request_id": "b"})).status_code == 409
        taken.hang_up()
        await asyncio.gather(taken.task)

    play(scene)
