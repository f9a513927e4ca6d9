"""One rank of an engine: a runner that does what the engine's messages say, in a process of its own.

`serve` needs only a connected socket to the engine, and the rank's number; what starts the process, and how it got the
address, it does not know (`spawn` starts `python -m tokserve.features.ranks.worker`).  The process ends with the
connection.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from tokserve import __version__
from tokserve.base import log, one_blas_thread  # noqa: F401
from tokserve.base.curve import ClientKeys
from tokserve.base.errors import RequestError, StartError, sendable
from tokserve.base.memory import no_collections
from tokserve.base.processes import end_with_parent
from tokserve.base.structs import UNREADABLE, prepare_structs
from tokserve.config import Config
from tokserve.features.ranks import auth
from tokserve.features.ranks.channel import (
    Begin,
    Broken,
    Channel,
    End,
    Forward,
    Interrupt,
    Invoke,
    Joined,
    Loaded,
    Returned,
    SampleStep,
    StartRefused,
    Stepped,
    StoreGet,
    StoreSet,
    StoreValue,
)
from tokserve.features.ranks.listeners import INHERITED
from tokserve.features.ranks.tunnel import Tunnel
from tokserve.protocol.plan import DeviceFacts

if TYPE_CHECKING:
    from tokserve.runner.ranks import Ranks
    from tokserve.runner.runner import Runner
    from tokserve.runner.steps import PendingResult

logger = logging.getLogger("tokserve.features.ranks.worker")  # not __name__: that is __main__ here

VISIBLE = "CUDA_VISIBLE_DEVICES"
LOST = 3  # the exit code if the engine is gone and has not said that it ends
PAUSE = 0.2  # seconds between two attempts to connect


class RankOpening(msgspec.Struct, frozen=True):
    """The line on stdin: this rank's number, how to reach the engine (fd:NUMBER or HOST:PORT), and the log's options.

    `parent`: the process that has started this one.  `key`: what ranks and engine prove to each other that they know,
    as hex; empty: nothing.  `keys`: for a tunnel to the engine.  `device`: the number of its GPU among those that the
    engine may use.  `patience`: seconds to wait for the engine to listen.  On another machine than the engine's
    `model`, `tokenizer`, `cpu_threads` and `cpu_bind` take the place of its options.
    """

    rank: int
    address: str
    parent: int
    name: str = "engine"
    log_level: str = "info"
    log_format: str = "text"
    key: str = ""
    device: int = 0
    patience: float = 0.0
    model: str | None = None
    tokenizer: str | None = None
    cpu_threads: int | None = None
    cpu_bind: str | None = None
    keys: ClientKeys | None = None

    def local(self, config: Config) -> Config:
        """The engine's configuration on this machine."""
        if self.model is None:
            return config
        replace = msgspec.structs.replace
        runtime = replace(config.runtime, cpu_threads=self.cpu_threads, cpu_bind=self.cpu_bind or "none")
        model = replace(config.model, model=self.model, tokenizer=self.tokenizer)
        return replace(config, model=model, runtime=runtime)


class RankWorker:
    """One rank; `serve` returns the exit code.  `leave`: ends the process at once."""

    def __init__(self, opening: RankOpening, channel: Channel, leave: Callable[[int], NoReturn]) -> None:
        self._opening, self._rank = opening, opening.rank
        self._channel, self._leave = channel, leave
        self._steps: queue.SimpleQueue[Begin | Forward | SampleStep | Invoke | End] = queue.SimpleQueue()
        self._background = ThreadPoolExecutor(1, "weights")
        self._lanes: dict[str, ThreadPoolExecutor] = {}  # of copies of KV blocks
        self._stepped = threading.Condition()
        self._num_stepped = 0  # steps that have ended here
        self._values: dict[str, queue.SimpleQueue[bytes]] = {}  # requested from the engine's store
        self._runner: Runner | None = None
        self._ending = False  # with an exit code of its own

    def serve(self) -> int:
        """Load the model and compute, until the engine says that it is enough."""
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        code = self._serve()
        self._ending = True
        return code

    def _serve(self) -> int:
        try:
            begin = self._steps.get()
            if not isinstance(begin, Begin):
                return 0
            loaded = Loaded.of(self._load(begin))
            prepare_structs()
            self._channel.send(loaded)
            self._run_steps(ahead=begin.config.scheduler.steps_in_flight > 1)
            return 0
        except StartError as error:
            self._channel.send(StartRefused(str(error)))
            return 1
        except ConnectionError:
            return LOST
        except Exception as error:  # process entry: the engine and the log must hear of it, whatever it is
            return self._break(error)

    def _load(self, begin: Begin) -> DeviceFacts:
        with no_collections():
            from tokserve.features.ranks.ranks import join_ranks
            from tokserve.runner.startup import load_runner  # brings torch

        ranks: Ranks = join_ranks(
            self._rank,
            begin.tensor,
            begin.stages,
            lambda key, value: self._channel.send(StoreSet(key, value)),
            self._get,
            begin.config.runtime.device,
            begin.address,
        )
        self._runner, facts = load_runner(self._opening.local(begin.config), ranks)
        return facts

    # --- messages ---

    def _receive(self) -> None:
        """Sort messages, until the engine is gone; then the process ends, even while it computes."""
        try:
            while True:
                message = self._channel.to_rank()
                if isinstance(message, StoreValue):
                    self._values[message.key].put(message.value)
                elif isinstance(message, Interrupt):
                    if self._runner is not None:
                        self._runner.interrupt()
                elif isinstance(message, Invoke) and message.lane:
                    if message.lane not in self._lanes:
                        self._lanes[message.lane] = ThreadPoolExecutor(1, f"kv-{message.lane}")
                    self._lanes[message.lane].submit(self._copy, message)
                elif isinstance(message, Invoke) and message.background:
                    self._background.submit(self._return, message, self._loaded().background)
                else:
                    self._steps.put(message)
        except (OSError, *UNREADABLE) as error:
            if self._ending:
                return
            logger.info("the engine is gone (%s): leaving", error)
        self._leave(LOST)

    def _loaded(self) -> Runner:
        assert self._runner is not None
        return self._runner

    def _run_steps(self, *, ahead: bool) -> None:
        """Steps and calls as they come; `ahead`: a step may begin before the tokens of the last one are known."""
        runner = self._loaded()
        results = ThreadPoolExecutor(1, "results")
        step: Any = None
        while not isinstance(message := self._steps.get(), End):
            if isinstance(message, Forward):
                step = runner.forward(message.plan)
            elif isinstance(message, SampleStep):
                pending = runner.sample(step, message.bitmask)
                with self._stepped:
                    self._num_stepped += 1
                    self._stepped.notify_all()
                if not runner.ranks.samples:
                    continue
                if ahead:
                    results.submit(self._send_later, pending)
                else:
                    self._channel.send(Stepped(pending.result()))
            elif isinstance(message, Invoke):
                self._return(message, runner.call)

    def _send_later(self, pending: PendingResult) -> None:
        """Wait for a step's tokens, and send them."""
        try:
            self._channel.send(Stepped(pending.result()))
        except ConnectionError:
            self._leave(LOST)
        except Exception as error:  # as in `_serve`: this thread has no caller
            self._leave(self._break(error))

    def _break(self, error: Exception) -> int:
        """Let the log and the engine hear of an exception that ends this rank; its exit code."""
        logger.error("rank %d died", self._rank, exc_info=error)
        self._channel.send(Broken(sendable(f"{type(error).__name__}: {error}")))
        return 1

    def _copy(self, call: Invoke) -> None:
        """Copy KV blocks after the steps that had ended when the engine called.  A step without logits may end on the
        sampling rank first: this rank may still have to write the last layer's KV, of these blocks or of blocks that
        are free by now."""
        with self._stepped:
            self._stepped.wait_for(lambda: self._num_stepped >= call.after_steps)
        self._return(call, self._loaded().copy)

    def _return(self, call: Invoke, method: Callable[[str, dict[str, Any]], Any]) -> None:
        """Call, and send what it returns or raises."""
        try:
            reply = Returned(call.call_id, method(call.method, call.args))
        except Exception as error:  # it belongs to the caller, as it does where the runner is in the engine's process
            if not isinstance(error, RequestError):
                logger.error("%s failed on rank %d:\n%s", call.method, self._rank, traceback.format_exc())
            reply = Returned.failed(call.call_id, error)
        try:
            self._channel.send(reply)
        except (TypeError, NotImplementedError, OverflowError) as error:
            self._channel.send(Returned(call.call_id, None, f"{call.method}: its result cannot be sent: {error}"))

    # --- what ranks find each other by ---

    def _get(self, key: str) -> bytes:
        waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._values[key] = waiting
        self._channel.send(StoreGet(key))
        return waiting.get()


def connect(address: str, key: str, patience: float = 0.0) -> Channel:
    """A channel to the engine, which may begin to listen within `patience` seconds.  Raises OSError, and
    ConnectionError if one end does not know the key."""
    end = time.monotonic() + patience
    while True:
        try:
            connection = _connected(address)
            break
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE)
    try:
        auth.prove(connection, bytes.fromhex(key), listens=False)
    except OSError:
        connection.close()
        raise
    return Channel(connection)


def _connected(address: str) -> socket.socket:
    if address.startswith(INHERITED):
        return socket.socket(fileno=int(address.removeprefix(INHERITED)))
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def _leave(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)


def main() -> NoReturn:
    """Read the opening line, connect, and serve."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("a rank is started by the engine")
    opening = msgspec.json.decode(line, type=RankOpening)
    if not end_with_parent(opening.parent):
        _leave(0)
    visible = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    os.environ[VISIBLE] = visible[opening.device] if opening.device < len(visible) else str(opening.device)
    sys.path.append(os.getcwd())  # last: a worker extension may be a module there
    for number in (signal.SIGINT, signal.SIGHUP):  # they go to a whole group, and are for the server to handle
        signal.signal(number, signal.SIG_IGN)
    log.setup(f"{opening.name}-rank{opening.rank}", opening.log_level, opening.log_format)  # type: ignore[arg-type]
    tunnel: Tunnel | None = None
    try:
        if opening.keys is not None:
            tunnel = Tunnel(opening.address, opening.keys)
            channel = Channel(tunnel.stream)
        else:
            channel = connect(opening.address, opening.key, opening.patience)
        channel.send(Joined(opening.rank, __version__))
    except OSError as error:
        logger.error("rank %d cannot join the engine at %s: %s", opening.rank, opening.address, error)
        _leave(1)
    code = RankWorker(opening, channel, _leave).serve()
    if tunnel is not None:
        tunnel.finish()
    _leave(code)


if __name__ == "__main__":
    main()
