"""LLM: the offline API over real processes: a fake engine, and the real one around a scripted executor."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load

from tests.client.fake_engine import config, logprobs_for
from tests.client.scenes import make
from tests.text.checkpoints import write_chatml
from tests.waiting import until
from tokserve.base.errors import Conflict, EngineDead, RequestError, StartError
from tokserve.client import launch
from tokserve.client.results import Logprob, PromptLogprobs, TokenLogprobs
from tokserve.features.offline.llm import LLM
from tokserve.protocol.adapter_choice import LoRARequest
from tokserve.protocol.commands import COMMANDS
from tokserve.protocol.messages import LoadedAdapter, Status
from tokserve.protocol.params import SamplingParams
from tokserve.text.token_texts import TokenTexts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_chatml(tmp_path_factory.mktemp("model"))
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    return directory


@pytest.fixture(scope="module")
def fake(model: Path) -> Iterator[LLM]:
    with make(model, model_options={"generation_config": "auto"}) as llm:
        yield llm


def test_outputs_keep_the_order_of_the_prompts(fake: LLM) -> None:
    outputs = fake.generate(["one and two", [4, 5, 6], "three"], SamplingParams(logprobs=2), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["one and two", None, "three"]
    assert [output.outputs[0].token_ids for output in outputs] == [output.prompt_token_ids for output in outputs]
    assert outputs[1].prompt_token_ids == [4, 5, 6]
    assert outputs[0].outputs[0].text == "one and two"
    first = outputs[1].outputs[0]
    assert (first.index, first.finish_reason, first.stop_reason) == (0, "length", None)
    assert first.logprobs is not None and len(first.logprobs) == 3
    assert "".join(row[token].decoded_token for row, token in zip(first.logprobs, first.token_ids, strict=True)) == (
        first.text
    )
    assert first.cumulative_logprob == pytest.approx(-1.5)
    assert len({output.request_id for output in outputs}) == 3 and all(output.finished for output in outputs)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([4, 5], [[4, 5]]),
        ([[4, 5], [6]], [[4, 5], [6]]),
        (np.array([4, 5]), [[4, 5]]),
        ([np.array([4, 5])], [[4, 5]]),
        (np.array([[4, 5], [6, 7]]), [[4, 5], [6, 7]]),
        ([], []),
        ({"prompt_token_ids": [4, 5]}, [[4, 5]]),
        ([{"prompt_token_ids": [4, 5], "multi_modal_data": None}, [6]], [[4, 5], [6]]),
        ({"prompt": "said", "prompt_token_ids": [4]}, [[4]]),
    ],
)
def test_one_prompt_or_several(fake: LLM, prompts: Any, ids: list[list[int]]) -> None:
    assert [output.prompt_token_ids for output in fake.generate(prompts, use_tqdm=False)] == ids


@pytest.mark.parametrize("pair", [("one", ["two"]), ("one", None), (["one"], ["two"]), ([[4, 5]], ["two"])])
def test_texts_are_scored_by_a_model_that_pools(fake: LLM, pair: tuple[Any, Any]) -> None:
    with pytest.raises(RequestError, match=r'LLM\(\.\.\., runner="pooling"\) scores texts'):
        fake.score(*pair)


def test_enqueued_requests_are_waited_for_together_and_once(fake: LLM) -> None:
    ids = fake.enqueue(["one", [4, 5]], SamplingParams(max_tokens=9)) + fake.enqueue({"prompt_token_ids": [6]})
    outputs = fake.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids and len(set(ids)) == 3
    assert [output.prompt for output in outputs] == ["one", None, None]
    assert [output.outputs[0].token_ids for output in outputs] == [output.prompt_token_ids for output in outputs]
    assert fake.wait_for_completion(use_tqdm=False) == []


def test_conversations_are_enqueued_as_they_are_chatted(fake: LLM) -> None:
    talk = [{"role": "user", "content": "one"}]
    expected = fake.chat([talk, talk], SamplingParams(max_tokens=4), use_tqdm=False)
    ids = fake.enqueue_chat([talk, talk], SamplingParams(max_tokens=4), add_generation_prompt=None)
    outputs = fake.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert fake.get_default_sampling_params().temperature == 0.5  # of the generation_config.json


def test_control_verbs_block_for_their_result(fake: LLM) -> None:
    assert fake.is_paused() is False and fake.list_loras() == {} and fake.get_weight_version() == "0"
    assert fake.get_metrics()["running"] == fake.stats.running


def test_outputs_repeat_prompts_in_mappings(fake: LLM) -> None:
    requested: list[Any] = [{"prompt": "one and two"}, {"prompt_token_ids": [4, 5]}, {"prompt": "x", "cache_salt": "s"}]
    outputs = fake.generate(prompts=requested, sampling_params=SamplingParams(), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["one and two", None, "x"]
    assert outputs[0].prompt_token_ids == fake.generate("one and two", use_tqdm=False)[0].prompt_token_ids


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ({"token_ids": [4, 5]}, "'token_ids'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({}, "prompt_token_ids"),
        ({"prompt": 5}, "prompt_token_ids"),
        ({"prompt_token_ids": [4], "cache_salt": 5}, "prompt_token_ids"),
        (b"text", "bytes are no prompt"),
    ],
)
def test_what_is_no_prompt_is_refused(fake: LLM, prompt: Any, named: str) -> None:
    for prompts in (prompt, [prompt]):
        with pytest.raises(RequestError, match=named):
            fake.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_neither_a_prompt_nor_several_is_refused(fake: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"a prompt is a text, .* got {type(prompts).__name__}"):
        fake.generate(prompts, use_tqdm=False)


def test_chat_renders_the_template(fake: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    [one] = fake.chat(talk, use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    both = fake.chat(
        [talk, [*talk, {"role": "assistant", "content": "yo"}]], use_tqdm=False, add_generation_prompt=False
    )
    assert [output.prompt.count("<|im_start|>") for output in both if output.prompt] == [1, 2]
    with pytest.raises(RequestError) as caught:
        fake.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    assert caught.value.field == "messages[0].content[0].type"


def test_the_models_defaults_hold_without_params(fake: LLM) -> None:
    assert fake._params(None, 2) == [SamplingParams(temperature=0.5, top_k=7)] * 2
    assert fake._params(SamplingParams(), 1) == [SamplingParams()]


@pytest.mark.parametrize("messages", [None, 3, "hi", {"role": "user", "content": "a"}, [None], ["hi"]])
def test_what_is_no_list_of_messages(fake: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages must be a list of messages, or a list of such lists") as refusal:
        fake.chat(messages, use_tqdm=False)
    assert refusal.value.field == "messages"


def test_params_one_for_all_or_one_each(fake: LLM) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    outputs = fake.generate([[4, 5, 6]] * 2, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    with pytest.raises(RequestError, match="2 prompts and 1 sampling_params"):
        fake.generate([[4], [5]], [SamplingParams()])
    for wrong in ({"temperature": 0}, SamplingParams):
        with pytest.raises(RequestError, match="sampling_params must be SamplingParams, or a list"):
            fake.generate([4], wrong)  # type: ignore[arg-type]


def test_a_bad_request_refuses_the_batch_and_frees_the_rest(fake: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        fake.generate([[4], [5], [-1]], use_tqdm=False)
    assert caught.value.field == "prompts[2]"
    with pytest.raises(RequestError) as caught:
        fake.generate([4], SamplingParams(top_p="high"), use_tqdm=False)  # type: ignore[arg-type]
    assert caught.value.field == "top_p"
    assert fake._llm.num_inflight == 0
    assert fake.generate([4], use_tqdm=False)[0].outputs[0].token_ids == [4]


def test_several_choices(fake: LLM) -> None:
    [output] = fake.generate([4, 5], SamplingParams(n=3, seed=1), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2] and output.seed == 1


def test_the_progress_bar_counts_requests(fake: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    fake.generate([[4], [5]])
    assert "2/2" in capsys.readouterr().err
    fake.generate([[4], [5]], use_tqdm=False)
    assert not capsys.readouterr().err


def test_alternatives_that_were_asked_for_by_name_have_no_rank(fake: LLM) -> None:
    [output] = fake.generate([4], SamplingParams(logprobs=1, logprob_token_ids=[6]), use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and (logprobs[0][5].rank, logprobs[0][6].rank) == (1, 0)


def test_requests_are_started_first_and_waited_for_later(fake: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    first = fake.enqueue(["one and two", [4, 5]], SamplingParams(max_tokens=2))
    second = fake.enqueue([6])
    done = fake.wait_for_completion()
    assert [output.request_id for output in done] == first + second and "3/3" in capsys.readouterr().err
    assert [output.outputs[0].token_ids for output in done[1:]] == [[4, 5], [6]]
    assert [output.prompt for output in done] == ["one and two", None, None]
    assert fake.wait_for_completion() == []


def test_control_methods_are_verbs_of_the_engine(fake: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    async def call(method: str, /, **args: Any) -> Any:
        calls.append((method, args))
        return [args]

    monkeypatch.setattr(fake._llm, "call", call)
    update = {"names": []}
    for method, args, verb, sent in (
        ("pause_generation", {}, "pause", {"mode": "abort", "clear_cache": True}),
        ("pause_generation", {"mode": "keep", "clear_cache": False}, "pause", {"mode": "keep", "clear_cache": False}),
        ("pause_generation", {"wait_for_inflight_requests": True}, "pause", {"mode": "wait", "clear_cache": True}),
        ("resume_generation", {}, "resume", {}),
        ("sleep", {}, "sleep", {"level": 1, "mode": "abort"}),
        ("sleep", {"level": 2, "mode": "keep"}, "sleep", {"level": 2, "mode": "keep"}),
        ("wake_up", {}, "wake_up", {"tags": None}),
        ("wake_up", {"tags": ("weights",)}, "wake_up", {"tags": ["weights"]}),
        ("release_kv_cache_memory", {}, "release_kv_cache_memory", {}),
        ("reset_prefix_cache", {}, "reset_prefix_cache", {}),
        (
            "init_weight_transfer_engine",
            {"request": {"init_info": {"a": 1}}},
            "init_weight_transfer_engine",
            {"init_info": {"a": 1}},
        ),
        ("shutdown_weight_transfer_engine", {}, "shutdown_weight_transfer_engine", {}),
        ("start_weight_update", {}, "start_weight_update", {"is_checkpoint_format": True}),
        ("update_weights", {"request": {"update_info": update}}, "update_weights", {"update": update}),
        ("update_weights", {"request": SimpleNamespace(update_info=[update])}, "update_weights", {"update": update}),
        (
            "update_weights",
            {"request": {"weight_dir": "/w"}},
            "update_weights_from_dir",
            {"weight_dir": "/w", "weight_version": None},
        ),
        ("finish_weight_update", {"weight_version": "7"}, "finish_weight_update", {"weight_version": "7"}),
        ("abort_weight_update", {}, "abort_weight_update", {}),
        ("update_weight_version", {"new_version": "8"}, "update_weight_version", {"new_version": "8"}),
        (
            "load_lora_adapter",
            {"lora_name": "a", "lora_path": Path("/a")},
            "load_lora_adapter",
            {"lora_name": "a", "lora_path": "/a", "load_inplace": None},
        ),
        ("unload_lora_adapter", {"lora_name": "a"}, "unload_lora_adapter", {"lora_name": "a"}),
        (
            "collective_rpc",
            {"method": "f", "args": (1,), "kwargs": {"b": 2}},
            "collective_rpc",
            {"method": "f", "args": [1], "kwargs": {"b": 2}},
        ),
        ("apply_model", {"func": write_chatml}, "apply_model", {"function": "tests.text.checkpoints:write_chatml"}),
    ):
        calls.clear()
        answer = getattr(fake, method)(**args)
        parameters = COMMANDS[verb].parameters
        ((called, sent_args),) = calls
        assert called == verb and msgspec.convert(sent_args, parameters) == msgspec.convert(sent, parameters), method
        assert answer in (None, True, [sent_args]), method
    with pytest.raises(RequestError, match="can import") as caught:
        fake.apply_model(lambda model: model)
    assert caught.value.field == "func"


@pytest.mark.parametrize("opened", [False, True])
def test_tensors_of_this_process_are_pushed(fake: LLM, monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    async def call(method: str, /, **args: Any) -> Any:
        calls.append((method, args))
        if method == "begin_weight_stream" and len(calls) == 1 and not opened:
            raise Conflict("no weight update is open")
        return {"update_id": "u1"}

    monkeypatch.setattr(fake._llm, "call", call)
    weights = {"a": torch.ones(2, 3), "b": torch.zeros(2)}
    for source in (weights, weights.items(), torch.nn.ParameterDict(weights)):
        calls.clear()
        fake.update_weights(source)
        file = b"".join(args["chunk"] for method, args in calls if method == "feed_weights")
        assert {name: tensor.tolist() for name, tensor in load(file).items()} == {
            name: tensor.tolist() for name, tensor in weights.items()
        }
        methods = list(dict.fromkeys(method for method, _ in calls))
        around = ["begin_weight_stream", "start_weight_update", "feed_weights", "finish_weight_update"]
        assert methods == (["begin_weight_stream", "feed_weights"] if opened else around)
    calls.clear()
    for wrong in (5, "weights", {"a": 1}, {}, [1], torch.ones(2)):
        with pytest.raises(TypeError, match=r"weights are a module, a mapping or pairs|is no tensor"):
            fake.update_weights(wrong)
    assert calls == []


def test_a_push_is_rounded_and_a_second_one_with_delta_sends_what_changed(
    fake: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    described = {"tensors": {"a": ["bfloat16", [64, 4]]}, "tied": {}, "renames": [], "delta_refusal": None}
    replies = {
        "start_weight_update": {"update_id": "u1"},
        "weight_coordinates": described,
        "finish_weight_update": {"weight_version": "v", "epoch": 1},
    }

    async def call(method: str, /, **args: Any) -> Any:
        calls.append((method, args))
        return replies.get(method, {})

    monkeypatch.setattr(fake._llm, "call", call)
    weights = torch.randn(64, 4)
    full = fake.push({"a": weights}, "v", delta=True)
    sent = load(b"".join(args["chunk"] for method, args in calls if method == "feed_weights"))
    assert full.mode == "full" and torch.equal(sent["a"], weights.bfloat16())
    calls.clear()
    weights[3, 1] += 1
    delta = fake.push([("a", weights)], "w", delta=True)
    starts = [args for method, args in calls if method == "start_weight_update"]
    assert (delta.mode, delta.num_changed) == ("delta", 1) and starts[0]["base_version"] == "v"
    assert all(args["update_id"] == "u1" for method, args in calls if method == "finish_weight_update")

    async def refuse(method: str, /, **args: Any) -> Any:
        if method == "feed_weights":
            raise RequestError("the body is wrong")
        return await call(method, **args)

    monkeypatch.setattr(fake._llm, "call", refuse)
    calls.clear()
    with pytest.raises(RequestError, match="the body is wrong"):
        fake.push({"a": weights})
    assert calls[-1] == ("abort_weight_update", {"update_id": "u1"})


@pytest.mark.parametrize("fails", [False, True])
def test_a_pause_of_a_block_ends_with_it(fake: LLM, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    methods: list[str] = []

    async def call(method: str, /, **args: Any) -> Any:
        methods.append(method)

    monkeypatch.setattr(fake._llm, "call", call)
    with suppress(ZeroDivisionError), fake.paused():
        _ = 1 / (0 if fails else 1)
    assert methods == ["pause", "resume"]
    with fake.paused():
        with suppress(ZeroDivisionError), fake.paused("abort"):
            _ = 1 / (0 if fails else 1)
        methods.append("in the outer block")
    assert methods[2:] == ["pause", "pause", "in the outer block", "resume"]


def test_state_methods_return_the_last_status(fake: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake.get_metrics()["steps"] == fake.stats.steps
    assert not fake.is_paused() and not fake.is_sleeping() and fake.list_loras() == {}
    adapters = [LoadedAdapter("a", "/a", 1)]
    status = Status(weight_version="v9", paused=True, sleeping=True, adapters=adapters)
    monkeypatch.setattr(fake._llm._engine, "status", status)
    assert fake.is_paused() and fake.is_sleeping()
    assert fake.get_weight_version() == "v9" and fake.list_loras() == {"a": "/a"}


def test_adapters_with_a_path_are_loaded_unless_they_are_there(fake: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    async def call(method: str, /, **args: Any) -> Any:
        loaded.extend(args.values() if method == "load_lora_adapter" else ())

    monkeypatch.setattr(fake._llm, "call", call)
    monkeypatch.setattr(fake._llm._engine, "status", Status(adapters=[LoadedAdapter("a", "/a", 1)]))
    requested = [LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b"), "c", None, LoRARequest("b", 2, "/b")]
    assert fake._adapters(requested, 5) == requested
    assert loaded == ["b", "/b", None]
    fake._adapters(LoRARequest("a", 1, "/other"), 2)
    assert loaded[3:] == ["a", "/other", None]
    fake._adapters(LoRARequest("a", 1, "/a", load_inplace=True), 1)
    assert len(loaded) == 9
    with pytest.raises(RequestError, match="2 prompts and 1 lora requests") as caught:
        fake.generate([[4], [5]], lora_request=["a"])
    assert caught.value.field == "lora_request"
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest, a name, or a list of these"):
        fake.generate([[4], [5]], lora_request=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("missed", [False, True])
def test_ctrl_c_stops_the_work_and_the_engine_lives(missed: bool, model: Path) -> None:
    """`missed`: the signal does not end the main thread's wait, as one that comes just before it does not."""
    with make(model, "hang") as hanging:

        def interrupt() -> None:
            while hanging._llm.num_inflight < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        if missed:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with pytest.raises(KeyboardInterrupt):
                hanging.generate([[4], [5]], use_tqdm=False)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            signal.signal(signal.SIGINT, handler)
        thread.join()
        until(lambda: hanging._llm.num_inflight == 0)
        assert hanging._wait(hanging._llm.call("ping")) == {}


def test_ctrl_c_at_the_progress_bar_leaves_no_request(model: Path) -> None:
    def interrupt(**_: Any) -> Any:
        raise KeyboardInterrupt

    with make(model, "hang") as hanging:
        with pytest.raises(KeyboardInterrupt) as caught:
            hanging.generate([[4], [5]], use_tqdm=interrupt)
        until(lambda: hanging._llm.num_inflight == 0)
        del caught  # until here its traceback keeps the streams


def test_close_twice_and_then_nothing(model: Path) -> None:
    llm = make(model)
    llm.close()
    llm.close()
    assert not llm._thread.is_alive()
    with pytest.raises(RequestError, match="closed"):
        llm.generate([4])


def test_a_dead_engine_raises_an_error(model: Path) -> None:
    with make(model, "hang") as llm:
        threading.Timer(0.1, os.kill, (llm._llm.engine[1], signal.SIGKILL)).start()
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            llm.generate([4], use_tqdm=False)


def test_a_start_that_fails_raises(model: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(StartError, match="no such tensor"):
        make(model, "refuse")
    assert threading.active_count() <= threads
    with pytest.raises(StartError, match="unknown option"):
        LLM("demo", no_such_option=1)


def test_tokens_only(model: Path) -> None:
    with make(model, tokens_only=True) as llm:
        assert llm.tokenizer is None
        assert llm.generate([4, 5], use_tqdm=False)[0].outputs[0].text == ""
        for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(RequestError, match="tokens_only"):
                call()


def test_logprobs_as_arrays_and_by_token() -> None:
    packed = logprobs_for([5, 8], 3)
    logprobs = TokenLogprobs([5, 8], packed, named=1)
    assert logprobs.token_logprobs.tolist() == pytest.approx([-0.5, -0.8])
    assert logprobs.top_ids.tolist() == [[6, 7, 8], [9, 10, 11]] and logprobs.ranks.tolist() == [5, 1]
    assert list(logprobs[1]) == [8, 11, 9, 10]
    assert logprobs[0][5] == Logprob(pytest.approx(-0.5), 5) and logprobs[0][7].rank == 2 and logprobs[0][8].rank == 0
    assert logprobs.mode == "raw" and logprobs.top_logprobs.shape == (2, 3)
    assert len(TokenLogprobs([5], logprobs_for([5], 0))[0]) == 1
    assert logprobs[-2:] == list(logprobs) == [logprobs[0], logprobs[-1]] and len(logprobs) == 2


def test_decoded_tokens_survive_pickling() -> None:
    texts = TokenTexts({token: bytes([97 + token]) for token in range(20)})
    logprobs = TokenLogprobs([5, 8], logprobs_for([5, 8], 3), named=1, texts=texts)
    assert {token: entry.decoded_token for token, entry in logprobs[0].items()} == {5: "f", 6: "g", 7: "h", 8: "i"}
    copy = pickle.loads(pickle.dumps(logprobs))
    assert list(copy) == list(logprobs) and set(copy._texts._pieces) == {5, 6, 7, 8, 9, 10, 11}
    untold = pickle.loads(pickle.dumps(TokenLogprobs([5], logprobs_for([5], 1))))
    assert untold[0][5].decoded_token is None


@pytest.mark.parametrize("scored", [0, 2, 3])
def test_prompt_logprobs_have_an_entry_for_each_prompt_token(scored: int) -> None:
    ids = [9, 4, 5, 8]
    logprobs = PromptLogprobs(ids, logprobs_for(ids[len(ids) - scored :], 1))
    assert len(logprobs) == 4 and logprobs.start == 4 - scored
    assert [None if entry is None else next(iter(entry)) for entry in logprobs] == [None] * (4 - scored) + ids[
        -scored:
    ] * bool(scored)
    assert logprobs[1:] == [logprobs[1], logprobs[2], logprobs[-1]]
    assert len(logprobs.token_logprobs) == scored
    with pytest.raises(IndexError):
        logprobs[4]


SCRIPT = """
import pytest
from tests.client.fake_engine import config
from tokserve.client import async_llm, launch
import sys
launch.COMMAND = (sys.executable, "-m", "tests.client.fake_process", "serve")
async_llm.resolve = lambda _: config("x", tokens_only=True)
from tokserve import LLM
llm = LLM()
print(llm.generate([4, 5], use_tqdm=False)[0].outputs[0].token_ids)
print(llm._llm.engine[1])
"""


def test_a_script_needs_no_main_guard_and_no_close(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    tokens, pid = done.stdout.split("\n")[:2]
    assert tokens == "[4, 5]" and not done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


FORK = """
import os, sys
from tests.client.fake_engine import config
from tokserve.client import async_llm, launch
launch.COMMAND = (sys.executable, "-m", "tests.client.fake_process", "serve")
async_llm.resolve = lambda _: config("x", tokens_only=True)
from tokserve import LLM
from tokserve.base.errors import EngineDead
llm = LLM()
child = os.fork()
try:
    told = llm.generate([4, 5], use_tqdm=False)[0].outputs[0].token_ids
except EngineDead as error:
    told = error
os.write(1, f"{told}\\n".encode())  # one write: two processes share the pipe
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(len(llm.generate([6], use_tqdm=False)))
"""


@pytest.mark.slow
def test_a_fork_is_refused_ends_by_itself_and_leaves_the_engine_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORK)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["[4, 5]", "a forked process must make its own LLM"] and lines[2:] == ["1"]


@pytest.mark.slow
def test_the_real_engine_around_a_scripted_executor(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-m", "tests.engine.scripted_process"))
    monkeypatch.setattr("tokserve.client.async_llm.resolve", lambda _: config(model, tokens_only=True))
    with LLM(str(model)) as real:
        prompts = [[i, i + 1, i + 2] for i in range(8)]
        params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        outputs = real.generate(prompts, params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts
        for output in outputs:
            [choice] = output.outputs
            assert len(choice.token_ids) == 6 and choice.finish_reason == "length"
            assert choice.stop_detail == "max_tokens" and choice.weight_versions[0][1:] == (0, 6)
            assert choice.logprobs is not None and choice.logprobs.top_ids.shape == (6, 2)
            scores = output.prompt_logprobs
            assert scores is not None and scores.token_ids == output.prompt_token_ids[1:]
            assert scores[0] is None and [next(iter(row)) for row in scores[1:]] == output.prompt_token_ids[1:]
        alone = real.generate(prompts[2], params, use_tqdm=False)[0].outputs[0]
        assert alone.token_ids == outputs[2].outputs[0].token_ids
        assert real._wait(real._llm.call("check")) is True
        assert real._llm.stats.blocks_held == 0
