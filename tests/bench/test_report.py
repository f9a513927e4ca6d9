"""Numbers from known outcomes, and prompts from known seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tokserve.base.errors import StartError
from tokserve.bench.cli import _take_dataset
from tokserve.bench.clients import EventLines, ReceivedReply, RequestShape
from tokserve.bench.datasets import DatasetSpec, make
from tokserve.bench.report import Outcome, meets_goodput, parse_goodput, result, table
from tokserve.cli import main


def test_statistics_of_known_times() -> None:
    outcomes = [Outcome(start=1.0, end=1.0 + i, ttft=0.1 * i, input_tokens=2, output_tokens=3) for i in (1, 2, 3, 4)]
    outcomes.append(Outcome(start=0.0, end=99.0, ttft=9.0, output_tokens=50, error="no"))
    row = result(outcomes, 2.0, [50.0, 75.0], {"e2el": 2500.0})
    assert row["mean_ttft_ms"] == pytest.approx(250.0) and row["p75_e2el_ms"] == pytest.approx(3250.0)
    assert row["std_e2el_ms"] == pytest.approx(1e3 * np.std([1, 2, 3, 4])) and row["mean_tpot_ms"] is None
    assert (row["completed"], row["failed"], row["request_throughput"], row["output_throughput"]) == (4, 1, 2.0, 6.0)
    assert row["request_goodput"] == 1.0
    shown = table(row, [50.0, 75.0])
    assert "first error: no" in shown and "per output token" not in shown


def test_goodput_needs_every_limit() -> None:
    limits = parse_goodput(["ttft:100", "tpot:10"])
    assert meets_goodput(Outcome(start=0.0, ttft=0.1, tpot=0.01), limits)
    assert not meets_goodput(Outcome(start=0.0, ttft=0.1, tpot=0.011), limits)
    assert meets_goodput(Outcome(start=0.0, ttft=0.05), limits)


def test_events_cut_at_every_byte() -> None:
    stream = b': ping\r\n\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream) + 1):
        lines = EventLines()
        actual = [p for at in range(0, len(stream), size) for p in lines.feed(stream[at : at + size])]
        assert actual == [b'{"a":1}', b"two", b"[DONE]"]


def test_time_per_token_by_a_known_clock() -> None:
    reply = ReceivedReply(RequestShape())
    for at, ids, end in ((1.0, "[1]", "null"), (1.5, "[2,3]", "null"), (3.0, "[4]", '"stop"')):
        reply.take(f'{{"choices":[{{"index":0,"token_ids":{ids},"finish_reason":{end}}}]}}'.encode(), at)
    assert (reply.first, reply.gaps, reply.output_ids) == (1.0, [0.5, 1.5], [1, 2, 3, 4])
    assert reply.tpot() == pytest.approx(2.0 / 3)


def test_time_per_token_of_a_chat_runs_to_its_finish() -> None:
    reply = ReceivedReply(RequestShape(backend="openai-chat"))
    for at, delta, end in ((0.5, '""', "null"), (1.0, '"a"', "null"), (2.0, '"b"', "null"), (4.0, "null", '"length"')):
        reply.take(f'{{"choices":[{{"delta":{{"content":{delta}}},"finish_reason":{end}}}]}}'.encode(), at)
    reply.take(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":7}}', 4.5)
    assert (reply.first, reply.gaps, reply.tpot()) == (1.0, [1.0], pytest.approx(3.0 / 6))


def test_datasets_follow_their_seed_and_lengths() -> None:
    spec = DatasetSpec(kind="shared-prefix", shared_prefix_len=5, input_len=10, range_ratio=0.5, count=200, seed=4)
    talks = make(spec)
    prompts = [talk.turns[0].prompt for talk in talks]
    assert talks == make(spec) and len({tuple(p[:5]) for p in prompts}) == 1
    assert {len(p) for p in prompts} == set(range(10, 21))
    assert all(10 <= i < 256 for p in prompts for i in p)
    assert make(spec, stream=1)[0].turns[0].prompt[:5] == prompts[0][:5] != prompts[0][5:10]
    with pytest.raises(StartError, match="seed"):
        make(DatasetSpec(seed=-1))


def test_groups_of_prompts_share_their_prefix() -> None:
    spec = DatasetSpec(kind="shared-prefix", shared_prefix_len=20, group_size=3, input_len=2, count=8)
    prefixes = [tuple(talk.turns[0].prompt[:20]) for talk in make(spec)]
    assert prefixes == [prefixes[0]] * 3 + [prefixes[3]] * 3 + [prefixes[6]] * 2 and len(set(prefixes)) == 3
    warm_up = make(replace(spec, count=1), stream=1)
    assert tuple(warm_up[0].turns[0].prompt[:20]) == prefixes[0]
    with pytest.raises(StartError, match="--group-size must be at least 1"):
        make(replace(spec, group_size=0))
    with pytest.raises(StartError, match="--group-size needs --dataset shared-prefix"):
        make(DatasetSpec(group_size=3))


def test_a_length_of_shared_prefixes_chooses_their_dataset() -> None:
    parser = main.parser()
    for arguments, kind in ((["--shared-prefix-len", "9", "--group-size", "4"], "shared-prefix"), ([], "random")):
        values = vars(parser.parse_args(["bench", "serve", *arguments]))
        assert _take_dataset(values, text=False).kind == kind


@pytest.mark.parametrize("row", [b'{"prompt": "\xff"}', b'{"prompt": 1}', b"{", b'{"prompt": [9', b'{"prompt": ""}'])
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, row: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + row + b"\n")
    with pytest.raises(StartError, match=r"rows\.jsonl:2: "):
        make(DatasetSpec(kind="jsonl", path=str(path)))
