"""Sampling parameters: ranges are refused with the field's name."""

import pytest

from tokserve.base.errors import RequestError
from tokserve.protocol.params import RepetitionDetection, SamplingParams

BAD = {
    "temperature": [-0.1, float("nan"), float("inf")],
    "top_p": [0.0, 1.01, -1.0],
    "min_p": [-0.1, 1.1],
    "top_k": [-2],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0.0, 1e-300, -1.0, float("inf")],
    "n": [0, -1],
    "max_tokens": [0, -5],
    "min_tokens": [-1],
    "logprobs": [-2],
    "prompt_logprobs": [-2],
    "prompt_logprobs_start": [-1],
    "routed_experts_prompt_start": [-1],
    "seed": [1 << 63, -(1 << 63) - 1],
    "stop": ["", ["a", ""]],
    "bad_words": [[""]],
    "stop_token_sequences": [[[]]],
    "bad_token_sequences": [[[1], []]],
    "allowed_token_ids": [[]],
    "logprob_token_ids": [[], list(range(129))],
    "logit_bias": [{1: float("nan")}],
}
BAD_CIRCLES = [
    ("max_pattern_size", {"max_pattern_size": -1}),
    ("max_pattern_size", {"max_pattern_size": 257, "min_count": 2}),
    ("min_pattern_size", {"min_pattern_size": 1}),
    ("min_pattern_size", {"max_pattern_size": 3, "min_pattern_size": 4}),
    ("min_count", {"max_pattern_size": 3}),
    ("min_count", {"max_pattern_size": 3, "min_count": 1}),
    ("min_count", {"min_count": -1}),
    ("min_count", {"max_pattern_size": 3, "min_count": 1 << 70}),
]


@pytest.mark.parametrize(("field", "values"), BAD_CIRCLES)
def test_a_bad_repetition_detection_is_refused_by_its_path(field: str, values: dict[str, int]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(repetition_detection=RepetitionDetection(**values)).validate()
    assert caught.value.field == f"repetition_detection.{field}" and field in caught.value.message


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_value_out_of_range_is_refused_with_the_fields_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value}).validate()  # type: ignore[arg-type]
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "top_k": -1},
        {"temperature": 0.0, "n": 2},
        {"temperature": 2, "top_p": 1.0, "min_p": 1},
        {"temperature": 1e-6, "seed": -(1 << 63)},
        {"max_tokens": 1, "min_tokens": 1, "logprobs": -1, "prompt_logprobs": 0},
    ],
)
def test_values_at_the_edges_are_taken(params: dict[str, object]) -> None:
    SamplingParams(**params).validate()  # type: ignore[arg-type]


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match=r"min_tokens must not be above max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4).validate()


def test_the_engine_gets_no_text_fields() -> None:
    params = SamplingParams(n=3, stop=["x"], bad_words=["y"], skip_special_tokens=False, top_k=5)
    assert params.for_engine(seed=7) == SamplingParams(top_k=5, seed=7)
    assert SamplingParams(logprobs_mode="processed_logprobs").for_engine().logprobs_mode == "processed"
