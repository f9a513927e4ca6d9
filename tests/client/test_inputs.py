"""Inputs: every refusal names its field; what passes is built without loss."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from tests.client.fake_engine import READY, VOCAB, FakeEngine, config
from tests.text.checkpoints import byte_level_json, write_chatml
from tokserve.base.errors import RequestError, StartError
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.generation_config import capped, generation_defaults, log_what_is_not_followed, output_cap
from tokserve.client.inputs import GenerateRequest, Inputs, bare_id, token_prompt, typed
from tokserve.config import ServerConfig
from tokserve.protocol.messages import EngineRequest
from tokserve.protocol.params import PoolingParams, RequestOptions, SamplingParams, StructuredOutputs
from tokserve.protocol.prompt import Feature, TokenPrompt, pack_ids, unpack_ids
from tokserve.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Backend.from_str(byte_level_json()))


def inputs(tokenizer: Tokenizer | None = TOKENIZER, **options: Any) -> Inputs:
    return Inputs(config(**options), READY, lambda: tokenizer)


def ask(prompt: Any, task: Any = None, request_id: str = "r", **fields: Any) -> GenerateRequest:
    """A request; `fields` are of `GenerateRequest` or of its options."""
    request_fields = {name: fields.pop(name) for name in GenerateRequest.__struct_fields__ if name in fields}
    return GenerateRequest(
        request_id=request_id,
        prompt=token_prompt(prompt, VOCAB),
        task=task or SamplingParams(),
        options=RequestOptions(**fields),
        **request_fields,
    )


def sent(request: GenerateRequest, checks: Inputs | None = None) -> list[EngineRequest]:
    return list((checks or inputs()).prepare(request).engine_requests)


def refusal(request: GenerateRequest, checks: Inputs | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        (checks or inputs()).prepare(request)
    assert caught.value.status == 400
    return caught.value


def request_with(**params: Any) -> GenerateRequest:
    return ask([1, 2, 3], SamplingParams(**params))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "must not be empty"),
        (b"", "must not be empty"),
        ([1, -1], r"token_ids\[1\] is -1"),
        ([1, 2, VOCAB], rf"token_ids\[2\] is {VOCAB}; this model's token ids are 0 to {VOCAB - 1}"),
        ([1, 1 << 31], r"token_ids\[1\] is 2147483648"),
        ([1, -(1 << 70)], r"token_ids\[1\] is -1180591620717411303424"),
        ([1.5], "list of integers"),
        (["a"], "list of integers"),
        ("text", "list of integers"),
        (b"123", "4 bytes each"),
        (pack_ids([7, VOCAB]), rf"token_ids\[1\] is {VOCAB}"),
        ([1] * 64, r"maximum context length is 64 tokens \(max_model_len\), and the prompt has 64"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        inputs().prepare(ask(prompt))
    assert caught.value.field == "token_ids"


def test_a_token_that_only_the_tokenizer_has() -> None:
    """The prompt may be a text: its ids are not the client's."""
    small = Inputs(config(), type(READY)(64, 40, 40, 4, [2], "v1"), lambda: TOKENIZER)
    error = refusal(ask(TOKENIZER.encode("7V")), small)
    assert error.field == "token_ids"
    assert re.match(r"token_ids: token 1 is 'V' \(56\), .*: its token ids are 0 to 39", error.message)
    assert "token_ids[0] is 40000" in refusal(ask([40000]), small).message


@pytest.mark.parametrize("rows", [200, VOCAB])
def test_a_tokenizer_with_more_tokens_than_the_model_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    async def start() -> int:
        address = f"ipc://{tmp_path}/e.sock"
        with FakeEngine(address, type(READY)(64, rows, 40, 4, [2], "v1")):
            llm = AsyncLLM.from_config(config(write_chatml(tmp_path)))
            await llm.connect(address)
            await llm.shutdown()
            assert llm.tokenizer is not None
            return llm.tokenizer.vocab_size

    count = asyncio.run(start())
    warned = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert warned == ([f"the tokenizer has {count} tokens and the model 200"] if rows < count else [])


def test_a_prompt_the_kv_cache_cannot_hold() -> None:
    small = Inputs(config(), type(READY)(64, VOCAB, 3, 4, [2], "v1"), lambda: None)
    assert "KV cache holds 12" in refusal(ask([1] * 13, SamplingParams()), small).message
    small.prepare(ask([1] * 12, SamplingParams()))


PACKED = pack_ids([1, 2, 3])


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), PACKED, bytearray(PACKED)])
def test_prompts_of_any_kind_travel_packed(prompt: Any) -> None:
    [request] = sent(ask(prompt))
    assert request.prompt == TokenPrompt(pack_ids([1, 2, 3]))


def test_the_longest_prompt_and_any_max_tokens_pass() -> None:
    [request] = sent(ask([1] * 63, SamplingParams(max_tokens=10_000)))
    assert request.task.max_tokens == 10_000


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [1, 2, VOCAB]}, "stop_token_ids[2]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids[0]"),
        ({"bad_token_ids": [0, VOCAB]}, "bad_token_ids[1]"),
        ({"logprob_token_ids": [VOCAB]}, "logprob_token_ids[0]"),
        ({"stop_token_sequences": [[1], [2, VOCAB]]}, "stop_token_sequences[1][1]"),
        ({"bad_token_sequences": [[-5]]}, "bad_token_sequences[0][0]"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias.{VOCAB}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias.-1"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs_start": 3}, "prompt_logprobs_start"),
        ({"temperature": -0.5}, "temperature"),
        ({"stop": ["a"], "detokenize": False}, "stop"),
        ({"allowed_token_ids": [3, 4], "bad_token_ids": [3], "bad_token_sequences": [[4]]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),  # 2 is the eos
        ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_token_ids": list(range(VOCAB))}, "bad_token_ids"),
    ],
)
def test_params_that_this_model_cannot_serve(params: dict[str, Any], field: str) -> None:
    error = refusal(request_with(**params))
    assert error.field == field and field.partition("[")[0].partition(".")[0] in error.message


def test_few_tokens_left_to_draw_are_enough() -> None:
    for params in (
        {"allowed_token_ids": [3, 4], "bad_token_ids": [3], "bad_token_sequences": [[4, 4]]},
        {"allowed_token_ids": [2], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [2]},
        {"bad_token_ids": list(range(1, VOCAB))},
    ):
        inputs().prepare(request_with(**params))


def test_logprobs_limits() -> None:
    inputs().prepare(request_with(logprobs=20, prompt_logprobs=20, prompt_logprobs_start=2))
    unlimited = inputs(model_options={"max_logprobs": -1})
    unlimited.prepare(request_with(logprobs=-1, prompt_logprobs=VOCAB))
    with pytest.raises(RequestError, match=f"at most {VOCAB}"):
        unlimited.prepare(request_with(logprobs=VOCAB + 1))
    whole_vocabulary = inputs(model_options={"max_logprobs": VOCAB})
    whole_vocabulary.prepare(request_with(logprobs=-1))
    assert "whole vocabulary" in refusal(request_with(logprobs=-1)).message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"task": SamplingParams(stop="a")}, "stop"),
        ({"task": SamplingParams(bad_words=["a"])}, "bad_words"),
        ({"text": True}, "output_mode"),
    ],
)
def test_text_needs_a_tokenizer(fields: dict[str, Any], field: str) -> None:
    request = ask([1], **fields)
    error = refusal(request, inputs(None))
    assert error.field == field and "--tokens-only" in error.message
    inputs().prepare(request)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 1 << 31}, "deadline_ms"),
        ({"queue_timeout_ms": 1 << 62}, "queue_timeout_ms"),
        ({"priority": -(1 << 63) - 1}, "priority"),
        ({"queue_timeout_ms": -1}, "queue_timeout_ms"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 1025}, "request_id"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], field: str) -> None:
    assert refusal(ask([1], **options)).field == field


def test_priority_is_refused_by_the_policy_that_ignores_it() -> None:
    fcfs = inputs(policy="fcfs")
    assert "--scheduling-policy fcfs" in refusal(ask([1], SamplingParams(), priority=1), fcfs).message
    fcfs.prepare(ask([1], SamplingParams(), priority=0))


@pytest.mark.parametrize(
    "params", [{"max_tokens": 1 << 31}, {"extra_args": {"a": 10**30}}, {"extra_args": {"a": object()}}]
)
def test_what_is_too_large_for_a_message(params: dict[str, Any]) -> None:
    assert refusal(ask([1], SamplingParams(**params))).field == next(iter(params))


def test_options_travel_as_they_are() -> None:
    options = RequestOptions(priority=-3, cache_salt="x" * 1024, deadline_ms=1, queue_timeout_ms=1)
    request = msgspec.structs.replace(ask([1]), options=options)
    assert sent(request)[0].options is options


@pytest.mark.parametrize("score_each", [False, True])
def test_the_prompt_is_scored_once(score_each: bool) -> None:
    params = SamplingParams(n=3, prompt_logprobs=2, prompt_logprobs_start=1, seed=5)
    prepared = inputs().prepare(ask([1, 2, 3], params, score_each=score_each))
    assert [request.task.prompt_logprobs for request in prepared.engine_requests] == [2, None, None]
    assert [request.task.prompt_logprobs_start for request in prepared.engine_requests] == [1, 0, 0]
    assert [choice.awaits_scores for choice in prepared.choices] == [False, score_each, score_each]


def test_a_prompt_of_one_token_has_no_scores_to_wait_for() -> None:
    params = SamplingParams(n=2, prompt_logprobs=2)
    assert not inputs().prepare(ask([1], params, score_each=True)).choices[1].awaits_scores


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"stop": ["s"] * 1025}, "stop", "at most 1024 entries .--max-stop-strings., got 1025"),
        ({"stop": ["s" * 40_000, "t" * 40_000]}, "stop", "at most 65536 bytes together"),
        ({"bad_words": ["w"] * 100_000}, "bad_words", "at most 1024 entries .--max-bad-words."),
        ({"stop_token_sequences": [[1, 2]] * 1025}, "stop_token_sequences", "at most 1024 entries"),
        ({"bad_token_sequences": [[1] * 70_000]}, "bad_token_sequences", "at most 65536 ids together"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", "at most 4096 entries, got 4097"),
        ({"logit_bias": dict.fromkeys(range(4097), 0.0)}, "logit_bias", "at most 4096 entries"),
        ({"extra_args": {"a": "x" * 70_000}}, "extra_args", "at most 65536 bytes"),
    ],
)
def test_lists_longer_than_any_use_of_them(params: dict[str, Any], field: str, words: str) -> None:
    error = refusal(request_with(**params))
    assert error.field == field
    assert re.search(words, error.message), error.message


def test_the_engine_gets_no_text_fields() -> None:
    params = SamplingParams(
        n=2,
        stop=["a"],
        bad_words=["the"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        seed=5,
        temperature=1e-12,
        top_k=3,
    )
    prepared = inputs().prepare(ask([1], params, "id", stream=False))
    assert prepared.seed == 5 and [request.seed for request in prepared.engine_requests] == [5, 6]
    sampling = prepared.engine_requests[0].task
    assert sampling == SamplingParams(temperature=1e-12, top_k=3, bad_token_sequences=sampling.bad_token_sequences)
    spelled = {TOKENIZER.decode(ids) for ids in sampling.bad_token_sequences}
    assert spelled == {"the", " the"}


def test_bad_words_join_the_sequences_given_as_ids() -> None:
    the = TOKENIZER.encode(" the", False)
    params = SamplingParams(bad_words=[" the"], bad_token_sequences=[[9], the])
    [request] = sent(ask([1], params))
    assert request.task.bad_token_sequences == [[9], the]


def test_ids_lose_their_prefix() -> None:
    assert [bare_id(i) for i in ("a", "cmpl-a", "chatcmpl-a", "generate-tokens-a", "resp_a", "cmpl-")] == ["a"] * 5 + [
        "cmpl-"
    ]
    prepared = inputs().prepare(ask([1], request_id="chatcmpl-a"))
    assert (prepared.request_id, prepared.engine_requests[0].request_id) == ("chatcmpl-a", "a#0")


def test_packing_agrees_with_the_wire() -> None:
    ids = list(range(0, VOCAB, 7))
    assert unpack_ids(token_prompt(ids, VOCAB).ids) == ids


def test_generation_defaults(tmp_path: Path) -> None:
    def defaults(**model: Any) -> SamplingParams:
        return generation_defaults(config(tmp_path, model_options=model).model)

    assert defaults(generation_config="auto") == SamplingParams()
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": 2})
    )
    assert defaults(generation_config="auto") == SamplingParams(temperature=0.6, top_k=20)
    assert defaults(generation_config="none") == SamplingParams()
    assert defaults(generation_config=str(tmp_path)) == SamplingParams(temperature=0.6, top_k=20)
    over: dict[str, Any] = {"top_k": 5, "min_p": 0.1, "temperature": None}
    merged = SamplingParams(temperature=0.6, top_k=5, min_p=0.1)
    assert defaults(generation_config="auto", override_generation_config=over) == merged
    assert defaults(generation_config="none", override_generation_config=over) == SamplingParams(top_k=5, min_p=0.1)
    with pytest.raises(StartError, match="option override_generation_config: top_x is not one of temperature, top_p"):
        defaults(override_generation_config={"top_x": 5})
    with pytest.raises(StartError, match=r"override_generation_config or generation_config.json of the model has"):
        defaults(override_generation_config={"top_p": 5})
    with pytest.raises(StartError, match="not a directory"):
        defaults(generation_config="/no/such")
    (tmp_path / "generation_config.json").write_text('{"temperature": -9}')
    with pytest.raises(StartError, match="bad value"):
        defaults(generation_config="auto")


def test_the_longest_output_is_a_default_and_the_operators_cap(tmp_path: Path) -> None:
    """peer suites A16: max_new_tokens of the checkpoint is a default, of the operator a cap as well, as in vLLM."""

    def both(**model: Any) -> tuple[int | None, int | None]:
        options = config(tmp_path, model_options=model).model
        return generation_defaults(options).max_tokens, output_cap(options)

    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 9, "presence_penalty": 0.5}')
    assert both(generation_config="auto") == (9, None) and both(generation_config="none") == (None, None)
    assert both(generation_config=str(tmp_path)) == (9, 9)
    over = {"max_new_tokens": 5}
    assert both(generation_config="auto", override_generation_config=over) == (5, 5)
    assert both(generation_config="none", override_generation_config=over) == (5, 5)
    model = config(tmp_path, model_options={"generation_config": "auto"}).model
    assert generation_defaults(model).presence_penalty == 0.5
    assert [capped(SamplingParams(max_tokens=n), 5).max_tokens for n in (None, 4, 6)] == [5, 4, 5]
    assert capped(SamplingParams(max_tokens=6), None).max_tokens == 6
    with pytest.raises(StartError, match="max_new_tokens"):
        both(override_generation_config={"max_tokens": 5})
    with pytest.raises(StartError, match="bad value"):
        both(override_generation_config={"max_new_tokens": "5"})


def test_entries_that_are_not_followed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"do_sample": False, "no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": []}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    caplog.set_level("INFO")
    log_what_is_not_followed(config(tmp_path, model_options={"generation_config": "none"}).model)
    assert not caplog.records
    log_what_is_not_followed(config(tmp_path, model_options={"generation_config": "auto"}).model)
    assert caplog.messages == ["generation_config.json: these have no effect here: do_sample, no_repeat_ngram_size"]


def test_untyped_params_are_refused_by_field() -> None:
    assert typed(SamplingParams, SamplingParams(top_k=3)) == SamplingParams(top_k=3)
    for params, field in (({"top_k": "x"}, "top_k"), ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]")):
        with pytest.raises(RequestError) as caught:
            typed(SamplingParams, SamplingParams(**params))  # type: ignore[arg-type]
        assert caught.value.field == field


def test_features_travel_untouched() -> None:
    feature = Feature("embeddings", b"hash", 0, 2, np.zeros((2, 4), "<f4").tobytes())
    prompt = TokenPrompt(pack_ids([5, 5, 6]), (feature,))
    request = msgspec.structs.replace(ask([1], SamplingParams(n=3)), prompt=prompt)
    first, *others = sent(request)
    assert first.prompt == prompt and first.prompt.features[0] is feature
    for other in others:  # the engine has the data of the first
        assert other.prompt == TokenPrompt(prompt.ids, (msgspec.structs.replace(feature, data=b""),))


def test_stop_strings_make_the_engine_stream() -> None:
    [request] = sent(ask([1], SamplingParams(stop="x"), priority=2))
    assert request.options == RequestOptions(stream=True, priority=2)
    assert not sent(ask([1]))[0].options.stream


def test_a_pooling_request_needs_no_room_for_output() -> None:
    [request] = sent(ask([1] * 64, PoolingParams("mean")))
    assert request.task == PoolingParams("mean") and request.seed == 0
    assert "the prompt has 65" in refusal(ask([1] * 65, PoolingParams())).message


def test_a_model_that_pools_generates_no_tokens() -> None:
    pools = inputs(model_options={"runner": "pooling"})
    error = refusal(ask([1]), pools)
    assert (error.field, error.code) == ("model", "unsupported") and "vectors" in error.message
    assert sent(ask([1], PoolingParams()), pools)


def test_a_model_without_labels_classifies_nothing() -> None:
    checks = inputs()
    assert sent(ask([1], PoolingParams(classify=True)), checks)
    checks.ready = msgspec.structs.replace(checks.ready, facts={"classifies": False})
    error = refusal(ask([1], PoolingParams(classify=True)), checks)
    assert (error.field, error.code) == ("classify", "unsupported") and "no labels" in error.message
    assert sent(ask([1], PoolingParams()), checks)


def test_ranges_have_one_declaration() -> None:
    for request, words in (
        (request_with(temperature=-0.5), "temperature must be a finite number of at least 0, got -0.5"),
        (request_with(temperature=float("nan")), "temperature must be a finite number of at least 0, got nan"),
        (request_with(top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
        (
            request_with(repetition_penalty=float("inf")),
            "repetition_penalty must be a finite number of at least 1e-30, got inf",
        ),
        (request_with(top_k=-2), "top_k must be at least -1, got -2"),
        (request_with(n=1025), "n must be at most 1024, got 1025"),
        (request_with(seed=1 << 63), "seed must fit in 64 bits"),
        (request_with(logprob_token_ids=[]), "logprob_token_ids must have 1 to 128 ids, got 0"),
        (request_with(allowed_token_ids=[]), "allowed_token_ids must not be empty"),
        (ask([1], cache_salt="x" * 1025), "cache_salt must have 1 to 1024 characters, got 1025"),
        (ask([1], group_id=""), "group_id must have 1 to 256 characters, got 0"),
        (ask([1], deadline_ms=1 << 31), "deadline_ms must fit in 32 bits"),
    ):
        assert refusal(request).message == words


def test_defaults_of_structured_outputs_are_for_python_too() -> None:
    """peer suites A8: LLM(structured_outputs_config={"disable_any_whitespace": True})."""
    of_server = ServerConfig(structured_outputs_compact=True, structured_outputs_closed=True)
    checks = Inputs(msgspec.structs.replace(config(), server=of_server), READY, lambda: TOKENIZER)
    schema = {"type": "object", "properties": {"a": {}}}
    task = checks.validate(ask([5], SamplingParams(structured_outputs=StructuredOutputs(json=schema))))
    assert isinstance(task, SamplingParams) and task.structured_outputs is not None
    assert task.structured_outputs.disable_any_whitespace is True
    assert json.loads(str(task.structured_outputs.json))["additionalProperties"] is False
