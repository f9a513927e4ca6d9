"""Servers of `tokserve.testing` end with the process that started them, however it ends."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

START = "import os, signal\nfrom tokserve.testing import scripted_server, server\n"
SERVERS = {"real": "server(tokens_only=True)", "scripted": "scripted_server([])"}
ENDS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "term": "os.kill(os.getpid(), signal.SIGTERM)",
    "int": "os.kill(os.getpid(), signal.SIGINT)",
    "error": "1 / 0",
    "exit": "pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("block", [False, True], ids=["bare", "with"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", SERVERS)
def test_no_server_outlives_its_process(kind: str, end: str, block: bool) -> None:
    """serving-faults F17."""
    lines = ["print(s.process.pid, flush=True)", ENDS[end]]
    head = [f"with {SERVERS[kind]} as s:"] if block else [f"s = {SERVERS[kind]}", "s.url"]
    script = START + "\n".join(head + [f" {line}" if block else line for line in lines])
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=600)
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(timeout=600)
