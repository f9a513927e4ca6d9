"""Plans and results as they go over a wire."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tokserve.protocol.columns import ColumnRows
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.plan import NewRow, StepPlan, StepResult, decode_hook, encode
from tokserve.protocol.prompt import Feature


def equal(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        return all(equal(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def carried(sent: Any) -> Any:
    return msgspec.msgpack.Decoder(type(sent), dec_hook=decode_hook).decode(encode(sent))


def test_a_plan_survives() -> None:
    feature = Feature("embeddings", b"hash", 1, 2, b"data")
    new = [
        NewRow(0, "a#0", ints(5, 6, 7), 2, SamplingParams(temperature=0.5, stop_token_ids=[1]), -3, (1, 2), 1),
        NewRow(1, "b#0", ints(5, 6, 7), 3, PoolingParams("mean", normalize=False), 0, (), features=(feature,)),
        NewRow(2, "c#0", ints(5, 6, 7), 3, SamplingParams(), 0, (), copied_block=(4, 9)),
    ]
    plan = StepPlan(
        7,
        slots=ints(0, 1),
        num_tokens=ints(3, 3),
        num_computed=ints(0, 0),
        num_drafts=ints(1, 0),
        num_logits=ints(2, 0),
        draft_token_ids=ints(9),
        new=new,
        blocks=[(0, 0, [4, 5]), (1, 0, [6])],
        freed=[2],
    )
    assert equal(carried(plan), plan)


def test_a_result_survives() -> None:
    result = StepResult(
        7,
        counts=ints(2, 0),
        token_ids=ints(9, 8),
        status=np.array([0, 3], np.uint8),
        columns={
            "logprobs": ColumnRows(ints(1, 2, 3, 4).reshape(1, 4)),
            "masks": ColumnRows(ints(2, 3).reshape(2, 1), ints(5, 6)),
        },
        values={
            "prompt_logprobs": {0: ints(3, 4).reshape(1, 2)},
            "pooled": {1: np.ones(4, np.float32)},
            "routed_experts": {0: ints(1, 2).reshape(1, 1, 2)},
        },
        totals={"keys": 1 << 40},
    )
    assert equal(carried(result), result)
