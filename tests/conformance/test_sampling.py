"""sampling_params: ranges and their names, when a request stops, which tokens may come, seeds and choices."""

from itertools import pairwise
from typing import Any

import pytest

from tests.conformance.api import GENERATE, PROMPT, Api

A, B = 40, 41  # two ids that end nothing

OUT_OF_RANGE = [
    ("n", 0),
    ("n", -1),
    ("n", 10**9),
    ("n", True),
    ("n", 1.0),
    ("n", "2"),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", []),
    ("top_p", 0),
    ("top_p", -0.0),
    ("top_p", 1.1),
    ("top_p", "x"),
    ("top_k", -2),
    ("top_k", 1.0),
    ("top_k", 2**40),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", "1"),
    ("seed", 10**30),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-300),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("max_tokens", "4"),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("ignore_eos", "no"),
    ("logprobs", -2),
    ("logprobs", 10**6),
    ("logprobs", 1.0),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", 10**6),
    ("prompt_logprobs_start", -1),
    ("prompt_logprobs_start", 5),
    ("logprob_token_ids", []),
    ("logprob_token_ids", [1] * 129),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("bad_words", "x"),
    ("stop_token_sequences", [[]]),
    ("bad_token_sequences", [[]]),
    ("logit_bias", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5.0": 1}),
    ("logprobs_mode", "fancy"),
    ("extra_args", []),
    ("extra_args", {"a": 10**30}),
    ("detokenize", 0),
    ("n", 1025),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=lambda value: str(value)[:30])
def test_a_value_out_of_range_is_refused_by_its_path(api: Api, name: str, value: Any) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8} | {name: value}}
    api.refused(api.post(GENERATE, body), 400, f"sampling_params.{name}")


IN_RANGE = [
    {"temperature": 0},
    {"temperature": -0.0},
    {"temperature": 2},
    {"temperature": 5e-324},
    {"top_p": 1e-300},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 2**31 - 1},
    {"min_p": 0},
    {"min_p": 1},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1, "n": 2},
    {"presence_penalty": -2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 1e-30},
    {"repetition_penalty": 1e300},
    {"min_tokens": 8},
    {"logprobs": 20},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": True},
    {"prompt_logprobs": False},
    {"logprobs": True},
    {"logprobs": False},
    {"logit_bias": {}},
    {"logit_bias": {str(A): 1e300, str(B): -1e300}},
    {"allowed_token_ids": [A, A]},
    {"logprob_token_ids": [A, A]},
    {"stop_token_ids": [A] * 300},
    {"bad_token_sequences": [[A, B]] * 300},
    {"extra_args": {"a": {"b": [None]}}},
]


@pytest.mark.parametrize("params", IN_RANGE, ids=lambda value: str(value)[:40])
def test_the_ends_of_the_ranges_are_inside(api: Api, params: dict[str, Any]) -> None:
    for choice in api.generate(params)["choices"]:
        assert 1 <= len(choice["token_ids"]) <= 8 and choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        *(
            (name, [A, 10**7], f"{name}[1]")
            for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logprob_token_ids")
        ),
        *((name, [[A], [B, -1]], f"{name}[1][1]") for name in ("stop_token_sequences", "bad_token_sequences")),
        *((name, [A, "x"], f"{name}[1]") for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids")),
        ("logit_bias", {"10000000": 1}, "logit_bias.10000000"),
        ("logit_bias", {"-1": 1}, "logit_bias.-1"),
        ("stop", ["a", None], "stop[1]"),
    ],
)
def test_an_id_that_the_model_has_not_is_refused_with_its_place(api: Api, name: str, value: Any, param: str) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {name: value}}
    api.refused(api.post(GENERATE, body), 400, f"sampling_params.{param}")


def test_choices_at_temperature_zero_are_equal(api: Api) -> None:
    body = {"temperature": 0, "max_tokens": 6, "seed": 3, "ignore_eos": True, "logprobs": 1}
    alone = api.choice(body)
    for zero in (0, 0.0, -0.0):
        answer = api.post(GENERATE, {"token_ids": PROMPT, "sampling_params": body | {"n": 3, "temperature": zero}})
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        assert reply["choices"] == [alone | {"index": i} for i in range(3)]
        assert reply["usage"]["completion_tokens"] == 18


def test_parameters_that_leave_no_token_are_refused(api: Api) -> None:
    everything = list(range(api.vocab_size)) if api.vocab_size <= 4096 else None
    for params, name in (
        ({"allowed_token_ids": [A], "bad_token_ids": [A]}, "allowed_token_ids"),
        ({"allowed_token_ids": [A], "bad_token_sequences": [[A]]}, "allowed_token_ids"),
        ({"allowed_token_ids": [api.eos], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_token_ids": everything}, "bad_token_ids"),
    ):
        if None not in params.values():
            body = {"token_ids": PROMPT, "sampling_params": params}
            api.refused(api.post(GENERATE, body), 400, f"sampling_params.{name}")


# when it stops


def test_eos_ends_and_is_a_token_of_the_output(api: Api) -> None:
    choice = api.choice({"logit_bias": {str(api.eos): 1000}})
    assert choice["token_ids"] == [api.eos] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None and choice["stop_detail"] == {"kind": "eos"}


def test_ignore_eos_goes_on_to_max_tokens(api: Api) -> None:
    choice = api.choice({"logit_bias": {str(api.eos): 1000}, "ignore_eos": True})
    assert choice["token_ids"] == [api.eos] * 8 and choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None and choice["stop_detail"] == {"kind": "max_tokens"}


def test_a_stop_token_ends_and_is_a_token_of_the_output(api: Api) -> None:
    choice = api.choice({"logit_bias": {str(A): 1000}, "stop_token_ids": [B, A]})
    assert choice["token_ids"] == [A] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == A and choice["stop_detail"] == {"kind": "stop_token"}


def test_a_stop_token_sequence_ends_and_is_in_the_output(api: Api) -> None:
    choice = api.choice({"allowed_token_ids": [A], "stop_token_sequences": [[B, A], [A, A, A]]})
    assert choice["token_ids"] == [A] * 3 and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == [A] * 3 and choice["stop_detail"] == {"kind": "stop_sequence"}


def test_a_sequence_does_not_begin_in_the_prompt(api: Api) -> None:
    choice = api.choice({"allowed_token_ids": [A], "stop_token_sequences": [[A, A]]}, token_ids=[*PROMPT, A])
    assert choice["token_ids"] == [A] * 2


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_a_stop_string_ends_at_the_token_that_completes_it(text: Api, mode: str) -> None:
    word = text.ok("/detokenize", {"tokens": [A]})["prompt"]
    for keep in (False, True):
        params = {"allowed_token_ids": [A], "stop": ["never", word * 3], "include_stop_str_in_output": keep}
        choice = text.choice(params, output_mode=mode)
        assert choice["token_ids"] == [A] * 3 and choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == word * 3 and choice["stop_detail"] == {"kind": "stop_string"}
        if mode == "text":
            assert choice["text"] == (word * 3 if keep else "")


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_repeats_ends(api: Api, stream: bool) -> None:
    circles = {"max_pattern_size": 2, "min_count": 3}
    params = {"allowed_token_ids": [A], "repetition_detection": circles}
    if stream:
        events = api.events(GENERATE, {"token_ids": [*PROMPT, A, A], "sampling_params": params | {"max_tokens": 8}})
        choices = [choice for event in events for choice in event["choices"]]
        ids = [token for choice in choices for token in choice["token_ids"]]
        last = choices[-1]
    else:
        last = api.choice(params, token_ids=[*PROMPT, A, A])
        ids = last["token_ids"]
    assert ids == [A] * 3 and last["finish_reason"] == "repetition"
    assert last["stop_reason"] == [A] and last["stop_detail"] == {"kind": "repetition"}
    assert len(api.choice(params | {"min_tokens": 5})["token_ids"]) == 5


def test_min_tokens_holds_back_every_kind_of_end(text: Api) -> None:
    word = text.ok("/detokenize", {"tokens": [A]})["prompt"]
    eos = text.choice({"logit_bias": {str(text.eos): 1000}, "min_tokens": 4})
    assert len(eos["token_ids"]) >= 4 and eos["token_ids"].index(text.eos) == len(eos["token_ids"]) - 1
    for stop in ({"stop": word}, {"stop_token_sequences": [[A]]}):
        choice = text.choice({"allowed_token_ids": [A], "min_tokens": 4} | stop)
        assert 4 <= len(choice["token_ids"]) <= 5 and choice["finish_reason"] == "stop"


def test_three_hundred_stop_strings(text: Api) -> None:
    word = text.ok("/detokenize", {"tokens": [A]})["prompt"]
    choice = text.choice({"allowed_token_ids": [A], "stop": [f"{i} {word}" for i in range(300)] + [word * 2]})
    assert choice["token_ids"] == [A] * 2


def test_stop_strings_need_detokenize(text: Api) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"stop": "x", "detokenize": False}}
    text.refused(text.post(GENERATE, body), 400, "sampling_params.stop")


# which tokens may come


def test_only_allowed_tokens_are_sampled(api: Api) -> None:
    choices = api.generate({"allowed_token_ids": [A, B], "n": 4, "max_tokens": 16, "temperature": 2})["choices"]
    assert {token for choice in choices for token in choice["token_ids"]} <= {A, B}


def test_bad_tokens_are_not_sampled(api: Api) -> None:
    assert api.choice({"allowed_token_ids": [A, B], "bad_token_ids": [A]})["token_ids"] == [B] * 8


def test_bad_token_sequences_are_not_sampled(api: Api) -> None:
    ids = api.choice({"allowed_token_ids": [A, B], "bad_token_sequences": [[A, A], [B, B]]})["token_ids"]
    assert set(ids) == {A, B} and all(left != right for left, right in pairwise(ids))


def test_bad_words_are_not_sampled(text: Api) -> None:
    word = text.ok("/detokenize", {"tokens": [A]})["prompt"]
    params = {"allowed_token_ids": [A, B], "logit_bias": {str(A): 50}, "bad_words": [word]}
    assert text.choice(params)["token_ids"] == [B] * 8


def test_logit_bias_pushes_and_forbids(api: Api) -> None:
    assert api.choice({"temperature": 0, "logit_bias": {str(A): 1000}})["token_ids"] == [A] * 8
    assert api.choice({"allowed_token_ids": [A, B], "logit_bias": {str(A): -1000}})["token_ids"] == [B] * 8


def test_ten_thousand_biases(api: Api) -> None:
    bias = {str(i % api.vocab_size): 0.0 for i in range(10_000)}
    expected = api.choice({"temperature": 0})
    assert api.choice({"temperature": 0, "logit_bias": bias})["token_ids"] == expected["token_ids"]


def test_top_k_one_and_a_tiny_top_p_are_greedy(api: Api) -> None:
    greedy = api.choice({"temperature": 0})["token_ids"]
    for params in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1}, {"temperature": 1e-300}):
        assert api.choice({"temperature": 1, "seed": 5} | params)["token_ids"] == greedy, params


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-31, 1e-30, 1e-20])
@pytest.mark.parametrize("mode", ["temperature", "processed"])
def test_near_zero_all_the_probability_is_on_one_token(api: Api, temperature: float, mode: str) -> None:
    choice = api.choice({"temperature": temperature, "logprobs": 3, "logprobs_mode": mode}, logprobs_format="arrays")
    columns = choice["logprobs"]
    assert choice["token_ids"] == api.choice({"temperature": 0})["token_ids"]
    assert columns["token_logprobs"] == [0.0] * len(choice["token_ids"]) and set(columns["ranks"]) == {1}
    assert {value for row in columns["top_logprobs"] for value in row[1:]} == {-9999.0}


EXTREME = [
    {"repetition_penalty": repetition, "temperature": temperature, "logit_bias": bias, **more}
    for repetition in (1e-30, 1e-20, 1e300)
    for temperature in (5e-324, 1e-20, 2.0)
    for bias in ({str(A): 1e38, str(B): 1e300}, {str(A): -1e300}, None)
    for more in ({"frequency_penalty": -2.0, "presence_penalty": 2.0, "top_p": 0.5}, {"allowed_token_ids": [A]})
]


@pytest.mark.slow
def test_extreme_parameters_together_still_draw(api: Api) -> None:
    for i, params in enumerate(EXTREME):
        mode = ("raw", "temperature", "processed")[i % 3]
        body = params | {"max_tokens": 4, "seed": i, "logprobs": 2, "prompt_logprobs": 1, "logprobs_mode": mode}
        reply = api.generate(body)
        [choice] = reply["choices"]
        assert choice["finish_reason"] in ("stop", "length"), (params, choice)
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        values += [score["logprob"] for entry in reply["prompt_logprobs"][1:] for score in entry.values()]
        assert all(-9999.0 <= value <= 0.0 for value in values), (params, values)


def test_no_defaults_of_the_model_are_applied(api: Api) -> None:
    drawn = {api.generate({"seed": seed, "max_tokens": 1})["seed"] for seed in (-1, -1, None)}
    assert len(drawn) == 3 and -1 not in drawn  # -1 asks for any seed, as vLLM's clients do
    explicit = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 11}
    assert api.choice({"seed": 11})["token_ids"] == api.choice(explicit)["token_ids"]


# seeds and choices


def test_a_seed_gives_the_same_tokens_again(api: Api) -> None:
    first, second = (api.choice({"seed": 77, "logprobs": 2, "max_tokens": 24}) for _ in range(2))
    assert first == second


def test_without_a_seed_one_is_drawn_and_returned(api: Api) -> None:
    params = {"ignore_eos": True, "max_tokens": 24}
    first, second = api.generate(params), api.generate(params)
    assert first["seed"] != second["seed"]
    assert api.generate(params | {"seed": first["seed"]})["choices"] == first["choices"]


@pytest.mark.parametrize("seed", [100, -9, 2**63 - 2])
def test_choice_i_is_the_request_with_seed_plus_i(api: Api, seed: int) -> None:
    params = {"logprobs": 0, "max_tokens": 12, "temperature": 1.5}
    choices = api.generate(params | {"n": 3, "seed": seed})["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for i, choice in enumerate(choices):
        wrapped = (seed + i + 2**63) % 2**64 - 2**63
        assert api.choice(params | {"seed": wrapped}) | {"index": i} == choice
