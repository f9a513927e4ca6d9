"""The engine as a process: `python -m tokserve.engine.process`, started by the front end and dying with it.

The parent writes one line of JSON to stdin, an `Opening`, and leaves stdin open: its end means that
the parent is gone.  This file has start-up, the loop around `EngineCore.step`, signals, and the report of a crash.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import msgspec

from tokserve.base import log, one_blas_thread  # noqa: F401
from tokserve.base.curve import EngineKeys
from tokserve.base.errors import DeviceLost, StartError, sendable
from tokserve.base.memory import FullCollections, IdleMemory, share_heaps
from tokserve.base.processes import wake_promptly
from tokserve.base.sockets import remove_stale
from tokserve.base.structs import prepare_structs
from tokserve.config import Config
from tokserve.engine.core import EngineCore
from tokserve.engine.socket import EngineSocket
from tokserve.executor.base import Executor, make
from tokserve.protocol.messages import Dead

logger = logging.getLogger("tokserve.engine.process")  # not __name__: that is __main__ here

PARENT_ENDS = 1.0  # seconds from the end of stdin to that of the parent, if it is ending
SWITCH = 1e-4  # seconds after which a thread hands the interpreter's lock to another, as the loop to the socket's
FIRST_HELLO = 2.0  # seconds that a failed start waits for the first front end
DIRECTORY_PREFIX = "tokserve-"  # of the directory a front end makes for the socket


class Opening(msgspec.Struct, frozen=True):
    """The line on stdin.  `name`: of the process, in its log.  For clients on other nodes, `keys`, and a descriptor
    to write the bound address to (`report`)."""

    address: str
    config: Config
    name: str = "engine"
    keys: EngineKeys | None = None
    report: int | None = None

    def bind(self, address: str) -> EngineSocket:
        """The socket at this address.  Raises StartError."""
        socket = EngineSocket(address, keys=self.keys)
        if self.report is not None:
            with suppress(BrokenPipeError), open(self.report, "w") as report:
                report.write(socket.address)
        return socket


def serve_front_ends(core: EngineCore, socket: EngineSocket, executor: Executor) -> None:
    """Turn until a front end asks for the end; asleep when there is nothing to do."""
    executor.watch(socket.wake)
    garbage, memory = FullCollections(), IdleMemory()
    busy = True
    try:
        while not core.stopped:
            executor.check()
            for identity, message, received in socket.take(0 if busy else memory.sleep(core.seconds_to_deadline())):
                core.receive(identity, message, received)
            busy = core.step()
            garbage.run_if_due()
            memory.turn(busy)
    finally:
        garbage.stop()


def run(address: str, config: Config, executor: Executor, bind: Callable[[str], EngineSocket] = EngineSocket) -> int:
    """The engine's life; returns the exit code."""
    try:
        socket = bind(address)
    except StartError as error:
        logger.error("%s", error)
        return 1
    core = None
    try:
        core = _start(config, executor, socket)
        serve_front_ends(core, socket, executor)
        core.close()
        executor.close()
        logger.info("stopped")
        return 0
    except StartError as error:
        logger.error("cannot start: %s", error)
        _send_dead(socket, Dead(str(error), expected=True))
        return 1
    except DeviceLost as error:
        logger.error("the engine ends: %s", error)
        _send_dead(socket, Dead(str(error)))
        return 1
    except Exception as error:  # process entry: the parent and the log must hear of it, whatever it is
        logger.exception("the engine died; %s", "while starting" if core is None else core.summary())
        _send_dead(socket, Dead(sendable(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        socket.close()


def _start(config: Config, executor: Executor, socket: EngineSocket) -> EngineCore:
    began = time.monotonic()
    facts = executor.start()
    layout = facts.layout
    logger.info(
        "loaded in %.2f s; KV cache: %d blocks of %d tokens, %.1f MiB",
        time.monotonic() - began,
        layout.num_blocks,
        layout.block_size,
        layout.bytes() / (1 << 20),
    )
    if layout.states is not None:
        logger.info(
            "recurrent states: %d slots, %d snapshots, %.1f MiB",
            layout.states.slots,
            layout.states.snapshots,
            layout.state_bytes() / (1 << 20),
        )
    core = EngineCore(config, executor, facts, socket.send, wake=socket.wake)
    prepare_structs()
    return core


def _send_dead(socket: EngineSocket, dead: Dead) -> None:
    """Tell every front end that has written; if none has yet, wait a little for the first."""
    if not socket.peers:
        with suppress(RuntimeError):  # of a failed I/O thread
            socket.take(FIRST_HELLO)
    for identity in list(socket.peers):
        socket.send(identity, dead)


# --- the process around it ---


def main(make_executor: Callable[[Config], Executor] = make) -> NoReturn:
    """Read the opening line, run, and leave without waiting for threads."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("the engine is started by `tokserve serve`, AsyncLLM or LLM, with its configuration on stdin")
    sys.path.append(os.getcwd())  # last: a worker extension may be a module there
    opening = msgspec.json.decode(line, type=Opening)
    config = opening.config
    log.setup(opening.name, config.logs.log_level, config.logs.log_format)
    _watch(opening.address, config.server.uds)
    sys.setswitchinterval(SWITCH)
    wake_promptly()
    share_heaps()
    code = run(opening.address, opening.config, make_executor(opening.config), opening.bind)
    _leave(opening.address, code)


def _watch(address: str, uds: str | None) -> None:
    """Leave at once on SIGTERM (0) or when the parent is gone, even while a step computes: a thread waits for
    either.  SIGINT and SIGHUP may go to a whole group of processes and are the parent's to judge.

    The end of stdin may come late, when a fork of the parent lives on with the pipe's other end: so the parent
    itself is watched too.  `uds`: the parent's own socket; its file is removed if the parent did not."""
    signals, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the byte in the pipe is what counts
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    stdin = sys.stdin.fileno()
    parent: list[int] = []
    with suppress(OSError):  # a parent of another namespace
        parent.append(os.pidfd_open(os.getppid()))

    def wait() -> NoReturn:
        while True:
            ready, _, _ = select.select([stdin, *parent, signals], [], [])
            if signals in ready and signal.SIGTERM in os.read(signals, 64):
                logger.info("SIGTERM: leaving")
                _leave(address, 0)
            if set(parent) & set(ready) or (stdin in ready and not os.read(stdin, 4096)):
                logger.info("the parent process is gone: leaving")
                if uds and select.select(parent, [], [], PARENT_ENDS)[0]:
                    remove_stale(uds)
                _leave(address, 0)

    threading.Thread(target=wait, name="watch", daemon=True).start()


def _leave(address: str, code: int) -> NoReturn:
    """Exit without joining threads; take the socket's file along, and its directory if a front end made it."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc" and not path.startswith("@"):
        directory = os.path.dirname(path)
        with suppress(OSError):
            os.unlink(path)
        if os.path.basename(directory).startswith(DIRECTORY_PREFIX):
            with suppress(OSError):  # not empty, or not there
                os.rmdir(directory)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
