"""An engine process for tests, `python -m tests.client.fake_process MODE`: the real opening, fake answers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import tokserve.base.one_blas_thread  # noqa: F401
from tests.client.fake_engine import READY, FakeEngine, echo
from tokserve.protocol.messages import Call, Dead, FromEngine, Reply

HERITAGE: dict[str, Callable[[Call], list[FromEngine]]] = {
    "heirless": lambda call: [],
    "refuses_heritage": lambda call: [Reply(call.call_id, error="KeyError in the engine; its log says more")],
}


def main(mode: str) -> None:
    """Behave as `mode` says."""
    if mode == "exit":
        sys.exit(3)
    address = json.loads(sys.stdin.readline())["address"]
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready = {
        "refuse": Dead("the checkpoint has no such tensor", expected=True),
        "crash": Dead("KeyError: 'x'"),
        "mute": None,
    }.get(mode, READY)
    engine = FakeEngine(address, ready, None if mode in ("hang", "deaf") else echo)
    engine.deaf = mode == "deaf"
    if mode in HERITAGE:
        engine.heritage = HERITAGE[mode]

    def parent_gone() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=parent_gone, daemon=True).start()
    if mode in ("refuse", "crash"):
        engine.wait(object)
        time.sleep(0.05)
        engine.close()
        os._exit(1)
    engine.closed.wait()
    if mode == "stubborn":
        time.sleep(600)
    engine.close()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
