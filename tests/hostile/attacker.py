"""`python -m tests.hostile.attacker URL SOURCE SEED SECONDS`: a hostile client that draws attacks at random.

All its connections come from the address SOURCE.  It prints a line of JSON per attack, at its end.  It runs on what the
processors have left (SCHED_IDLE), as if it were on another machine: what the machine lacks it lacks, not the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from typing import Any

import httpx

import tests.hostile.dialect_attacks  # noqa: F401  (registers its attacks)
from tests.hostile import grammar_attacks, stream_attacks
from tests.hostile.attack import ATTACKS
from tests.hostile.grammar_attacks import ANSWERS, Fault

UNTIL_DEADLINE = {attack.__name__: attack for attack in (*grammar_attacks.ATTACKS, *stream_attacks.ATTACKS)}
NAMES = [*ATTACKS, *UNTIL_DEADLINE]
SHORTEST, LONGEST = 5.0, 15.0  # seconds of an attack that goes on until its deadline


def connect_from(source: str) -> None:
    """Let all sockets of this process that connect have this address."""

    class Socket(socket.socket):
        def connect(self, address: Any) -> None:
            if self.family == socket.AF_INET and self.getsockname()[1] == 0:
                self.bind((source, 0))
            super().connect(address)

    socket.socket = Socket  # type: ignore[misc]


def run(name: str, url: str, rng: random.Random, deadline: float) -> dict[str, Any]:
    """Run an attack: what the server answered, and what it must not have done."""
    ANSWERS.clear()
    fault = None
    begin, used = time.monotonic(), time.process_time()
    try:
        if name in ATTACKS:
            ANSWERS.update(Counter(answer.outcome for answer in ATTACKS[name](url, rng)))
        else:
            asyncio.run(UNTIL_DEADLINE[name](url, rng, min(deadline, begin + rng.uniform(SHORTEST, LONGEST))))
    except (httpx.TransportError, OSError) as error:
        ANSWERS[f"no answer ({type(error).__name__})"] += 1
    except (Fault, AssertionError, ValueError) as error:
        fault = f"{name}: {type(error).__name__}: {error}"
    return {
        "attack": name,
        "begin": begin,
        "end": time.monotonic(),
        "cpu": time.process_time() - used,
        "answers": dict(ANSWERS),
        "fault": fault,
    }


def main(url: str, source: str, seed: str, seconds: str) -> None:
    """Attack until the time is up."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    connect_from(source)
    rng = random.Random(int(seed))
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        print(json.dumps(run(rng.choice(NAMES), url, rng, deadline)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
