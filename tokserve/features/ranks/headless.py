"""`tokserve serve --headless`: this machine's ranks of an engine that runs on the machine with node_rank 0.

Nothing is served here.  The ranks connect to the engine, take its options, and read the model from this machine's
files.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.config.engine_config import rank_config
from tokserve.features.ranks.spawn import LocalProcess, cluster_key
from tokserve.features.ranks.worker import RankOpening

logger = logging.getLogger("tokserve.headless")

TURN = 0.2  # seconds between two looks at the processes


class _Stopped(Exception):
    """Raised when a signal came."""


def hold(config: Config) -> int:
    """Start this machine's ranks and wait for their end; returns the exit code, 0 if the engine has ended them.  If the
    engine is lost, others are started for the one that replaces it, `restart_engine` times."""
    restarts = 0
    with _signals():
        while True:
            processes: list[LocalProcess] = []
            try:
                processes = [LocalProcess(opening) for opening in _openings(config)]
                code = _wait(processes)
            except _Stopped:
                logger.info("a signal: leaving")
                return 0
            except OSError as error:
                raise StartError(f"the processes of ranks could not be started: {error.strerror or error}") from error
            finally:
                for process in processes:
                    process.kill()
            if code == 0:
                logger.info("the engine has ended")
                return 0
            if restarts == config.runtime.restart_engine:
                logger.error("the engine, or a rank on this machine, was lost")
                return 1
            restarts += 1
            logger.warning("the engine, or a rank on this machine, was lost: waiting for another engine")


def _openings(config: Config) -> list[RankOpening]:
    parallel, logs = config.parallel, config.logs
    first = parallel.node_rank * parallel.ranks_here
    openings = []
    for rank in range(first, first + parallel.ranks_here):
        runtime = rank_config(config, rank).runtime
        openings.append(
            RankOpening(
                rank,
                f"{parallel.master_addr}:{parallel.master_port}",
                os.getpid(),
                "engine",
                logs.log_level,
                logs.log_format,
                cluster_key(config).hex(),
                rank - first,
                config.runtime.start_timeout,
                config.model.model,
                config.model.tokenizer,
                runtime.cpu_threads,
                runtime.cpu_bind,
            )
        )
    return openings


def _wait(processes: list[LocalProcess]) -> int:
    """Until one has failed, or all have ended: 0 if all were told to."""
    while True:
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(TURN)


@contextmanager
def _signals() -> Iterator[None]:
    """Within, SIGTERM and SIGINT raise _Stopped."""

    def stop(number: int, frame: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
