"""The wire between front end and engine: what goes in comes out, and is small."""

import numpy as np
import pytest

from tokserve import messages as m
from tokserve.params import SamplingParams


@pytest.mark.parametrize(
    "message",
    [
        m.Add("r", m.pack_ids([1, 2, 3]), SamplingParams(logit_bias={5: -1.5}, stop_token_sequences=[[1, 2]]), seed=-3),
        m.Abort(["a", "b"], "abort_user", 4),
        m.Call(7, "reset", {"level": 1}),
    ],
)
def test_messages_to_the_engine_survive(message: m.ToEngine) -> None:
    assert m.decode_to_engine(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Step([m.Output("r", m.pack_ids([9]), m.Logprobs(b"abcd", b"efgh"), None, 16)], m.StepStats(3)),
        m.Step([m.Output("r", finish=m.Finish("stop", "stop_sequence", [1, 2]), spans=[("0", 0, 5)])], m.StepStats()),
        m.Reply(4, {"a": "aborted"}),
        m.Ready(64, 100, 8, 16, [2], "0", {"ops": {"linear": "torch"}}),
        m.Dead("why", expected=True),
    ],
)  # fmt: skip
def test_messages_from_the_engine_survive(message: m.FromEngine) -> None:
    assert m.decode_from_engine(m.encode(message)) == message


def test_ids_are_packed_as_little_endian_int32() -> None:
    assert m.pack_ids([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert m.unpack_ids(m.pack_ids(range(100_000))) == list(range(100_000))


def test_one_token_of_a_stream_is_a_few_dozen_bytes() -> None:
    assert len(m.encode(m.Output("0123456789abcdef", m.pack_ids([77])))) < 50


def test_logprobs_join_and_cut_by_rows() -> None:
    def rows(start: int, n: int) -> m.Logprobs:
        column = np.arange(start, start + n, dtype="<f4").tobytes()
        wide = np.arange(2 * start, 2 * (start + n), dtype="<i4").tobytes()
        return m.Logprobs(column, column, wide, wide, 2, "raw")

    assert rows(0, 3).join(rows(3, 2)) == rows(0, 5)
    assert rows(0, 5).cut(3) == rows(0, 3)
