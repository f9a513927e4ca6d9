"""Streams of an `AsyncLLM` against a fake engine: deltas, merging, stop strings, leaving, ids."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from tests.client.fake_engine import FakeEngine, echo, logprobs_for, stop, tokens
from tests.client.scenes import settled, waited
from tokserve.base.errors import (
    REFUSALS,
    Conflict,
    Overloaded,
    QueueFull,
    RequestError,
    RequestFailed,
    Unavailable,
)
from tokserve.client.async_llm import AsyncLLM, Stream, collect
from tokserve.client.inputs import GenerateRequest
from tokserve.client.outputs import ChoiceOutput, merge
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS
from tokserve.protocol.messages import Abort, EngineRequest, Stall, StepStats, Submit, SubmitReply
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, pack_ids

PLAIN = SamplingParams()


def test_deltas_stream_and_add_up(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([5, 6, 7], SamplingParams(logprobs=2, seed=9), request_id="r")
        assert stream.request_id == "r" and stream.seed == 9 and stream.prompt_ids == [5, 6, 7]
        [sent] = await waited(engine, EngineRequest)
        assert sent.request_id == "r#0" and sent.seed == 9 and sent.options.stream and sent.task.logprobs == 2
        engine.step(tokens("r#0", [11], logprobs=logprobs_for([11]), prompt_logprobs=logprobs_for([6, 7]), cached=3))
        first = await anext(stream)
        assert first == ChoiceOutput(
            0, [11], None, {LOGPROBS: logprobs_for([11])}, 3, values={PROMPT_LOGPROBS: logprobs_for([6, 7])}
        )
        engine.step(tokens("r#0", [12, 13], logprobs=logprobs_for([12, 13])), running=1, steps=2)
        assert await anext(stream) == ChoiceOutput(0, [12, 13], None, {LOGPROBS: logprobs_for([12, 13])})
        assert llm.stats == StepStats(running=1, steps=2) and llm.num_inflight == 1
        end = stop("stop_token", "stop", stop=14)
        engine.step(tokens("r#0", [14], end, logprobs=logprobs_for([14]), spans=[("v1", 0, 4)]))
        last = await anext(stream)
        assert (last.token_ids, last.finish_reason, last.stop_reason) == ([14], "stop", 14)
        assert last.stop_detail == "stop_token" and last.times == (0.25, 0.5, 1.5)
        assert last.weight_versions == [("v1", 0, 4)] and llm.num_inflight == 0
        assert [delta async for delta in stream] == []
        await stream.aclose()
        await settled(llm)
        assert not [m for m in engine.received if isinstance(m, Abort)]

    play(scene)


def test_deltas_can_be_taken_without_waiting(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream, has_output = llm.stream([5], PLAIN, request_id="r"), asyncio.Event()
        stream.listen(has_output.set)
        assert stream.num_choices == 1 and not list(stream.take()) and not stream.ended
        await waited(engine, EngineRequest)
        engine.step(tokens("r#0", [11]))
        await has_output.wait()
        assert [delta.token_ids for delta in stream.take()] == [[11]] and not stream.ended
        engine.step(tokens("r#0", [12], stop()))
        await settled(llm)
        assert [delta.token_ids for delta in stream.take()] == [[12]] and stream.ended

    play(scene)


def test_not_streamed_is_one_delta_per_choice_held_back_by_the_engine(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([5, 6, 7], SamplingParams(logprobs=2), stream=False)
        deltas = [delta async for delta in stream]
        assert len(deltas) == 1 and deltas[0].token_ids == [5, 6, 7] and deltas[0].logprobs == logprobs_for([5, 6, 7])
        assert not any(sent.options.stream for sent in engine.wait(EngineRequest))
        streamed = await collect(llm.stream([5, 6, 7], SamplingParams(logprobs=2)))
        assert streamed == deltas

    play(scene, echo)


def test_deltas_merge_until_they_are_read(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], SamplingParams(logprobs=1), request_id="r", text=True)
        ids = llm.tokenizer.encode("slow but sure " * 20, False) if llm.tokenizer else []
        for token in ids:
            engine.step(tokens("r#0", [token], logprobs=logprobs_for([token])))
        engine.step(tokens("r#0", [2], stop("eos", "stop"), logprobs=logprobs_for([2])))
        await settled(llm)
        [only] = [delta async for delta in stream]
        assert only.token_ids == [*ids, 2] and only.logprobs == logprobs_for([*ids, 2])
        assert only.text == "slow but sure " * 20 and only.finish_reason == "stop"

    play(scene)


def test_choices_interleave_and_have_their_own_seeds(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], SamplingParams(n=3, seed=(1 << 63) - 2), request_id="r")
        all_sent = await waited(engine, EngineRequest, 3)
        assert [sent.request_id for sent in all_sent] == ["r#0", "r#1", "r#2"]
        assert [sent.seed for sent in all_sent] == [(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)]
        assert stream.num_choices == 3 and all_sent[0].task.n == 1
        engine.step(tokens("r#2", [7]), tokens("r#0", [8]))
        engine.step(tokens("r#2", [9], stop()))
        await settled(llm)
        assert [(await anext(stream)).token_ids for _ in range(2)] == [[7, 9], [8]]
        engine.step(tokens("r#1", [3], stop()), tokens("r#0", [], stop()))
        await settled(llm)
        assert sorted([(d.index, tuple(d.token_ids)) async for d in stream]) == [(0, ()), (1, (3,))]
        assert llm.num_inflight == 0

    play(scene)


def test_a_seed_is_drawn_when_none_is_given(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        streams = [llm.stream([1], PLAIN) for _ in range(4)]
        all_sent = await waited(engine, EngineRequest, 4)
        assert [sent.seed for sent in all_sent] == [stream.seed for stream in streams]
        assert len({stream.seed for stream in streams}) == 4 and all(0 <= s.seed < 1 << 63 for s in streams)
        assert len({stream.request_id for stream in streams}) == 4

    play(scene)


def ids_of(llm: AsyncLLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return [token for char in text for token in llm.tokenizer.encode(char, False)]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("text", [True, False])
def test_a_stop_string_cuts_and_aborts(play: Callable[..., None], streamed: bool, include: bool, text: bool) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        params = SamplingParams(stop=["##"], logprobs=2, include_stop_str_in_output=include)
        stream = llm.stream([1], params, request_id="r", stream=streamed, text=text)
        [sent] = await waited(engine, EngineRequest)
        assert sent.options.stream, "the front end must see the text to find the stop"
        assert sent.task.stop == [] and not sent.task.include_stop_str_in_output
        ids = ids_of(llm, "ab#c##tail")
        for part in (ids[:5], ids[5:8], ids[8:]):
            engine.step(tokens("r#0", part, logprobs=logprobs_for(part)))
        [abort] = await waited(engine, Abort)
        assert abort.request_ids == ["r#0"] and abort.reason == "abort_stop_string"
        deltas = [delta async for delta in stream]
        assert streamed or len(deltas) == 1
        [done] = merge(deltas)
        assert done.token_ids == ids[:6] and done.logprobs == logprobs_for(ids[:6])
        assert done.text == (("ab#c##" if include else "ab#c") if text else None)
        assert (done.finish_reason, done.stop_reason, done.stop_detail) == ("stop", "##", "stop_string")
        assert done.weight_versions == [("v1", 0, 6)] and done.times == (0.25, 0.5, 1.5)
        assert llm.num_inflight == 0
        assert len([m for m in engine.received if isinstance(m, Abort)]) == 1

    play(scene)


def test_a_possible_stop_is_held_back_from_the_text_but_not_its_tokens(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], SamplingParams(stop="##"), request_id="r", text=True)
        ids = ids_of(llm, "a#b")
        received = []
        for token in ids:
            engine.step(tokens("r#0", [token]))
            delta = await anext(stream)
            received.append((delta.token_ids, delta.text))
        assert received == [([ids[0]], "a"), ([ids[1]], ""), ([ids[2]], "#b")]
        engine.step(tokens("r#0", ids_of(llm, "#"), stop()))
        last = await anext(stream)
        assert last.text == "#" and last.finish_reason == "length"

    play(scene)


def test_a_stop_string_in_the_last_output_wins_and_needs_no_abort(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], SamplingParams(stop="##"), request_id="r", text=True)
        ids = ids_of(llm, "a##b")
        engine.step(tokens("r#0", ids, stop(), spans=[("v1", 0, 2), ("v2", 2, 4)]))
        [done] = await collect(stream)
        assert (done.text, done.token_ids, done.finish_reason) == ("a", ids[:3], "stop")
        assert done.weight_versions == [("v1", 0, 2), ("v2", 2, 3)]
        await settled(llm)
        assert not [m for m in engine.received if isinstance(m, Abort)]

    play(scene)


@pytest.mark.parametrize("include", [True, False])
def test_the_stop_token_is_text_on_request_only(play: Callable[..., None], include: bool) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
        ids = ids_of(llm, "ab")
        for end in ("eos", "stop_token", "max_tokens"):
            stream = llm.stream([1], params, request_id=end, text=True)
            engine.step(tokens(f"{end}#0", [*ids, 2], stop(end)))
            [done] = await collect(stream)
            assert done.text == ("ab<|im_end|>" if include or end == "max_tokens" else "ab")
            assert done.token_ids == [*ids, 2]

    play(scene)


def test_text_can_be_turned_off(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        [done] = await collect(llm.stream([5, 6], SamplingParams(detokenize=False), text=True))
        assert done.text == "" and done.token_ids == [5, 6]
        with pytest.raises(RequestError) as caught:
            llm.stream([5], SamplingParams(detokenize=False, stop="a"))
        assert caught.value.field == "stop"

    play(scene, echo)


async def leave_by_close(stream: Stream) -> None:
    await anext(stream)
    await stream.aclose()
    await stream.aclose()


async def leave_by_with(stream: Stream) -> None:
    with pytest.raises(ValueError):
        async with stream:
            raise ValueError


async def leave_by_collect(stream: Stream) -> None:
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_with, leave_by_collect])
def test_leaving_aborts_what_has_not_ended(
    play: Callable[..., None], leave: Callable[[Stream], Awaitable[None]]
) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], SamplingParams(n=3), request_id="r")
        engine.step(tokens("r#1", [5], stop()), tokens("r#0", [4]))
        await settled(llm)
        await leave(stream)
        [abort] = await waited(engine, Abort)
        assert abort == Abort(["r#0", "r#2"], "abort_disconnect")
        assert llm.num_inflight == 0
        engine.step(tokens("r#0", [4]))
        await settled(llm)
        again = llm.stream([1], PLAIN, request_id="r")
        engine.step(tokens("r#0", [9], stop()))
        assert (await collect(again))[0].token_ids == [9]

    play(scene)


def test_streams_that_are_left_together_are_aborted_by_one_message(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        streams = [llm.stream([1], PLAIN, request_id=f"r{i}") for i in range(50)]
        await waited(engine, EngineRequest, 50)
        for stream in streams:
            await stream.aclose()
        again = llm.stream([1], PLAIN, request_id="r0")  # after the abort of the one before
        [abort] = await waited(engine, Abort)
        assert abort == Abort([f"r{i}#0" for i in range(50)], "abort_disconnect")
        await waited(engine, EngineRequest, 51)
        await again.aclose()

    play(scene)


def test_dropping_a_stream_aborts(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        async def reader() -> None:
            async for _ in llm.stream([1], PLAIN, request_id="cancelled"):
                pass

        llm.stream([1], PLAIN, request_id="never read")
        task = asyncio.create_task(reader())
        await waited(engine, EngineRequest, 2)
        task.cancel()
        await asyncio.wait([task])
        del task
        gc.collect()
        aborts = await waited(engine, Abort, 2)
        assert {abort.request_ids[0] for abort in aborts} == {"never read#0", "cancelled#0"}
        assert {abort.reason for abort in aborts} == {"abort_disconnect"} and llm.num_inflight == 0

    play(scene)


def test_closing_ends_the_wait_of_another_task(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], PLAIN)

        async def read() -> list[ChoiceOutput]:
            return [delta async for delta in stream]

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="one consumer"):
            await anext(stream)
        stream.close()
        assert await reading == []

    play(scene)


def test_a_cancelled_wait_loses_nothing(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], PLAIN, request_id="r")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.02)
        engine.step(tokens("r#0", [5], stop()))
        assert (await anext(stream)).token_ids == [5]
        assert not [m for m in engine.received if isinstance(m, Abort)]

    play(scene)


def test_an_id_in_flight_is_a_conflict(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], PLAIN, request_id="chatcmpl-x")
        for same in ("chatcmpl-x", "x", "generate-tokens-x"):
            with pytest.raises(Conflict) as caught:
                llm.stream([1], PLAIN, request_id=same)
            assert caught.value.status == 409 and caught.value.field == "request_id"
        assert stream.request_id == "chatcmpl-x"
        await waited(engine, EngineRequest)
        engine.step(tokens("x#0", [5], stop()))
        await collect(stream)
        llm.stream([1], PLAIN, request_id="x").close()
        assert len(await waited(engine, EngineRequest, 2)) == 2

    play(scene)


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        ("duplicate_id", 409, Conflict),
        ("queue_full", 429, QueueFull),
        ("draining", 503, Overloaded),
        ("quarantined", 503, Unavailable),
        ("invalid", 400, RequestError),
        ("internal", 500, RequestFailed),
    ],
)
def test_a_refusal_of_the_engine_is_raised_before_any_output(
    play: Callable[..., None], refusal: str, status: int, kind: type[RequestError]
) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        engine.admission = lambda submit: SubmitReply(submit.call_id, refusal, "no, because", 7)
        stream = llm.stream([1], SamplingParams(n=2), request_id="r")
        for refused in (stream.accepted(), stream.accepted(), anext(stream)):
            with pytest.raises(kind, match="no, because") as caught:
                await refused
            assert caught.value.status == status
            assert not isinstance(caught.value, Overloaded) or caught.value.retry_after == 7
        assert llm.num_inflight == 0 and llm._engine.requests.idle
        engine.admission = lambda submit: SubmitReply(submit.call_id)
        again = llm.stream([1], PLAIN, request_id="r")
        await again.accepted()
        stream.close()
        del stream
        gc.collect()
        assert llm.num_inflight == 1
        await settled(llm)
        assert not [m for m in engine.received if isinstance(m, Abort)], "of what was refused, nothing is to abort"

    assert {refusal} <= set(REFUSALS)
    play(scene)


def test_giving_up_before_the_engine_has_answered(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        engine.admission = lambda submit: None
        stream = llm.stream([1], PLAIN, request_id="r")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.accepted(), 0.01)
        stream.close()
        [abort] = await waited(engine, Abort)
        assert abort.request_ids == ["r#0"] and llm.num_inflight == 0
        engine.admission = lambda submit: SubmitReply(submit.call_id)
        again = llm.stream([1], PLAIN, request_id="r")
        await again.accepted()
        [first, _] = engine.wait(Submit, 2)
        engine.send(SubmitReply(first.call_id, "queue_full", "no"))
        engine.step(tokens("r#0", [5], stop()))
        assert (await collect(again))[0].token_ids == [5], "the late reply is about the other one"

    play(scene)


def test_the_late_end_of_a_request_that_was_given_up_is_not_its_successors(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        for _ in range(2):  # dropped twice under the same id, before the engine has replied
            given_up = llm.stream([1], PLAIN, request_id="r")
            given_up.close()
        again = llm.stream([1], PLAIN, request_id="r")
        await again.accepted()  # the engine has ended the others before
        engine.step(tokens("r#0", [5], stop()))
        assert (await collect(again))[0].token_ids == [5]
        assert llm._engine.requests.idle

    play(scene)


def test_a_consumer_may_decline_more_output(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], SamplingParams(n=2), request_id="r")
        await stream.accepted()
        engine.step(tokens("r#0", [5], stop()))
        await stream.__anext__()
        stream.stall(True)
        stream.stall(False)
        assert await waited(engine, Stall, 2) == [Stall(["r#1"], True), Stall(["r#1"], False)]
        engine.step(tokens("r#1", [5], stop()))
        assert (await collect(stream))[0].index == 1
        stream.stall(True)  # nothing is left to be stalled
        assert not await llm.abort("r") or len([m for m in engine.received if isinstance(m, Stall)]) == 2

    play(scene)


def test_several_prompts_are_one_submission(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        params = SamplingParams(n=2, max_tokens=1)
        requests = [
            GenerateRequest(
                request_id="cmpl-r",
                prompt=TokenPrompt(pack_ids(ids)),
                task=params,
                first_choice=2 * i,
                options=RequestOptions(stream=True, group_id="g"),
            )
            for i, ids in enumerate(([5], [6, 7], [8]))
        ]
        streams = llm.submit([llm.prepare(request) for request in requests], "10.0.0.1")
        for same in ("r", "chatcmpl-r"):
            with pytest.raises(Conflict):
                llm.stream([1], PLAIN, request_id=same)
        [submit] = await waited(engine, Submit)
        assert (submit.request_id, submit.client) == ("r", "10.0.0.1")
        assert {sent.options.group_id for sent in submit.requests} == {"g"}
        assert [sent.request_id for sent in submit.requests] == [f"r#{i}" for i in range(6)]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert [[c.token_ids for c in result] for result in results] == [[[5]] * 2, [[6]] * 2, [[8]] * 2]
        assert [[c.index for c in result] for result in results] == [[0, 1]] * 3

    play(scene, echo)


def test_an_id_may_be_used_again_right_after_its_iteration_is_left(play: Callable[..., None]) -> None:
    """rl-faults E5: the generator that was left is closed in a later turn of the event loop."""

    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        for attempt in (1, 2):
            outputs = llm.generate({"prompt_token_ids": [1]}, PLAIN, request_id="r")
            arrival = asyncio.ensure_future(anext(outputs))
            await waited(engine, EngineRequest, attempt)
            engine.step(tokens("r#0", [5]))
            await arrival
            if attempt == 1:
                asyncio.get_running_loop().call_soon(lambda left=outputs: asyncio.ensure_future(left.aclose()))
        await outputs.aclose()

    play(scene)
