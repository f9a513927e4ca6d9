"""Launch options of the kernels: floating point fusion off, warps by the size of a block, programs by the GPU.

Whether a product and a sum are rounded once is part of a kernel's arithmetic, so it is not left to the compiler's
default.  Options that change no bit are in a table, tuning.json, by GPU architecture and size.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tokserve.gpu import candidates

EXACT = {"enable_fp_fusion": False}
COUNTERS = 1 << 14
PER_WARP = 256  # elements of a block that a warp of 32 threads takes
TABLE = Path(__file__).with_name("tuning.json")
EARLY = tl.constexpr(2)  # of DEPENDENT, where 1 is later
_compiling = threading.Lock()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """First in a kernel of `launched`: the kernel before may still run, and nothing it writes may be read before, nor
    anything written that it reads."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        if DEPENDENT == EARLY:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Bring the lines of these addresses into the L2 cache; before `wait_for_inputs`, if no kernel writes them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def launch_dependents(DEPENDENT: tl.constexpr):
    """The next kernel may take the places that this one's programs leave free, up to its `wait_for_inputs`; with EARLY
    it may since this one's."""
    if DEPENDENT and DEPENDENT != EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def is_last_of(count_ptr, amount, total):
    """Add `amount` to what the programs that came here before have; whether that makes `total`.

    The last one sees what all of them wrote before they came, if it loads with the cache modifier ".cg", and leaves
    zero behind.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(count_ptr, amount, sem="acq_rel") + amount == total
    if is_last:
        tl.store(count_ptr, 0)
    return is_last


def cdiv(count: int, size: int) -> int:
    """The number of blocks of `size` for `count` elements.  (On the host Triton's cdiv takes 0.9 us, this 0.06.)"""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is at least `count`; 0 for 0, as Triton's."""
    return 1 << (count - 1).bit_length() if count else 0


def warps(block: int) -> int:
    """Warps for a block of that many elements: a power of two, 1 to 16."""
    return max(1, min(16, block // PER_WARP))


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """Entries by kernel; the first that fits is used."""
    entries: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return entries


class Gpu(NamedTuple):
    """What launches depend on: the architecture ("sm_90"), the bytes of shared memory that a program may take, and the
    number of multiprocessors."""

    architecture: str
    shared_memory: int
    multiprocessors: int


INTERPRETER = Gpu("", 1 << 30, 1)  # runs programs one by one, and has no limit


class _Process:
    """What tensors that are on no GPU stand for."""

    gpu = INTERPRETER


_process = _Process()


def compile_for(gpu: Gpu) -> None:
    """Let this process compile kernels for `gpu`, which it need not have, and run none: tensors are on "meta"."""
    _process.gpu = gpu
    tuned.cache_clear()


def only_compiles() -> bool:
    """Whether `compile_for` has been called."""
    return _process.gpu is not INTERPRETER


def shared_memory(device: int | None) -> int:
    """Bytes of shared memory that a program may take on GPU number `device`; without limit in the interpreter."""
    return _gpu(device).shared_memory


@cache
def tuned(kernel: str, device: int | None, **sizes: int) -> dict[str, Any]:
    """The table's entry for GPU number `device` (None: a CPU, where the interpreter runs) and these sizes."""
    entries = table()[kernel]
    if any("shared" in entry for entry in entries):
        sizes |= {"shared": shared_memory(device)}
    return next(entry for entry in entries if _fits(entry, _architecture(device), sizes))


def _fits(entry: dict[str, Any], architecture: str, sizes: dict[str, int]) -> bool:
    known = entry.get("arch", architecture) == architecture
    return known and all(size <= entry.get(name, size) for name, size in sizes.items())


def is_dependent(device: int | None) -> int:
    """Whether kernels begin while the ones before end (programmatic dependent launch): as the table says.  EARLY: as
    soon as all programs of the one before have begun, and not when they store."""
    dependent = int(tuned("launch", device)["dependent"])
    return EARLY.value if dependent and candidates.is_on("dependents_early") else dependent


def launched(device: int | None) -> dict[str, Any]:
    """Options of a kernel that begins with `wait_for_inputs`."""
    return EXACT | {"launch_pdl": True} if is_dependent(device) else EXACT


def _architecture(device: int | None) -> str:
    return _gpu(device).architecture


def multiprocessors(device: int | None) -> int:
    """The number that the GPU has; 1 on a CPU, where the interpreter runs programs one by one."""
    return _gpu(device).multiprocessors


def _gpu(device: int | None) -> Gpu:
    return _process.gpu if device is None else _installed(device)


@cache
def _installed(device: int) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(device)  # stubs lack attributes
    return Gpu(
        f"sm_{properties.major}{properties.minor}",
        int(properties.shared_memory_per_block_optin),
        int(properties.multi_processor_count),
    )


def counters(device: torch.device) -> Tensor:
    """COUNTERS zeros for `is_last_of`, which leaves them zero: one set for a thread, whose kernels run one after the
    other.  (Engines that are threads of one process run side by side; their graphs name the counters of their own.)"""
    return _counters(device, threading.get_ident())


@cache
def _counters(device: torch.device, thread: int) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """A table of addresses on the device, which kernels take to be multiples of 16; one that is known costs no
    transfer.  A step that is captured must keep it: see `kept_tables`."""
    table = _table_of(pointers, device)
    if _capturing.tables is not None:
        _capturing.tables.append(table)
    return table


class _Capturing(threading.local):
    """What `kept_tables` collects in this thread."""

    tables: list[Tensor] | None = None


_capturing = _Capturing()


@contextmanager
def kept_tables() -> Iterator[list[Tensor]]:
    """The tables of addresses that this thread's kernels take inside.  The cache of `addresses` may drop them."""
    tables: list[Tensor] = []
    _capturing.tables = tables
    try:
        yield tables
    finally:
        _capturing.tables = None


@lru_cache(maxsize=4096)
def _table_of(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    assert all(pointer % 16 == 0 for pointer in pointers), "packed weights begin at multiples of 16 bytes"
    return torch.tensor(pointers, dtype=torch.int64, device=device)


@contextmanager
def compile_ahead(jobs: int) -> Iterator[None]:
    """Kernels that this thread launches inside do not run: `jobs` threads compile and load them before the context
    ends, for the device that is current in this thread.  Kernels of other threads run as ever.

    The kernels' outputs are not initialized, so nothing inside may depend on their values.
    """
    if only_compiles():  # as it does outside
        yield
        return
    with _compiling:  # one at a time: each replaces Triton's method and restores it
        yield from _compile_ahead(jobs)


def _compile_ahead(jobs: int) -> Iterator[None]:
    run, kernels, owner = JITFunction.run, [], threading.get_ident()

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        kernels.append(run(kernel, *arguments, grid=grid, warmup=True, **options))
        return None

    device = driver.active.get_current_device()
    with ThreadPoolExecutor(jobs, initializer=driver.active.set_current_device, initargs=(device,)) as pool:
        JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(pool):
                yield
        finally:
            JITFunction.run = run
        compiled = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in kernels]
        unique = {id(kernel): kernel for kernel in compiled}.values()
        for loading in [pool.submit(getattr, kernel, "run") for kernel in unique]:
            loading.result()  # builds the launcher, and brings the code to the GPU


def torch_device() -> torch.device:
    """The device of the kernels' tensors: the current GPU, the CPU under the interpreter, or "meta" where kernels are
    compiled for a GPU that is not there."""
    if only_compiles():
        return torch.device("meta")
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
