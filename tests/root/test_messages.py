"""The wire between front end and engine: what goes in comes out, and is small."""

import numpy as np
import pytest

from tokserve.client.outputs import join_masks
from tokserve.protocol import messages as m
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
        m.StepOutput(m.StepStats(3), ["r"], pack_ids([9]), b"", [m.RowLogprobs(m.Logprobs(b"abcd", b"efgh"))]),
        m.StepOutput(
            m.StepStats(),
            ["r"],
            b"",
            pack_ids([0]),
            [],
            [
                m.RareFields(
                    0, m.Finish("stop", "stop_sequence", [1, 2]), m.Logprobs(), 16, weight_versions=[("0", 0, 5)]
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


def test_rows_of_a_step() -> None:
    def logprobs(first: int, count: int, width: int) -> m.Logprobs:
        packed_ids = pack_ids(range(first, first + count))
        return m.Logprobs(packed_ids, packed_ids, packed_ids * width, packed_ids * width, width)

    assert list(m.StepOutput(m.StepStats()).rows()) == []
    plain = m.StepOutput(m.StepStats(), ["a", "b"], pack_ids([7, 8]))
    assert list(plain.rows()) == [("a", [7], None, None, None), ("b", [8], None, None, None)]
    one, two = m.RowLogprobs(logprobs(5, 3, 0), pack_ids([0, 3])), m.RowLogprobs(logprobs(1, 1, 2), pack_ids([1]))
    end = m.RareFields(2, m.Finish("abort", "abort_user"))
    numbers, ids = [2, -1, 0, -2], [4, 5]  # of the tokens of rows a and d
    masks = m.RowSamplingMasks(masks_of(numbers[:3], ids), pack_ids([0, 3]))
    mixed = m.StepOutput(
        m.StepStats(),
        ["a", "b", "c", "d"],
        pack_ids([1, 2, 3, 4]),
        pack_ids([1, 1, 0, 2]),
        [one, two],
        [end],
        masks,
    )
    assert list(mixed.rows()) == [
        ("a", [1], logprobs(5, 1, 0), None, masks_of([2], [4, 5])),
        ("b", [2], logprobs(1, 1, 2), None, None),
        ("c", [], None, end, None),
        ("d", [3, 4], logprobs(6, 2, 0), None, masks_of([-1, 0], [], 1)),
    ]
    every = m.StepOutput(m.StepStats(), ["a", "b"], pack_ids([1, 2]), b"", [m.RowLogprobs(logprobs(3, 2, 1))])
    assert [row[2] for row in every.rows()] == [logprobs(3, 1, 1), logprobs(4, 1, 1)]


def masks_of(counts: list[int], ids: list[int], first: int = 0) -> m.SamplingMasks:
    rows = np.repeat(np.arange(first, first + len(counts), dtype="<f4")[:, None], 3, 1)
    rows.view("<i4")[:, 0] = counts
    return m.SamplingMasks(rows.tobytes(), pack_ids(ids))


def test_sampling_masks_are_cut_and_joined_by_rows() -> None:
    masks = masks_of([2, -1, 3, -2, 1], [4, 5, 1, 2, 3, 9])
    assert masks.cut(0) == m.SamplingMasks()
    assert masks.cut(2) == masks_of([2, -1], [4, 5])
    assert masks.cut(4) == masks_of([2, -1, 3, -2], [4, 5, 1, 2, 3])
    step = m.StepOutput(
        m.StepStats(), ["a", "b", "c"], pack_ids([1] * 5), pack_ids([2, 0, 3]), [], [], m.RowSamplingMasks(masks)
    )
    rows = [row[4] for row in m.decode_from_engine(m.encode(step)).rows()]  # type: ignore[union-attr]
    assert rows == [masks.cut(2), m.SamplingMasks(), masks_of([3, -2, 1], [1, 2, 3, 9], 2)]
    assert join_masks(rows) == masks


def test_logprobs_are_cut_by_rows() -> None:
    def rows(start: int, n: int) -> m.Logprobs:
        column = np.arange(start, start + n, dtype="<f4").tobytes()
        wide = np.arange(2 * start, 2 * (start + n), dtype="<i4").tobytes()
        return m.Logprobs(column, column, wide, wide, 2, "raw")

    assert rows(0, 5).cut(3) == rows(0, 3)
