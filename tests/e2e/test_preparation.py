"""Aborts of a request whose images are being processed: through its own API process, and through another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import Server
from tests.e2e.test_api_servers import PATIENCE, abort, reasons, send, until
from tests.e2e.test_images import ONE, by_parts
from tests.models.pictures import png, write_served

FLAGS = ("--dtype", "bfloat16", "--max-model-len", "512", "--api-server-count", "2")


def media_workers(api_process: psutil.Process) -> list[psutil.Process]:
    children = api_process.children(recursive=True)
    return [child for child in children if "tokserve.features.images.media.worker" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_an_abort_finds_a_request_whose_images_are_being_processed(tmp_path: Path) -> None:
    with Server(write_served(tmp_path / "vl"), *FLAGS) as server, ThreadPoolExecutor(1) as pool:
        assert reasons(send(server, 0, by_parts(ONE))) == {"length"}
        [worker] = [worker for process in server.api_processes() for worker in media_workers(process)]
        cases = ((1, {"request_ids": ["a"]}), (0, {"group_id": "g"}), (1, {"all": True}))
        for number, (index, which) in enumerate(cases):
            worker.suspend()
            image = png(44, 44, seed=number)  # each is processed once
            lost = pool.submit(send, server, 0, by_parts(image, request_id="a", group_id="g"))
            until(lambda index=index, which=which: abort(server, index, which)["aborted"] == 1)  # type: ignore[misc]
            assert not lost.done()
            worker.resume()
            answer = lost.result(PATIENCE)
            assert reasons(answer) == {"abort"} and answer.json()["choices"][0]["token_ids"] == []
            assert abort(server, 1, {"request_ids": ["a"]})["results"] == {"a": "finished"}
        assert reasons(send(server, 0, by_parts(ONE, request_id="a"))) == {"length"}
