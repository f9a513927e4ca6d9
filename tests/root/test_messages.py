"""The wire between front end and engine: what goes in comes out, and is small."""

import numpy as np
import pytest

from tokserve.protocol import messages as m
from tokserve.protocol.columns import Column, RowColumn, join
from tokserve.protocol.params import PoolingParams, RequestOptions, SamplingParams
from tokserve.protocol.prompt import Feature, TokenPrompt, pack_ids, unpack_ids


@pytest.mark.parametrize(
    "message",
    [
        m.Submit(
            4,
            "r",
            [
                m.EngineRequest(
                    "r#0",
                    TokenPrompt(b"1234"),
                    SamplingParams(logit_bias={5: -1.5}, bad_token_sequences=[[1]]),
                    RequestOptions(stream=True, group_id="g", deadline_ms=7),
                    -3,
                ),
                m.EngineRequest(
                    "r#1",
                    TokenPrompt(b"12341234", (Feature("embeddings", b"h", 1, 1, b"0123"),)),
                    PoolingParams("mean", normalize=False),
                    RequestOptions(),
                    0,
                ),
            ],
            "client",
        ),
        m.Abort(["a", "b"], "abort_user"),
        m.Stall(["a"], True),
        m.Call(7, "reset", {"level": 1}),
    ],
)
def test_messages_to_the_engine_survive(message: m.ToEngine) -> None:
    assert m.decode_to_engine(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.StepOutput(m.StepStats(3), ["r"], pack_ids([9]), b"", [RowColumn("logprobs", Column(b"abcdefgh", 8))]),
        m.StepOutput(
            m.StepStats(),
            ["r"],
            b"",
            pack_ids([0]),
            [],
            [
                m.RareFields(
                    0, m.Finish("stop", "stop_sequence", [1, 2]), 16, [("0", 0, 5)], {"pooled": b"1234", "n": {"a": 1}}
                )
            ],
        ),
        m.Reply(4, {"a": "aborted"}),
        m.SubmitReply(4, "queue_full", "the queue is full", 3),
        m.Ready(64, 100, 8, 16, [2], "0", {"ops": {"linear": "torch"}}),
        m.Dead("why", expected=True),
    ],
)
def test_messages_from_the_engine_survive(message: m.FromEngine) -> None:
    assert m.decode_from_engine(m.encode(message)) == message


def test_ids_are_packed_as_little_endian_int32() -> None:
    assert pack_ids([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert unpack_ids(pack_ids(range(100_000))) == list(range(100_000))


def test_one_token_of_a_stream_is_a_few_bytes_and_its_request() -> None:
    request_ids = [f"0123456789abcdef{i}" for i in range(64)]
    step = m.StepOutput(m.StepStats(), request_ids, pack_ids(range(64)))
    assert len(m.encode(step)) < 64 * 24 + 50


def column_of(first: int, count: int, width: int) -> Column:
    numbers = np.arange(first, first + count, dtype="<i4")
    return Column(np.repeat(numbers, width).tobytes(), 4 * width)


def masks_of(counts: list[int], ids: list[int], first: int = 0) -> Column:
    rows = np.repeat(np.arange(first, first + len(counts), dtype="<f4")[:, None], 3, 1)
    rows.view("<i4")[:, 0] = counts
    return Column(rows.tobytes(), 12, pack_ids(ids))


def test_rows_of_a_step() -> None:
    assert list(m.StepOutput(m.StepStats()).rows()) == []
    plain = m.StepOutput(m.StepStats(), ["a", "b"], pack_ids([7, 8]))
    assert list(plain.rows()) == [("a", [7], {}, None), ("b", [8], {}, None)]
    one = RowColumn("logprobs", column_of(5, 3, 2), pack_ids([0, 3]))
    two = RowColumn("logprobs", column_of(1, 1, 4), pack_ids([1]))
    end = m.RareFields(2, m.Finish("abort", "abort_user"))
    masks = RowColumn("masks", masks_of([2, -1, 0], [4, 5]), pack_ids([0, 3]))
    ids, counts = pack_ids([1, 2, 3, 4]), pack_ids([1, 1, 0, 2])
    mixed = m.StepOutput(m.StepStats(), ["a", "b", "c", "d"], ids, counts, [one, two, masks], [end])
    assert list(mixed.rows()) == [
        ("a", [1], {"logprobs": column_of(5, 1, 2), "masks": masks_of([2], [4, 5])}, None),
        ("b", [2], {"logprobs": column_of(1, 1, 4)}, None),
        ("c", [], {}, end),
        ("d", [3, 4], {"logprobs": column_of(6, 2, 2), "masks": masks_of([-1, 0], [], 1)}, None),
    ]
    every = m.StepOutput(m.StepStats(), ["a", "b"], pack_ids([1, 2]), b"", [RowColumn("logprobs", column_of(3, 2, 1))])
    assert [row[2] for row in every.rows()] == [{"logprobs": column_of(3, 1, 1)}, {"logprobs": column_of(4, 1, 1)}]


def test_ragged_columns_are_cut_and_joined_by_rows() -> None:
    masks = masks_of([2, -1, 3, -2, 1], [4, 5, 1, 2, 3, 9])
    assert masks.part(0, 0) == Column(stride=12)
    assert masks.part(0, 2) == masks_of([2, -1], [4, 5])
    assert masks.part(1, 4) == masks_of([-1, 3, -2], [1, 2, 3], 1)
    assert masks.part(0, 9) == masks, "as many as there are"
    counts = pack_ids([2, 0, 3])
    step = m.StepOutput(m.StepStats(), ["a", "b", "c"], pack_ids([1] * 5), counts, [RowColumn("masks", masks)])
    rows = [row[2]["masks"] for row in m.decode_from_engine(m.encode(step)).rows()]  # type: ignore[union-attr]
    assert rows == [masks.part(0, 2), Column(stride=12), masks_of([3, -2, 1], [1, 2, 3, 9], 2)]
    assert join(rows) == masks


def test_columns_are_cut_by_rows() -> None:
    assert column_of(0, 5, 3).part(0, 3) == column_of(0, 3, 3)
    assert column_of(0, 5, 3).part(2, 9) == column_of(2, 3, 3)
