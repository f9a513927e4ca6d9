"""`tokserve.SamplingParams`: every argument of vLLM's has its meaning, no effect, or an error that says why."""

from __future__ import annotations

import copy
import pickle
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pytest

import tokserve
from tokserve import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tokserve.base.errors import RequestError
from tokserve.client.sampling_params import POSITIONS, output_rules, sampling_of
from tokserve.protocol import params
from tokserve.server.compat import TOKEN_PARAMS

DEFAULTS = params.SamplingParams()


def test_none_is_every_default() -> None:
    """peer suites A2: vLLM's own default is None for stop, stop_token_ids, bad_words and others."""
    names = SamplingParams.__struct_fields__
    built = SamplingParams(**dict.fromkeys(names))
    assert sampling_of(built) == DEFAULTS and built == SamplingParams()
    changed = SamplingParams(max_tokens=3)
    for name in names:
        setattr(changed, name, None)
    assert sampling_of(changed) == DEFAULTS and output_rules(changed) == output_rules(SamplingParams())


def test_positions_are_those_of_vllm() -> None:
    """A2: fields of vLLM's struct may be given in its order."""
    assert POSITIONS[:5] == ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature")
    assert SamplingParams(2, 0.5, 0.25, 1.5, 0.0) == SamplingParams(
        n=2, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, temperature=0.0
    )
    with pytest.raises(TypeError, match="two values of 'n'"):
        SamplingParams(2, n=2)
    with pytest.raises(TypeError, match="at most 28 positional"):
        SamplingParams(*[None] * 29)


def test_every_field_of_the_token_route_is_an_argument() -> None:
    """rl-faults F15: what is accepted and unused over HTTP is so in Python, what is refused is refused by name."""
    private = {name for name in TOKEN_PARAMS if name.startswith("_")}
    for name in TOKEN_PARAMS.keys() - private:
        rule = TOKEN_PARAMS[name]
        for value in (None, *rule.no_effect):
            assert sampling_of(SamplingParams(**{name: value})) == DEFAULTS, name
        if rule.treatment == "refused" and name != "truncate_prompt_tokens":
            with pytest.raises(RequestError, match=f"^{name} is not supported: ") as caught:
                SamplingParams(**{name: 7})
            assert caught.value.field == name and caught.value.code == "unsupported"
    accepted: dict[str, Any] = {
        "flat_logprobs": True,
        "skip_clone": True,
        "skip_reading_prefix_cache": True,
        "watermarking": True,
        "output_kind": RequestOutputKind.DELTA,
        "stream_interval": 4,
        "truncate_prompt_tokens": 7,
    }
    assert sampling_of(SamplingParams(**accepted)) == DEFAULTS
    assert output_rules(SamplingParams(**accepted)) == (RequestOutputKind.DELTA, 4, 7)


def test_it_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="temperature must be a finite number of at least 0, got -1") as caught:
        SamplingParams(temperature=-1)
    assert isinstance(caught.value, RequestError) and caught.value.field == "temperature"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens must not be above max_tokens"),
        ({"max_tokens": "3"}, "max_tokens: Expected `int"),
        ({"stop": [""]}, "stop must not contain an empty string"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids\[0\]: Expected `int"),
        ({"output_kind": "SOME"}, "output_kind must be one of CUMULATIVE, DELTA, FINAL_ONLY"),
        ({"stream_interval": 0}, "stream_interval must be an integer of at least 1, got 0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs must have exactly one of"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias must be finite"),
        ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection.max_pattern_size must be"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RequestError, match=message):
            SamplingParams(**arguments)


def test_an_unknown_argument_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="SamplingParams has no argument 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError, match=r"SamplingParams has no argument 'qqqq'$"):
        SamplingParams(qqqq=1)


def test_it_may_be_changed_and_is_checked_again_when_it_is_sent() -> None:
    built = SamplingParams(temperature=0.5)
    copied = built.clone()
    built.max_tokens, built.stop = 7, ["a"]
    assert sampling_of(built) == params.SamplingParams(temperature=0.5, max_tokens=7, stop=["a"])
    assert copied == SamplingParams(temperature=0.5) and copied is not built
    for again in (copy.deepcopy(built), pickle.loads(pickle.dumps(built)), msgspec.structs.replace(built)):
        assert again == built and type(again) is SamplingParams
    built.max_tokens = "many"
    with pytest.raises(RequestError, match="max_tokens: Expected `int"):
        sampling_of(built)


def test_from_optional_clips_biases_and_reads_ids_as_text() -> None:
    built = SamplingParams.from_optional(logit_bias={"5": 300, 6: -1.5}, stop=None, temperature=None)
    assert sampling_of(built) == params.SamplingParams(logit_bias={5: 100.0, 6: -1.5})
    with pytest.raises(RequestError, match="logit_bias must be a number for each token id"):
        SamplingParams.from_optional(logit_bias={"a": 1})


def test_values_of_numpy_are_numbers_and_lists() -> None:
    """rl-faults F13, in Python."""
    built = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([4, 5]),
        seed=np.uint8(3),
        logit_bias={np.int32(5): np.float64(2)},
        allowed_token_ids=(6, np.int64(7)),
        logprobs=True,
    )
    assert sampling_of(built) == params.SamplingParams(
        max_tokens=3,
        temperature=0.5,
        stop_token_ids=[4, 5],
        seed=3,
        logit_bias={5: 2.0},
        allowed_token_ids=[6, 7],
        logprobs=1,
    )


def test_another_servers_enumeration_of_output_kinds_is_read_by_name() -> None:
    class Kind(Enum):
        FINAL_ONLY = 7

    assert SamplingParams(output_kind=Kind.FINAL_ONLY).output_kind is RequestOutputKind.FINAL_ONLY


def test_structured_outputs_have_vllms_name_too() -> None:
    built = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert sampling_of(built).structured_outputs == params.StructuredOutputs(choice=["a", "b"])
    assert tokserve.StructuredOutputsParams is tokserve.StructuredOutputs
