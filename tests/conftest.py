"""Shared by all tests: one torch thread unless a test says otherwise, and an end that cannot hang.

Triton kernels run in its interpreter, on the CPU; scripts/gpu_check.sh sets TRITON_INTERPRET=0 to run them on a GPU.
"""

import atexit
import faulthandler
import functools
import gc
import logging
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests import threads
from tests.e2e.server import Server

MAX_CPU_SECONDS = 20.0  # of a test that is not slow; 5 on the machines that tests are written on, when these are idle
if "coverage" in sys.modules:  # Python code takes two to three times as long, with more frames below the tests
    MAX_CPU_SECONDS *= 3
    sys.setrecursionlimit(sys.getrecursionlimit() + 100)
END_SECONDS = 300.0  # of the process after its last test, on a machine that is busy
WITH_SERVERS = {"bench", "chaos", "conformance", "e2e", "examples", "fuzz", "hostile"}  # the third tier of README.md
THREADED = {"tokens_only", "float32"}  # servers of the session in threads of a test process

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
# httpx reads the certificates of all authorities, 40 ms of processor time, for each client and request without one.
ssl.create_default_context = functools.cache(ssl.create_default_context)
if os.environ["TRITON_INTERPRET"] == "0":  # kernels are compiled
    MAX_CPU_SECONDS = float("inf")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base-url", help="the server that tests/conformance asks, instead of one of its own")
    parser.addoption("--vocab-size", type=int, help="the vocabulary of a --base-url server that is not tokserve")
    parser.addoption("--eos-token-id", type=int, help="its end-of-sequence id")


@pytest.hookimpl(tryfirst=True)  # before --random-order
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`second_try` is pytest-rerunfailures' `flaky`, and needs a reason; `some` marks cases slow."""
    _mark_slow_cases(items)
    _alternate(items)
    for item in items:
        assert item.get_closest_marker("flaky") is None, f"{item.nodeid}: use second_try, with the reason"
        if mark := item.get_closest_marker("second_try"):
            assert len(mark.args) == 1 and mark.args[0], f"{item.nodeid}: second_try needs a reason"
            item.add_marker(pytest.mark.flaky(reruns=1))


def _mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark cases of tests with the mark `some` slow, all but so many, which are evenly spaced."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for table in cases.values():
        mark = table[0].get_closest_marker("some")
        assert mark is not None
        count = min(mark.args[0], len(table))
        fast = {i * len(table) // count for i in range(count)}
        for i, item in enumerate(table):
            if i not in fast:
                item.add_marker(pytest.mark.slow)


def _alternate(items: list[pytest.Item]) -> None:
    """Files with servers and other files in turns, while there are both: two processes that wait for servers at once
    leave processors idle, and so does a long file that begins last."""
    places: dict[Path, tuple[int, bool]] = {}
    counts = [0, 0]
    for item in items:
        has_servers = item.path.parent.name in WITH_SERVERS
        if item.path not in places:
            places[item.path] = counts[has_servers], not has_servers
            counts[has_servers] += 1
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Ten thousand tests and what they import stay: the collector need not look at them, now or later."""
    gc.disable()
    actual = yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind would name its objects that are still there
    for logger in logging.root.manager.loggerDict.values():  # pytest's handlers are added to each other root, per test
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    return actual


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A process of pytest-xdist tells the first one of calls and of what did not pass: it would be six messages for
    each test, and is two."""
    config = item.config
    if not hasattr(config, "workerinput") or config.option.durations is not None or item.get_closest_marker("flaky"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that `make test` runs is quick: in processor time of this process and of children that have ended.  With a
    sanitizer's build nothing is."""
    before = sum(os.times()[:4])
    yield
    spent = sum(os.times()[:4]) - before
    is_slow = {"slow", "network"} & {mark.name for mark in item.iter_markers()} or "TOKSERVE_SANITIZED" in os.environ
    if spent > MAX_CPU_SECONDS and not is_slow:
        pytest.fail(f"took {spent:.1f} s of processor time: make it quicker, or mark it slow", pytrace=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    """A thread or process that a failed test left behind must not keep the run from ending: say where, and end it.
    (A process of pytest-xdist waits here for the others, and is ended by the first.)"""
    if hasattr(config, "workerinput"):
        return
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=sys.__stderr__)


@pytest.fixture(autouse=True)
def ops_of_shared_servers(request: pytest.FixtureRequest) -> None:
    """Servers of the whole session share this process's ops with tests that bind others."""
    if not THREADED.isdisjoint(request.fixturenames):
        from tokserve import ops

        ops.bind("cpu", {})


@pytest.fixture(autouse=True)
def torch_as_at_the_start() -> None:
    """One thread and the same random numbers for each test, whatever ran before: a runner sets the threads."""
    import torch

    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats three stack traces where there is no device
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """The demo model with everything at its default, for tests that leave it idle and as it was."""
    with Server("demo") as server:
        yield server


@pytest.fixture(scope="module")
def engine_threads() -> Iterator[None]:
    """`LLM` starts its engines as threads."""
    with threads.engine_threads():
        yield


@pytest.fixture
def compiled() -> Iterator[None]:
    """Binds the compiled ops for a test, and the torch references afterwards."""
    from tokserve import ops

    ops.bind("cpu", {})
    yield
    ops.bind("cpu", {"*": "torch"})


@pytest.fixture(params=["torch", "cpp"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Binds one kind of implementation for a test, and the torch references afterwards."""
    from tokserve import ops
    from tokserve.base.errors import StartError

    try:
        ops.bind("cpu", {"*": request.param})
    except StartError as error:
        pytest.skip(str(error))
    yield request.param
    ops.bind("cpu", {"*": "torch"})


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restores the handlers and levels of the loggers after a test."""
    root, package = logging.getLogger(), logging.getLogger("tokserve")
    before = root.handlers[:], root.level, package.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, as `mend_interpreter` leaves it."""
    from tests.interpreted import mend_interpreter

    mend_interpreter(monkeypatch)
