"""`--kv-offloading-size` with real processes: prefixes outlive pressure and restarts, and results are those without."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.test_rl import variant
from tests.waiting import until

pytestmark = pytest.mark.slow
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", "800K", "--tokens-only")  # 50 blocks of 16 tokens
STORE = ("--kv-offloading-size", "0.05")
HALF = ("--kv-cache-memory-bytes", "400K")  # of each rank: as many blocks
RANKS: list[tuple[str, ...]] = [(), ("-tp", "2", *HALF), ("-pp", "2", *HALF)]
FIXED = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}


def prompt(number: int, length: int = 330) -> list[int]:
    return [40 + (index * 7 + number * 31) % 240 for index in range(length)]


def outcome(server: Server, number: int, **params: Any) -> tuple[Any, int]:
    """Tokens and logprobs, and how many tokens of the prompt were cached."""
    reply = server.generate(prompt(number), **(FIXED | params))
    choice = reply["choices"][0]
    details = choice["token_ids"], choice["logprobs"], reply["prompt_logprobs"]
    return details, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def operations(server: Server, operation: str) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if "kv_store_operations_total" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'operation="{operation}"' in line)


def wait_for(server: Server, operation: str, count: int) -> None:
    until(lambda: operations(server, operation) >= count, f"{operation} is below {count}")


def comes_from_the_store(server: Server, number: int, expected: Any) -> bool:
    """Whether blocks of the prompt do, as soon as they were kept; the reply is always the expected one."""
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    result, cached = outcome(server, number)
    assert result == expected and cached in (0, 320)
    return cached == 320


@pytest.mark.parametrize("ranks", RANKS, ids=" ".join)
def test_prefixes_outlive_pressure_a_kill_and_damage(ranks: tuple[str, ...], tmp_path: Path) -> None:
    with Server("demo", *SMALL, *ranks, "--no-enable-prefix-caching") as plain:
        outcomes = [outcome(plain, number)[0] for number in range(4)]
        scored = outcome(plain, 0, prompt_logprobs=1)[0]
    flags = (*SMALL, *STORE, *ranks, "--kv-offloading-dir", str(tmp_path))
    with Server("demo", *flags) as server:
        assert [outcome(server, number) for number in range(4)] == [(expected, 0) for expected in outcomes]
        # the cache holds two of them: the others come from memory
        assert [outcome(server, number) for number in range(4)] == [(expected, 320) for expected in outcomes]
        assert operations(server, "loaded") >= 40 and operations(server, "read") == 0
        assert server.metric("vllm:external_prefix_cache_hits_total") >= 640
        assert outcome(server, 0, prompt_logprobs=1) == (scored, 0)
        wait_for(server, "written", 80)
        server.stop(signal.SIGKILL)
    files = sorted(tmp_path.glob("rank1/*/*/*.kv" if ranks else "*/*/*.kv"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) >= 80
    for place, path in enumerate(files):
        if place % 20 == 5:
            path.write_bytes(path.read_bytes()[:-100])
        elif place % 20 == 10:
            changed = bytearray(path.read_bytes())
            changed[-1] ^= 1
            path.write_bytes(changed)
    (files[0].parent / "notes.txt").write_text("not ours")
    with Server("demo", *flags) as server:
        again = [outcome(server, number) for number in range(4)]
        assert [expected for expected, _ in again] == outcomes
        assert any(0 < cached <= 320 for _, cached in again)
        assert operations(server, "damaged") >= 1 and operations(server, "read") >= 5
        assert (files[0].parent / "notes.txt").read_text() == "not ours"
        server.wait_idle()


def test_a_disk_that_takes_nothing_costs_only_hits(tmp_path: Path) -> None:
    with Server("demo", *SMALL, *STORE, "--kv-offloading-dir", str(tmp_path)) as server:
        resource.prlimit(server.engine().pid, resource.RLIMIT_FSIZE, (500, 500))
        first = [outcome(server, number) for number in range(4)]
        assert [outcome(server, number) for number in range(4)] == [(expected, 320) for expected, _ in first]
        wait_for(server, "failed_writes", 1)
        assert operations(server, "written") == 0 and not list(tmp_path.glob("*/*/*.kv"))
    assert any("cannot be written" in line for line in server.log)


@pytest.mark.parametrize("ranks", RANKS[:2], ids=" ".join)
def test_a_weight_update_leaves_no_stale_kv(ranks: tuple[str, ...], tmp_path: Path) -> None:
    weights = [variant(tmp_path, seed) for seed in (1, 2)]
    outcomes = []
    for directory in weights:
        with Server(directory, *SMALL, *ranks) as plain:
            outcomes.append(outcome(plain, 0)[0])
    store = (*STORE, "--kv-offloading-dir", str(tmp_path / "kv"), "--allowed-weight-dirs", str(tmp_path))
    with Server(weights[0], *SMALL, *ranks, *store) as server:
        assert outcome(server, 0) == (outcomes[0], 0)
        for number in (1, 0, 1):
            reply = server.post("/update_weights", {"weight_dir": str(weights[number])})
            assert reply.status_code == 200, reply.text
            kept = operations(server, "saved")
            # until the digest of the new weights is computed
            until(lambda number=number: comes_from_the_store(server, 0, outcomes[number]))  # type: ignore[misc]
        assert operations(server, "saved") == kept  # these weights are back: what was kept of them is good again
        assert server.post("/sleep?level=1", {}).status_code == 200
        assert server.post("/wake_up", {}).status_code == 200
        assert outcome(server, 0) == (outcomes[1], 320)
        assert server.post("/reset_prefix_cache?reset_external=true", {}).status_code == 200
        assert outcome(server, 0) == (outcomes[1], 0)


def test_engines_share_a_directory(tmp_path: Path) -> None:
    flags = (*SMALL, *STORE, "--kv-offloading-dir", str(tmp_path), "-dp", "2")
    body = {"token_ids": prompt(0), "sampling_params": FIXED}
    with Server("demo", *flags) as server:
        replies = [server.post("/inference/v1/generate", body, headers={"X-data-parallel-rank": r}) for r in "01"]
        outcomes = [reply.json()["choices"][0]["token_ids"] for reply in replies]
        assert outcomes[0] == outcomes[1]
        wait_for(server, "written", 20)
    with Server("demo", *flags) as server:
        for rank in "01":
            reply = server.post("/inference/v1/generate", body, headers={"X-data-parallel-rank": rank}).json()
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
            assert reply["choices"][0]["token_ids"] == outcomes[0]
