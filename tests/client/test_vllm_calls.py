"""Calls as scripts for vLLM write them: arguments, results and attributes of `LLM` and `AsyncLLM` (A3, A14)."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.client.fake_engine import FakeEngine, config, stop, tokens
from tests.client.scenes import make, waited
from tests.text.checkpoints import write_chatml
from tokserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from tokserve.base.errors import EngineDead, RequestError, StartError
from tokserve.client import launch
from tokserve.client.engine_args import options_of
from tokserve.features.chat.prompts import ParsedPrompt, Tokenization, read_prompt, tokenization
from tokserve.features.offline.llm import _priorities
from tokserve.features.pooling.pooling_params import each_pooling
from tokserve.protocol.messages import EngineRequest

TALK = [{"role": "user", "content": "one"}]
Play = Callable[..., None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_chatml(tmp_path_factory.mktemp("model"))
    (directory / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64, "vocab_size": 420}')
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with make(model, model_options={"generation_config": "auto"}) as llm:
        yield llm


def test_the_tokenizer_is_that_of_transformers(llm: LLM, model: Path) -> None:
    """A3: scripts render chats, encode batches and read special tokens with it."""
    tokenizer, expected = llm.get_tokenizer(), AutoTokenizer.from_pretrained(model)
    assert isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer is llm.get_tokenizer()
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert rendered == expected.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert tokenizer("one and two").input_ids == llm.tokenizer.encode("one and two")  # type: ignore[union-attr]
    assert len(tokenizer) == len(expected) and tokenizer.eos_token_id == expected.eos_token_id
    assert tokenizer.get_vocab() == expected.get_vocab() and tokenizer.truncation_side == "left"
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    [output] = llm.chat(TALK, use_tqdm=False)
    assert output.prompt_token_ids == ids


def test_a_template_of_the_options_is_the_tokenizers_too(model: Path) -> None:
    with make(model, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}") as other:
        assert other.get_tokenizer().apply_chat_template(TALK, tokenize=False) == "[one]"
        [output] = other.chat(TALK, use_tqdm=False)
        assert output.prompt == "[one]"


def test_without_a_tokenizer_there_is_none(model: Path) -> None:
    with make(model, tokens_only=True) as bare:
        assert bare.get_tokenizer() is None


def test_recommended_parameters_may_be_changed(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k) == (0.5, 7)
    defaults.max_tokens, defaults.temperature = 2, 0.0
    outputs = llm.generate([[4, 5, 6]], defaults, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == [4, 5] and llm.get_default_sampling_params().max_tokens is None
    assert llm.model_config.get_diff_sampling_param() == {"temperature": 0.5, "top_k": 7}


def test_attributes_of_the_engine(llm: LLM, model: Path) -> None:
    config = llm.llm_engine.model_config
    assert (config.model, config.tokenizer, config.max_model_len) == (str(model), str(model), 64)
    assert config.hf_config.hidden_size == 64 and config.get_vocab_size() == llm.ready.vocab_size
    assert llm.llm_engine.get_tokenizer() is llm.get_tokenizer()


def test_outputs_say_their_adapter_and_when_they_were_made(llm: LLM) -> None:
    before, began = time.time(), time.monotonic()
    [one, two] = llm.generate([[4, 5], [6]], SamplingParams(), lora_request=[LoRARequest("a", 3), None], use_tqdm=False)
    assert one.lora_request == LoRARequest("a", 3) and two.lora_request is None
    metrics = one.metrics
    assert metrics is not None and metrics.num_generation_tokens == 2
    assert before - 1 <= metrics.arrival_time <= time.time() and began <= metrics.queued_ts <= time.monotonic()
    assert metrics.queued_ts <= metrics.last_token_ts


@pytest.mark.parametrize("priority", [7, [7, 7]])
def test_priorities_are_for_all_or_one_each(llm: LLM, priority: Any) -> None:
    assert len(llm.generate([[4], [5]], priority=priority, use_tqdm=False)) == 2
    assert len(llm.chat([TALK, TALK], priority=priority, use_tqdm=False)) == 2
    assert _priorities(priority, 2) == [7, 7]
    for wrong, message in (([1], "must have one for each of 2"), ("ab", "an integer, or a list"), (1.5, "an integer")):
        with pytest.raises(RequestError, match=f"^priority .*{message}") as caught:
            llm.generate([[4], [5]], priority=wrong, use_tqdm=False)  # type: ignore[arg-type]
        assert caught.value.field == "priority"


def test_arguments_that_change_nothing_are_taken_and_others_are_refused_by_name(llm: LLM) -> None:
    bars: list[dict[str, Any]] = []

    def bar(**options: Any) -> Any:
        bars.append(options)
        return tqdm(disable=True, **options)

    [output] = llm.chat(TALK, None, bar, None, None, None, "openai", True, False, None, None, None, {})
    assert output.finished and bars[0]["total"] == 1
    for options, field in (
        ({"chat_template_content_format": "xml"}, "chat_template_content_format"),
        ({"mm_processor_kwargs": {"max_pixels": 7}}, "mm_processor_kwargs"),
        ({"tokenization_kwargs": {"padding": "max_length"}}, "tokenization_kwargs.padding"),
        ({"tokenization_kwargs": {"add_bos": True}}, "tokenization_kwargs.add_bos"),
        ({"tokenization_kwargs": {"truncation_side": "up"}}, "tokenization_kwargs.truncation_side"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.chat(TALK, use_tqdm=False, **options)  # type: ignore[arg-type]
        assert caught.value.field == field


def test_prompts_are_cut_as_the_call_or_the_parameters_say(llm: LLM) -> None:
    """A2, A14: `truncate_prompt_tokens`, and `tokenization_kwargs`, which transformers' names go through."""
    ids = [*range(10, 20)]

    def kept(params: SamplingParams | None = None, **kwargs: Any) -> list[int]:
        [output] = llm.generate([ids], params, use_tqdm=False, tokenization_kwargs=kwargs)
        return output.prompt_token_ids

    assert kept() == ids and kept(truncate_prompt_tokens=3) == ids[-3:]
    assert kept(SamplingParams(truncate_prompt_tokens=4)) == ids[-4:]
    assert kept(truncate_prompt_tokens=3, truncation_side="right") == ids[:3]
    assert kept(truncation=True, max_length=2) == ids[-2:] and kept(max_length=2) == ids
    assert kept(truncation=False, max_length=2, padding=False) == ids
    long = [5] * 100
    [output] = llm.generate([long], SamplingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(output.prompt_token_ids) == 63  # and room for a token
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be at most 63"):
        kept(truncate_prompt_tokens=64)


def test_special_tokens_around_a_text_stay_when_it_is_cut() -> None:
    how = Tokenization(keep=4)
    assert how.shorten(ParsedPrompt([1, 5, 6, 7, 8, 2], frame=(1, 1)), 60).ids == [1, 7, 8, 2]
    assert how.shorten(ParsedPrompt([1, 5, 6, 7, 8, 2]), 60).ids == [6, 7, 8, 2]


def test_texts_may_have_no_special_tokens_and_lower_case(llm: LLM) -> None:
    assert llm.tokenizer is not None
    how = tokenization({"do_lower_case": True, "add_special_tokens": False})
    assert read_prompt("One", llm.tokenizer, how).ids == llm.tokenizer.encode("one", False)


def test_options_come_in_an_object_as_well() -> None:
    assert options_of(EngineArgs("m", dtype="float32")) == {"model": "m", "dtype": "float32"}
    assert options_of(AsyncEngineArgs()) == {"model": "demo"} and options_of({"model": "m"}) == {"model": "m"}
    with pytest.raises(StartError, match="engine_args must be EngineArgs or a mapping"):
        LLM.from_engine_args("demo")
    with pytest.raises(StartError, match="unknown option 'dtyp'; did you mean 'dtype'"):
        AsyncLLM.from_engine_args(AsyncEngineArgs("demo", dtyp="float32"))


def test_pooling_params_are_for_all_or_one_each() -> None:
    one = PoolingParams(dimensions=4, normalize=False)
    assert each_pooling(None, 2) == [PoolingParams()] * 2
    assert each_pooling(one, 1, dimensions=8) == [PoolingParams(dimensions=8, normalize=False)]
    assert [entry.activates for entry in each_pooling([one, {"use_activation": True}], 2)] == [False, True]
    with pytest.raises(RequestError, match="2 prompts and 1 pooling_params"):
        each_pooling([one], 2)
    with pytest.raises(RequestError, match="pooling_params must be PoolingParams, or a list"):
        each_pooling(7, 2)
    with pytest.raises(RequestError, match=r"unknown field 'pooling_params\.size'"):
        each_pooling({"size": 7}, 1)
    for wrong in ({"step_tag_id": 1}, {"late_chunking_params": {}}, {"dimensions": "4"}, {"use_activation": 1}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} "):
            PoolingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_outputs_are_growing_new_or_only_the_last(play: Play, kind: RequestOutputKind) -> None:
    """F15: `output_kind`, which callers of vLLM's AsyncLLM set."""

    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        params = SamplingParams(output_kind=kind, n=2)
        outputs = llm.generate([7, 8], params, "r", session_id="s", trace_headers={}, prompt_text="seven")
        first = asyncio.ensure_future(anext(outputs))
        [sent, _] = await waited(engine, EngineRequest, 2)
        assert sent.options.stream is (kind is not RequestOutputKind.FINAL_ONLY)
        seen = []
        if sent.options.stream:
            engine.step(tokens("r#0", [4]))
            seen.append(await first)
            engine.step(tokens("r#0", [5], stop()))
            seen.append(await anext(outputs))
            engine.step(tokens("r#1", [6], stop()))
        else:
            engine.step(tokens("r#0", [4, 5], stop()), tokens("r#1", [6], stop()))
            seen.append(await first)
        seen += [output async for output in outputs]
        choices = [[(c.index, c.token_ids) for c in output.outputs] for output in seen]
        assert (
            choices
            == {
                RequestOutputKind.CUMULATIVE: [[(0, [4])], [(0, [4, 5])], [(0, [4, 5]), (1, [6])]],
                RequestOutputKind.DELTA: [[(0, [4])], [(0, [5])], [(1, [6])]],
                RequestOutputKind.FINAL_ONLY: [[(0, [4, 5]), (1, [6])]],
            }[kind]
        )
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].prompt == "seven" and seen[-1].metrics is not None

    play(scene)


def test_a_stream_interval_batches_tokens(play: Play) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        outputs = llm.generate([7], SamplingParams(stream_interval=3, output_kind=RequestOutputKind.DELTA), "r")
        request = asyncio.ensure_future(anext(outputs))
        await waited(engine, EngineRequest)
        sizes = []
        for token in range(10, 15):
            engine.step(tokens("r#0", [token]))
            await llm.call("ping")
            if token in (10, 13):
                sizes.append(len((await request).outputs[0].token_ids))
                request = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
        engine.step(tokens("r#0", [15], stop()))
        sizes.append(len((await request).outputs[0].token_ids))
        assert sizes == [1, 3, 2]

    play(scene)


def test_options_of_a_request_are_checked(play: Play) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        with pytest.raises(RequestError, match="priority: Expected `int"):
            llm.stream([7], SamplingParams(), priority="high")
        with pytest.raises(TypeError, match="a request has no option 'prioritty'"):
            llm.stream([7], SamplingParams(), prioritty=1)

    play(scene)


def test_the_first_request_starts_the_engine_and_shutdown_need_not_be_awaited(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's AsyncLLM serves when it is made, and its shutdown is no coroutine."""
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-m", "tests.client.fake_process", "serve"))
    monkeypatch.setattr("tokserve.client.async_llm.resolve", lambda _: config(model))

    async def script() -> AsyncLLM:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model)))

        async def last() -> list[int]:
            outputs = [output async for output in llm.generate([4, 5], SamplingParams())]
            return outputs[-1].outputs[0].token_ids

        assert await asyncio.gather(last(), last()) == [[4, 5]] * 2
        ending = llm.shutdown()
        await llm.close()
        with pytest.raises(EngineDead):
            await last()
        await ending
        return llm

    asyncio.run(script())
