"""Options of the scheduler and of the device."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tokserve.config.common import FOR_EVER, NotNegative, Positive, about

MAX_THREADS = 1024  # of the CPU kernels


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and policy of the scheduler."""

    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        about("Most requests (each choice is one) that run at once; default: 128, on a GPU 256."),
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None,
        about("Most tokens computed in one step; longer prompts are cut into chunks. Default: 512, on a GPU 8192."),
    ] = None
    max_chunk: Annotated[
        Positive | None,
        about("Most tokens of one prompt in a step while others wait or run; default: no bound but the budget."),
    ] = None
    scheduling_policy: Annotated[
        Literal["priority", "fcfs"],
        about(
            "Order of waiting requests: priority serves lower ones first and equal ones as they arrive; fcfs serves "
            "all as they arrive, and refuses a request that has a priority."
        ),
    ] = "priority"
    max_queued_requests: Annotated[
        NotNegative | None,
        about(
            "Most requests (each choice is one) that may wait for a slot; one that would exceed it is refused "
            "with 429. Default: no limit."
        ),
    ] = None
    max_queued_tokens: Annotated[
        NotNegative | None, about("The same for the prompt tokens of the requests that wait. Default: no limit.")
    ] = None
    fair_clients: Annotated[
        bool,
        about(
            "Share slots and prompt tokens of a step equally between clients that have requests; off: the scheduling "
            "policy alone decides. One client may use everything either way."
        ),
    ] = True
    max_requests_per_client: Annotated[
        Positive | None,
        about(
            "Most requests (each choice is one) that a client may have in flight; one that would exceed it is "
            "refused with 429. A client is an API key, or an address where no keys are used. Default: no limit."
        ),
    ] = None
    depth: Annotated[
        Literal[1, 2] | None,
        about(
            "How many steps are in flight: with 1 a step is planned when the result of the one before is known, with 2 "
            "while that one still runs. Default: 1, on a GPU 2."
        ),
    ] = None

    @property
    def rows(self) -> int:
        """`max_num_seqs`, or its default on a CPU."""
        return self.max_num_seqs or 128

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or its default on a CPU."""
        return self.max_num_batched_tokens or 512

    @property
    def steps_in_flight(self) -> int:
        """`depth`, or its default on a CPU."""
        return self.depth or 1

    def on_a_gpu(self) -> SchedulerConfig:
        """The options with a GPU's defaults: steps are short, so the host must be ahead of them, and prompts long, to
        fill it."""
        return msgspec.structs.replace(
            self,
            max_num_seqs=self.max_num_seqs or 256,
            depth=self.depth or 2,
            max_num_batched_tokens=self.max_num_batched_tokens or 8192,
        )

    def resolved(self) -> SchedulerConfig:
        """The options with a CPU's defaults."""
        return msgspec.structs.replace(
            self, max_num_seqs=self.rows, depth=self.steps_in_flight, max_num_batched_tokens=self.token_budget
        )


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device and its kernels."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], about("Device; auto: cuda where there are an NVIDIA GPU and Triton, else cpu.")
    ] = "auto"
    exact: Annotated[
        bool,
        about("On a GPU, matrix products whose bits do not depend on the batch; off: cuBLAS. A CPU is always exact."),
    ] = True
    enforce_eager: Annotated[
        bool, about("Run every step op by op, instead of repeating recorded ones (on a GPU: CUDA graphs).")
    ] = False
    cpu_threads: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_THREADS)] | None,
        about("Threads of the CPU kernels; default: the cores this process may use, or fewer by a container's quota."),
    ] = None
    cpu_bind: Annotated[
        str,
        about(
            "CPUs that these threads are bound to, one each: a list such as 0-15,32-47 (as many threads then run), "
            "none, or auto: all that this process may use, if they have several memory nodes and a thread each."
        ),
    ] = "auto"
    cpu_arithmetic: Annotated[
        Literal["auto", "fma", "pairs", "amx"],
        about(
            "How a CPU multiplies bfloat16. fma: one chain of float32 multiply-adds, the same bits on every CPU; "
            "pairs: the dot product of AVX512-BF16; amx: the tiles of Intel's AMX; auto: the fastest, measured at "
            "the start."
        ),
    ] = "auto"
    cpu_kernels: Annotated[
        str | None,
        about(
            "Instruction set of the CPU kernels: amx, avx512_bf16, avx512_vnni, avx512f, avx2_vnni, avx2, neon_dot, "
            "neon or portable; it implies the arithmetic. Default: the best one that has the arithmetic."
        ),
    ] = None
    ops: Annotated[
        dict[str, str] | None,
        about(
            'Implementation by op, as JSON, e.g. {"rms_norm": "torch"}; "*" names all ops. Default: the fastest here.'
        ),
    ] = None
    start_timeout: Annotated[float, about("Seconds the engine may take to get ready.", gt=0, le=FOR_EVER)] = 600.0
    step_timeout: Annotated[
        float,
        about(
            "Seconds a step may take: an engine that has not answered for longer is hung, and /health says 503; "
            "with --restart-engine it is then replaced.",
            gt=0,
            le=FOR_EVER,
        ),
    ] = 600.0
    restart_engine: Annotated[
        NotNegative,
        about(
            "How often within ten minutes an engine that crashes or hangs is replaced by a new one in the same "
            "state, with its last weights if they were loaded from a directory; 0: the server ends with its engine."
        ),
    ] = 0
