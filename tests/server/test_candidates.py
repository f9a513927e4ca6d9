"""Candidates of prompt tokens on /inference/v1/generate: forms, replies and refusals."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.server.site import site
from tests.server.test_tokens import GENERATE, MSGPACK, body, generate
from tokserve.protocol.candidates import pack_array

PROMPT = [5, 6, 8, 9, 10]
FIELDS = ("prompt_token_id_logprobs", "prompt_rest_logprobs", "prompt_token_logprobs")
NAME = "sampling_params.prompt_logprob_token_ids"


def npy(packed: str | bytes) -> Any:
    raw = base64.b64decode(packed) if isinstance(packed, str) else packed
    return np.load(io.BytesIO(raw), allow_pickle=False)


def test_a_matrix_of_the_candidates_and_a_column_of_the_rest() -> None:
    reply = generate(site(), PROMPT, prompt_logprob_token_ids=[[8, 3], [9], []], prompt_logprob_start=1)
    scores, rest, tokens = (npy(reply[name]) for name in FIELDS)
    assert scores.shape == (3, 2) and rest.shape == tokens.shape == (3,)
    assert {array.dtype.str for array in (scores, rest, tokens)} == {"<f4"}
    assert reply["prompt_logprobs"] is None and len(reply["choices"][0]["token_ids"]) == 4


def test_every_form_has_the_same_reply() -> None:
    row, s = [8, 3], site()
    packed = [pack_array(np.array(ids, np.int32)) for ids in (row, [row] * 4)]
    forms = [row, [row] * 4, *(base64.b64encode(one).decode() for one in packed)]
    replies = [generate(s, PROMPT, prompt_logprob_token_ids=form, n=2) for form in forms]
    values = [[reply[name] for name in FIELDS] for reply in replies]
    assert values.count(values[0]) == 4 and npy(values[0][0]).shape == (4, 2)
    assert all(len(reply["choices"]) == 2 for reply in replies)
    for form in (row, *packed):
        request = body(PROMPT, prompt_logprob_token_ids=form)
        response = s.post(
            GENERATE, content=msgspec.msgpack.encode(request), headers={"content-type": MSGPACK, "accept": MSGPACK}
        )
        decoded = msgspec.msgpack.decode(response.content)
        assert [npy(decoded[name]).tolist() for name in FIELDS] == [npy(value).tolist() for value in values[0]]


def test_the_first_event_of_a_stream_has_the_arrays() -> None:
    s = site()
    reply = generate(s, PROMPT, prompt_logprob_token_ids=[8, 3])
    response = s.post(GENERATE, body(PROMPT, prompt_logprob_token_ids=[8, 3]) | {"stream": True})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    assert [events[0][name] for name in FIELDS] == [reply[name] for name in FIELDS]
    assert not any(name in event for event in events[1:] for name in FIELDS)


def test_rows_beyond_the_prompt_are_none() -> None:
    for start in (4, 100):
        reply = generate(site(), PROMPT, prompt_logprob_token_ids=[8, 3], prompt_logprob_start=start)
        assert npy(reply["prompt_token_id_logprobs"]).shape == (0, 2)
    assert npy(generate(site(), [5], prompt_logprob_token_ids=[])["prompt_token_id_logprobs"]).size == 0


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"prompt_logprob_token_ids": [[1]] * 3}, NAME, "must have 4 rows"),
        ({"prompt_logprob_token_ids": []}, NAME, "must have 4 rows"),
        ({"prompt_logprob_token_ids": [[1], 2]}, NAME, "not both"),
        ({"prompt_logprob_token_ids": [1, 10**6]}, f"{NAME}", "[1] is 1000000"),
        ({"prompt_logprob_token_ids": [[1], [2], [3], [4, 10**6]]}, f"{NAME}", "[3][1] is 1000000"),
        ({"prompt_logprob_token_ids": [-2]}, NAME, "from 0 on"),
        ({"prompt_logprob_token_ids": [1 << 40]}, NAME, "32 bits"),
        ({"prompt_logprob_token_ids": [1] * 1025}, NAME, "at most 1024"),
        ({"prompt_logprob_token_ids": "AAAA"}, NAME, ".npy"),
        ({"prompt_logprob_token_ids": base64.b64encode(pack_array(np.zeros(2))).decode()}, NAME, "int32"),
        ({"prompt_logprob_token_ids": {"a": 1}}, NAME, ""),
        ({"prompt_logprob_token_ids": [1], "prompt_logprobs": 1}, "sampling_params.prompt_logprobs", "not taken"),
        ({"prompt_logprob_token_ids": [1], "prompt_logprob_start": -1}, "sampling_params.prompt_logprob_start", ""),
    ],
)
def test_refusals_name_the_field(params: dict[str, Any], field: str, words: str) -> None:
    response = site().post(GENERATE, body(PROMPT, **params))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field and words in error["message"]


def test_an_array_that_claims_more_than_it_has_is_refused_before_memory_is_taken() -> None:
    packed = pack_array(np.zeros((2, 8), np.int32)).replace(b"(2, 8), ", b"(1<<60,)")
    huge = pack_array(np.zeros((2, 8), np.int32)).replace(b"(2, 8), }   ", b"(99999999,)}")
    for form in (packed, huge):
        params = {"prompt_logprob_token_ids": base64.b64encode(form).decode()}
        response = site().post(GENERATE, body(PROMPT, **params))
        assert response.status_code == 400 and response.json()["error"]["param"] == NAME


def test_what_a_forced_output_excludes_is_refused() -> None:
    refused = [
        ({"trace_decode_token_ids": [3, 10**6]}, "trace_decode_token_ids[1]"),
        ({"trace_decode_token_ids": []}, "trace_decode_token_ids"),
        ({"trace_decode_token_ids": [3] * 10**4}, "trace_decode_token_ids"),
        ({"trace_decode_token_ids": [3], "n": 2}, "n"),
        ({"trace_decode_token_ids": [3], "stop": "a"}, "stop"),
        ({"trace_decode_token_ids": [3], "bad_words": ["a"]}, "bad_words"),
        ({"trace_decode_token_ids": [3], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {"trace_decode_token_ids": [3], "repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
            "repetition_detection",
        ),
    ]
    for params, field in refused:
        response = site().post(GENERATE, body(PROMPT, **params))
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == f"sampling_params.{field}", error
