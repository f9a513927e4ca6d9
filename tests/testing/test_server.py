"""`tokserve.testing.server` starts a real server and leaves nothing behind."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import httpx
import psutil
import pytest

from tokserve.base.errors import StartError
from tokserve.rl import Rollout, TokserveClient
from tokserve.testing import ServerFailed, server

pytest_plugins = ["pytester"]


async def rollouts_of(client: TokserveClient) -> list[Rollout]:
    async with client:
        return await client.generate([[1, 2, 3]], max_tokens=2)


def test_serves_ends_and_adds_its_log_to_an_error() -> None:
    with pytest.raises(ZeroDivisionError) as raised, server(tokens_only=True) as running:
        assert httpx.get(running.url + "/health").status_code == 200
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert 1 <= len(asyncio.run(rollouts_of(running.client))[0].token_ids) <= 2
        _ = 1 / 0
    assert any("serving on" in note for note in raised.value.__notes__)  # its log
    assert running.process.poll() == 0
    _, alive = psutil.wait_procs(processes, timeout=600)
    assert not alive


def test_a_server_that_cannot_start() -> None:
    with pytest.raises(ServerFailed, match="no-such-model"), server("./no-such-model"):
        raise AssertionError("not reached")
    with pytest.raises(StartError, match="unknown option 'max_num_seq'; did you mean 'max_num_seqs'"):
        server(max_num_seq=4)


@pytest.mark.slow
def test_the_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["tokserve.testing.plugin"]')
    pytester.makepyfile(
        """
        import asyncio, pytest

        @pytest.fixture(scope="session")
        def tokserve_options():
            return {"tokens_only": True, "served_model_name": ["mine"]}

        def test_generate(tokserve_server, tokserve_client):
            assert len(asyncio.run(tokserve_client.generate([[1, 2]], max_tokens=3, ignore_eos=True))[0].token_ids) == 3

        def test_same_server(tokserve_server):
            import httpx
            assert httpx.get(tokserve_server.url + "/v1/models").json()["data"][0]["id"] == "mine"
        """
    )
    pytester.runpytest_subprocess("-q", "-p", "no:randomly").assert_outcomes(passed=2)


def test_a_plain_installation_adds_nothing_to_pytest() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "pytest11" not in project.get("entry-points", {})
