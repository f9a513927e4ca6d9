"""A process for `test_new_output`: a server with another `params.py` and one more room, before a scripted engine.

`python -m tests.client.added_output PARAMS.PY ADDRESS MODEL < CASES`: each case is a body of the token route.  The
engine samples `COUNT` tokens from random logits, with the package's sampler.  Prints, as JSON, the margins of these
logits, then of each case the reply, and the events of the same as a stream.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx
import numpy as np
import torch

from tests.client.edited_params import load_params

COUNT, VOCAB = 4, 24


def logits() -> torch.Tensor:
    """The logits of the tokens of each reply."""
    return torch.randn(COUNT, VOCAB, generator=torch.Generator().manual_seed(5))


def margins() -> list[float]:
    """The differences of the two largest logits."""
    top = logits().topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()


async def serve(address: str, model: str, cases: list[Any]) -> list[Any]:
    """The margins; then of each case the reply, and the events of a stream."""
    from array import array

    from tests.client.fake_engine import FakeEngine, config, stop, tokens
    from tests.outputs import Output, unpack
    from tokserve.client.async_llm import AsyncLLM
    from tokserve.engine.output.columns import StepColumns, StepRows
    from tokserve.engine.output.output_buffer import Limits, OutputBuffer
    from tokserve.protocol.messages import EngineRequest, StepStats
    from tokserve.protocol.plan import NewRow
    from tokserve.runner.device import Host
    from tokserve.runner.logits import LogitRows
    from tokserve.runner.sampler import Sampler
    from tokserve.runner.tables.slots import SamplingColumns, Slots
    from tokserve.server.app import build_app

    def script(request: EngineRequest) -> list[Output]:
        """Sample all tokens in one step, and send one at a time."""
        output = OutputBuffer(request.task, 1, Limits(64, VOCAB, (), "raw"))
        slots = Slots(1, 16, 4)
        sampler = Sampler(slots, VOCAB, "raw", Host())
        row = NewRow(0, "", np.array([5], np.int32), 1, request.task, 1, (), columns=output.columns)
        slots.assign(row)
        sampler.assign(row)
        lengths = np.full(COUNT, 1, np.int64)
        rows = LogitRows(np.zeros(COUNT, np.int32), lengths, lengths)
        table = (slots.seeds[rows.slots], lengths, slots.greedy[rows.slots], slots.temperature[rows.slots])
        sampled = sampler.sample(logits(), rows, SamplingColumns(*map(torch.from_numpy, table))).result()
        step = {name: StepRows(column) for name, column in sampled.columns.items()}
        sent: list[Output] = []
        known = array("i", [5])
        for index, token in enumerate(sampled.token_ids.tolist()):
            known.append(token)
            output.add_rows(step, index, 1)
            columns = StepColumns()
            output.emit(columns, request.request_id, known, stop() if index == COUNT - 1 else None, 0)
            sent += unpack(columns.step(StepStats()))
        return sent if request.options.stream else [_joined(sent)]

    def _joined(sent: list[Output]) -> Output:
        from tokserve.client.outputs import join_columns
        from tokserve.protocol.columns import join

        ids = [token for output in sent for token in output.token_ids]
        columns = join_columns([output.columns for output in sent])
        scores = [output.logprobs for output in sent if output.logprobs is not None]
        logprobs = join(scores) if scores else None
        return tokens(sent[0].rid, ids, sent[-1].finish, logprobs=logprobs, columns=columns)

    results: list[Any] = [margins()]
    with FakeEngine(address, script=script) as engine:
        llm = AsyncLLM.from_config(config(model, tokens_only=True))
        await llm.connect(address)
        transport = httpx.ASGITransport(build_app(llm, llm.config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for body in cases:
                results.append((await client.post("/inference/v1/generate", json=body)).json())
                stream = await client.post("/inference/v1/generate", json=body | {"stream": True})
                lines = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
                results.append([json.loads(line) for line in lines])
        await llm.shutdown()
        del engine
    return results


if __name__ == "__main__":
    load_params(sys.argv[1])
    from tokserve.base import rooms

    rooms.ROOMS["margin"] = "tests.client.margin.room"
    print(json.dumps(asyncio.run(serve(sys.argv[2], sys.argv[3], json.load(sys.stdin)))))
