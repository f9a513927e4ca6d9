"""All options: a field is a name, a type, a default, a range and a sentence; the command line follows from it.

Field names are the command line flags (`max_model_len` is `--max-model-len`) and the keyword arguments of
`LLM` and `AsyncLLM`; they are unique over all groups, so the groups need not be named.  A component receives
its group only.  `resolve` replaces "auto" and None by values.
"""

from __future__ import annotations

import difflib
import os
import re
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tokserve.errors import StartError
from tokserve.params import LogprobsMode

SPECULATION_METHODS = ("suffix", "ngram", "prediction", "draft_model", "self", "none")  # the first is the default
DRAWING = ("draft_model", "self")  # methods by which the device draws drafts, where texts have none
SELF_QUANTIZATIONS = ("int8", "int4")  # of the method self; the first is the default
_SPECULATION = ", ".join(SPECULATION_METHODS)
# keys of other servers' methods that tune how drafts are found; here that is adaptive, so they change nothing
SPECULATION_HINTS = (
    "prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
)  # fmt: skip
DEFAULT_DRAFTS, MAX_DRAFTS = 32, 128  # of a request in a step
BACKENDS = ("disk", "http", "ipc", "gloo", "nccl")  # of weight transfers
PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")  # must be equal at both ends of a broadcast
GIB = 1 << 30
DEFAULT_CPU_KV_BYTES = 4 * GIB
DEFAULT_BLOCK_SIZE = 16
SECRET = ("api_key", "admin_api_key")  # options that are never shown
FOR_EVER = 1e9  # seconds, thirty years: the longest timeout that all clocks accept
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


def about(text: str, **limits: Any) -> Meta:
    """The field's sentence for --help, and its range."""
    return Meta(description=text, **limits)


class SpeculationPlan(NamedTuple):
    """What speculation does: its method, most drafts of a request in a step, and bytes of earlier outputs.

    `model`: where the draft model is; `quantization`: of the draft model, or of the method self.
    """

    method: str
    num_drafts: int
    history_bytes: int
    model: str | None = None
    quantization: str | None = None

    @property
    def draws(self) -> bool:
        """Whether the device draws drafts, with a draft model or with a copy of the model."""
        return self.method in DRAWING


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and how it is loaded."""

    model: Annotated[str, about("Directory of a Hugging Face checkpoint, a hub name `owner/name`, or `demo`.")] = "demo"
    tokenizer: Annotated[str | None, about("Directory or hub name of the tokenizer, if not the model's.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about("Type of weights and activations; auto: the checkpoint's own."),
    ] = "auto"
    head_dtype: Annotated[
        Literal["auto", "float32"],
        about("Type of the output projection's input and weight; auto: the model's. Logits are float32 always."),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "fp8", "none"] | None,
        about(
            "Quantize the projections of a floating checkpoint as it loads. int4: weights by groups of inputs, "
            "activations as they are, on a CPU. Per channel, activations per token: int8 on a CPU, fp8 (e4m3) on a GPU "
            "of compute capability 8.9 or more (a CPU can, slowly). none: compute with a quantized checkpoint in the "
            "model's dtype. Default: as the checkpoint stores its weights, float8 only on such a GPU."
        ),
    ] = None
    quantization_group_size: Annotated[
        Literal[32, 64, 128], about("With quantization int4, inputs that share a scale: fewer are more accurate.")
    ] = 128
    quantize_lm_head: Annotated[
        bool,
        about("Quantize the output projection too, as quantization says, int8 where that says nothing: faster, a "
              "little further from the original."),
    ] = False  # fmt: skip
    max_model_len: Annotated[
        Positive | None, about("Longest prompt plus output in tokens; default: the checkpoint's limit.")
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        about(
            "auto, safetensors: the checkpoint's files; dummy: seeded random weights at the shapes of config.json, no "
            "weight file is read."
        ),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "tokserve", "transformers"],
        about(
            "What computes the model. tokserve: a family that is built in. transformers: the module of that library, "
            "with our projections, KV pages and attention; bits are not promised. auto: tokserve where the "
            "architecture is built in."
        ),
    ] = "auto"
    hf_overrides: Annotated[dict[str, Any] | None, about("JSON object that replaces entries of config.json.")] = None
    generation_config: Annotated[
        str,
        about("Where the text routes take sampling defaults from: auto (the model), none, or a directory."),
    ] = "auto"
    seed: Annotated[int, about("Seed of dummy weights.")] = 0
    max_logprobs: Annotated[
        int, about("Most top logprobs per position that a request may ask for; -1: the whole vocabulary.", ge=-1)
    ] = 20
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        about(
            "generate: the model makes tokens. pooling: it makes embeddings, or probabilities of labels. auto: pooling "
            "for a checkpoint of sentence-transformers and for a classifier."
        ),
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any] | None,
        about(
            "With runner pooling, JSON with pooling_type (LAST, MEAN), use_activation (length 1; probabilities) and "
            "dimensions."
        ),
    ] = None
    logprobs_mode: Annotated[
        LogprobsMode,
        about(
            "Kind of logprobs for requests that do not say: raw, temperature or processed (vLLM's raw_logprobs and "
            "processed_logprobs are the first and the last)."
        ),
    ] = "raw"
    enable_return_routed_experts: Annotated[
        bool, about("Return the experts that were chosen for each position of prompt and output (CPU).")
    ] = False
    return_sampling_mask: Annotated[
        bool, about("Return the ids that each token was drawn from, and their mass, to requests that do not say.")
    ] = False
    max_sampling_mask: Annotated[
        int, about("Most ids of a sampling mask for one token; the mask of a token with more of them is null.", ge=1)
    ] = 1024
    eos_token_ids: Annotated[
        list[int] | None, about("End-of-sequence ids as a JSON list; default: generation_config.json and config.json.")
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache."""

    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=512)] | None,
        about("Tokens in a KV page; default: 16, on a GPU 64. On a CPU, attention takes 2.6 times as long if the size "
              "is not a multiple of 16."),
    ] = None  # fmt: skip
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        about("Size of the KV cache in bytes (suffixes K, M, G are understood); default: what "
             "max_num_seqs full contexts need, at most gpu_memory_utilization of the free memory and, on a CPU, "
             "4 GiB (or one full context, if that is more)."),
    ] = None  # fmt: skip
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3"],
        about("Type of cached keys and values; auto: the model's. fp8 (that is fp8_e4m3, on a GPU): half the memory, "
              "each rounded to 4 bits of precision, by the layers' scales if the checkpoint has some."),
    ] = "auto"  # fmt: skip
    gpu_memory_utilization: Annotated[
        float, about("Share of the device's free memory that the KV cache may take.", gt=0, le=1)
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool, about("Reuse the KV pages of earlier requests that begin with the same tokens.")
    ] = True
    state_snapshot_interval: Annotated[
        NotNegative,
        about("Of models with recurrent states: tokens between two snapshots of a request's state, rounded up to whole "
              "KV pages. The prefix cache reuses a prefix up to its last snapshot; one more is taken where the last "
              "full page of a prompt ends. 0: none are taken, so such a model's prefixes are not reused."),
    ] = 512  # fmt: skip
    state_snapshot_memory_bytes: Annotated[
        NotNegative,
        about("Most memory for snapshots of recurrent states (suffixes K, M, G are understood); the least recently "
              "used are dropped first."),
    ] = GIB  # fmt: skip
    grammar_cache_bytes: Annotated[
        Positive,
        about("Memory for compiled grammars (structured outputs) that are kept for later requests, the least recently "
              "used dropped first (suffixes K, M, G are understood)."),
    ] = 128 << 20  # fmt: skip


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and policy of the scheduler."""

    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        about("Most requests (each choice is one) that run at once; default: 128, on a GPU 256."),
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None,
        about("Most tokens computed in one step; longer prompts are cut into chunks. Default: 2048, on a GPU 8192."),
    ] = None
    max_chunk: Annotated[
        Positive | None,
        about("Most tokens of one prompt in a step while others wait or run; default: no bound but the budget."),
    ] = None
    scheduling_policy: Annotated[
        Literal["priority", "fcfs"],
        about("Order of waiting requests: priority serves lower ones first and equal ones as they arrive; fcfs serves "
              "all as they arrive, and refuses a request that has a priority."),
    ] = "priority"  # fmt: skip
    max_queued_requests: Annotated[
        NotNegative | None,
        about("Most requests (each choice is one) that may wait for a slot; one that would exceed it is refused "
              "with 429. Default: no limit."),
    ] = None  # fmt: skip
    max_queued_tokens: Annotated[
        NotNegative | None, about("The same for the prompt tokens of the requests that wait. Default: no limit.")
    ] = None
    fair_clients: Annotated[
        bool,
        about("Share slots and prompt tokens of a step equally between clients that have requests; off: the scheduling "
              "policy alone decides. One client may use everything either way."),
    ] = True  # fmt: skip
    max_requests_per_client: Annotated[
        Positive | None,
        about("Most requests (each choice is one) that a client may have in flight; one that would exceed it is "
              "refused with 429. A client is an API key, or an address where no keys are used. Default: no limit."),
    ] = None  # fmt: skip
    depth: Annotated[
        Literal[1, 2] | None,
        about("Steps in flight: 1 plans after a step's result is known, 2 while it runs. Default: 1, on a GPU 2."),
    ] = None

    @property
    def rows(self) -> int:
        """`max_num_seqs`, or its default on a CPU."""
        return self.max_num_seqs or 128

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or its default on a CPU."""
        return self.max_num_batched_tokens or 2048

    @property
    def steps_in_flight(self) -> int:
        """`depth`, or its default on a CPU."""
        return self.depth or 1

    def on_a_gpu(self) -> SchedulerConfig:
        """With a GPU's defaults: steps are short, so the host must be ahead of them, and prompts long, to fill it."""
        return msgspec.structs.replace(
            self, max_num_seqs=self.max_num_seqs or 256, depth=self.depth or 2,
            max_num_batched_tokens=self.max_num_batched_tokens or 8192,
        )  # fmt: skip

    def resolved(self) -> SchedulerConfig:
        """With every default of a CPU."""
        return msgspec.structs.replace(
            self, max_num_seqs=self.rows, depth=self.steps_in_flight, max_num_batched_tokens=self.token_budget
        )


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculation: drafts of the next tokens that a step verifies (docs/speculation.md)."""

    speculative_config: Annotated[
        dict[str, Any] | None,
        about('JSON object {"method": NAME, "num_speculative_tokens": N}: drafts come from what requests predict '
              "(prediction), also from their own text (ngram), also from earlier outputs (suffix, the default), also "
              'from a smaller model (draft_model, with "model": DIR) or a quantized copy of the model (self, with '
              '"quantization": "int8" or "int4"), or nowhere (none). No result depends on it.'),
    ] = None  # fmt: skip
    spec_method: Annotated[
        str | None, about("The same as method in speculative_config; or self-int8 or self-int4.")
    ] = None  # fmt: skip
    spec_model: Annotated[
        str | None, about("The same as model in speculative_config: directory or hub name of a smaller model with the "
                          "same vocabulary, which drafts."),
    ] = None  # fmt: skip
    spec_tokens: Annotated[
        Positive | None, about("The same as num_speculative_tokens in speculative_config: most drafts of a request in "
                               "a step; default: 32."),
    ] = None  # fmt: skip
    speculative_history_bytes: Annotated[
        NotNegative,
        about("Memory for earlier outputs that are drafts for later ones (suffixes K, M, G are understood); 0: none "
              "are kept."),
    ] = 64 << 20  # fmt: skip

    def resolved(self) -> SpeculationPlan:
        """What the options amount to.  Raises StartError for what is not served."""
        given = self._given()
        model, quantization = given.pop("model", None), given.pop("quantization", None)
        method = given.pop("method", None) or (SPECULATION_METHODS[0] if model is None else "draft_model")
        if method not in SPECULATION_METHODS:
            raise StartError(f"option speculative_config: there is no method {method!r}; methods are {_SPECULATION}")
        if model is not None and not isinstance(model, str):
            raise StartError(f"option speculative_config: model must be a directory or a hub name, got {model!r}")
        if (method == "draft_model") != (model is not None):
            raise StartError("option speculative_config: the method draft_model needs a model, and no other takes one")
        if quantization is None and method == "self":
            quantization = SELF_QUANTIZATIONS[0]
        if quantization is not None and (method not in DRAWING or quantization not in SELF_QUANTIZATIONS):
            raise StartError(
                f"option speculative_config: quantization is {' or '.join(SELF_QUANTIZATIONS)}, for the methods "
                f"{' and '.join(DRAWING)}; got {quantization!r} for {method}"
            )
        most = given.pop("num_speculative_tokens", None)
        most = DEFAULT_DRAFTS if most is None else most
        if type(most) is not int or not 1 <= most <= MAX_DRAFTS:
            raise StartError(
                f"option speculative_config: num_speculative_tokens must be an integer from 1 to {MAX_DRAFTS}, "
                f"got {most!r}"
            )
        unknown = [name for name in given if given[name] is not None and name not in SPECULATION_HINTS]
        if unknown:
            raise StartError(
                f"option speculative_config: unknown key {unknown[0]!r}; keys are method, model, quantization and "
                "num_speculative_tokens"
            )
        history = self.speculative_history_bytes if method in ("suffix", *DRAWING) else 0
        return SpeculationPlan(method, most, history, model, quantization)

    def _given(self) -> dict[str, Any]:
        """The object, with what the flags say."""
        given = dict(self.speculative_config or {})
        flags: dict[str, Any] = {
            "method": self.spec_method, "model": self.spec_model, "num_speculative_tokens": self.spec_tokens,
        }  # fmt: skip
        name, _, quantization = (self.spec_method or "").partition("-")
        if name == "self" and quantization:
            flags |= {"method": name, "quantization": quantization}
        for name, flag in flags.items():
            if flag is not None and given.setdefault(name, flag) != flag:
                raise StartError(f"option speculative_config: {name} is {given[name]!r}, and {flag!r} by its own flag")
        return given


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
        Positive | None, about("Threads of the CPU kernels; default: the cores this process may use.")
    ] = None
    cpu_bind: Annotated[
        str,
        about("CPUs that these threads are bound to, one each: a list such as 0-15,32-47 (as many threads then run), "
              "none, or auto: all that this process may use, if they have several memory nodes and a thread each."),
    ] = "auto"  # fmt: skip
    cpu_arithmetic: Annotated[
        Literal["auto", "fma", "pairs", "amx"],
        about("How a CPU multiplies bfloat16. fma: one chain of float32 multiply-adds, the same bits on every CPU; "
              "pairs: the dot product of AVX512-BF16; amx: the tiles of Intel's AMX; auto: the fastest, measured at "
              "the start."),
    ] = "auto"  # fmt: skip
    cpu_kernels: Annotated[
        str | None,
        about("Instruction set of the CPU kernels: amx, avx512_bf16, avx512_vnni, avx512f, avx2_vnni, avx2, neon_dot, "
              "neon or portable; it implies the arithmetic. Default: the best one that has the arithmetic."),
    ] = None  # fmt: skip
    ops: Annotated[
        dict[str, str] | None,
        about(
            'Implementation by op, as JSON, e.g. {"rms_norm": "torch"}; "*" names all ops. Default: the fastest here.'
        ),
    ] = None
    start_timeout: Annotated[float, about("Seconds the engine may take to get ready.", gt=0, le=FOR_EVER)] = 600.0
    step_timeout: Annotated[
        float,
        about("Seconds a step may take: an engine that has not answered for longer is hung, and /health says 503; "
              "with --restart-engine it is then replaced.", gt=0, le=FOR_EVER),
    ] = 600.0  # fmt: skip
    restart_engine: Annotated[
        NotNegative,
        about("How often within ten minutes an engine that crashes or hangs is replaced by a new one in the same "
              "state, with its last weights if they were loaded from a directory; 0: the server ends with its engine."),
    ] = 0  # fmt: skip


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weight updates while serving."""

    weight_transfer_config: Annotated[
        dict[str, str | int | bool] | None,
        about('JSON object {"backend": NAME}: how update_weights gets tensors, one of disk, http, ipc, gloo, nccl; '
             "default: disk. disk and http always work. packed and packed_buffer_size_bytes may be given as well."),
    ] = None  # fmt: skip
    weight_staging: Annotated[
        Literal["auto", "beside", "in_place"],
        about("Where an update goes: beside the old weights, which keep serving, or in their place (nothing is served "
              "until it is complete); auto: beside, if a second set fits in the free memory."),
    ] = "auto"  # fmt: skip
    check_weights: Annotated[
        Literal["finite", "off"],
        about("finite: an update with a weight that is not finite, or not in the server's dtype, is rolled back at its "
              "commit."),
    ] = "finite"  # fmt: skip
    weight_transfer_timeout: Annotated[
        float, about("Seconds that a weight transfer waits for its sender before it fails.", gt=0, le=FOR_EVER)
    ] = 300.0
    control_lease: Annotated[
        float,
        about("Seconds without a call of an open weight update after which it is rolled back, as its trainer has "
              "probably gone; 0: never. A call can set its own (lease), that of a pause too.", ge=0, le=FOR_EVER),
    ] = 600.0  # fmt: skip
    weight_checksums: Annotated[
        bool,
        about("Compute a checksum of every tensor that is pushed, for /weight_checker; it takes about a second per "
              "gigabyte of an update. Weights that are read from files need none."),
    ] = True  # fmt: skip
    allowed_weight_dirs: Annotated[
        list[str] | None,
        about("Directory, with all below it, that weights may be read from while serving (repeatable); default: any."),
    ] = None
    worker_extension_cls: Annotated[
        str | None,
        about("module:Class whose methods /collective_rpc may call; it is constructed with the runner."),
    ] = None


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters."""

    enable_lora: Annotated[
        bool, about("Serve LoRA adapters: requests name one as their model, control routes load and unload them.")
    ] = False
    max_loras: Annotated[
        int,
        about("Most adapters loaded at once; memory for all of them is allocated at the start.", ge=1, le=1024),
    ] = 4
    lora_eviction: Annotated[
        Literal["lru", "none"],
        about("When --max-loras adapters are loaded and another is to be: lru unloads the one that has been unused for "
              "longest, if no request is using it; none refuses."),
    ] = "lru"  # fmt: skip
    max_lora_rank: Annotated[int, about("Highest rank an adapter may have.", ge=1, le=512)] = 16
    lora_modules: Annotated[
        list[str] | None,
        about("Adapter to load at the start, as NAME=DIRECTORY (several may follow one flag; repeatable).",
              extra={"several": True}),
    ] = None  # fmt: skip

    def modules(self) -> list[tuple[str, str]]:
        """(name, directory) of each of `lora_modules`.  Raises StartError."""
        pairs = [module.partition("=") for module in self.lora_modules or []]
        for module, (name, equals, path) in zip(self.lora_modules or [], pairs, strict=True):
            if not (name and equals and path):
                raise StartError(f"option lora_modules: expected NAME=DIRECTORY, got {module!r}")
        return [(name, path) for name, _, path in pairs]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP front end."""

    host: Annotated[str, about("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, about("Port to listen on; 0: any free one.", ge=0, le=65535)] = 8000
    uds: Annotated[str | None, about("Path of a Unix socket to listen on instead of host and port.")] = None
    api_server_count: Annotated[
        int, about("Processes that serve HTTP, on the same address and with one engine.", ge=1, le=64)
    ] = 1
    served_model_name: Annotated[
        list[str] | None,
        about("Names the model answers to (repeatable); the first is used in replies. Default: MODEL as it was given."),
    ] = None
    rl: Annotated[
        bool,
        about("Defaults for reinforcement learning: --logprobs-mode processed (the distribution that tokens are drawn "
              "from), --generation-config none (no sampling parameters but the request's), --scheduling-policy "
              "priority. An option that is given wins."),
    ] = False  # fmt: skip
    tokens_only: Annotated[
        bool, about("Serve the token routes only: no tokenizer is loaded, text routes are absent.")
    ] = False
    sglang_api: Annotated[
        bool,
        about("Serve SGLang's routes as well (/generate, /pause_generation, /update_weights_from_disk, ...), for "
              "trainers and routers that speak to SGLang; where a route has the same name, SGLang's is served."),
    ] = False  # fmt: skip
    api_key: Annotated[
        list[str] | None,
        about("Key clients must send, as bearer token or x-api-key (repeatable; or TOKSERVE_API_KEY). Default: none."),
    ] = None
    admin_api_key: Annotated[
        list[str] | None,
        about("Key for the control routes (repeatable); with one, api_key does not open them. Default: api_key does."),
    ] = None
    allow_remote_control: Annotated[
        bool, about("Without any keys, answer control routes to other machines too: they can change the weights.")
    ] = False
    allowed_hosts: Annotated[
        list[str] | None,
        about("Name in the Host header that control and introspection routes answer to (repeatable; *: any). Default: "
              "where only this machine can connect, localhost, 127.0.0.1, [::1] and the host itself; else any."),
    ] = None  # fmt: skip
    reject_while_paused: Annotated[
        bool, about("Refuse requests (503) while the engine is paused or asleep; else they wait.")
    ] = False
    liveness_timeout: Annotated[float, about("Seconds the engine has to answer GET /liveness.", gt=0, le=FOR_EVER)] = (
        10.0
    )
    chat_template: Annotated[str | None, about("Jinja file, or the template itself, instead of the model's.")] = None
    trust_request_chat_template: Annotated[
        bool, about("Run templates from the chat_template of requests: one can use any amount of time and memory.")
    ] = False
    enable_auto_tool_choice: Annotated[
        bool | None,
        about("Parse tool calls out of the output when tool_choice is auto; default: if the model's format is known "
              "(tool_call_parser)."),
    ] = None  # fmt: skip
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "qwen3_coder", "mistral", "deepseek_v31", "llama3_json"],
        about("How the model writes tool calls: hermes (Qwen 2.5 and 3 too), qwen3_coder, mistral, deepseek_v31 or "
              "llama3_json; auto: as its chat template writes those of earlier turns, if that is one of these."),
    ] = "auto"  # fmt: skip
    reasoning_parser: Annotated[
        Literal["qwen3", "deepseek_r1", "mistral"] | None,
        about("Return the reasoning that a model writes first separately from the content: qwen3 (between <think> and "
              "</think>), deepseek_r1 (the same, even without an opening <think>) or mistral ([THINK]). Default: it "
              "stays in the content."),
    ] = None  # fmt: skip
    client_header: Annotated[
        str | None,
        about("Header that a reverse proxy sets to its client's address (such as X-Forwarded-For, of which the last "
              "address counts), to tell clients without API keys apart; without a proxy any client can set it. "
              "Default: the address of the connection."),
    ] = None  # fmt: skip
    max_body_mb: Annotated[int, about("Largest request body in MiB.", ge=1)] = 64
    keep_alive: Annotated[
        int, about("Seconds an idle HTTP connection is kept open, and a request's headers may take.", ge=5)
    ] = 75
    stream_stall_timeout: Annotated[
        float,
        about("Seconds after which a client that does not read its reply is disconnected, and its request aborted; 0: "
              "never.", ge=0, le=FOR_EVER),
    ] = 300.0  # fmt: skip
    shutdown_timeout: Annotated[
        float, about("Seconds that running requests may finish in after SIGTERM.", ge=0, le=FOR_EVER)
    ] = 10.0
    strict: Annotated[
        bool, about("Refuse unknown fields on the OpenAI routes too (they are named in X-Ignored-Fields otherwise).")
    ] = False
    structured_outputs_closed: Annotated[
        bool,
        about("Close the objects in JSON schemas of requests that do not say strict: outputs have no properties that "
              "the schema does not name, unless it allows them (additionalProperties), as with strict: true."),
    ] = False  # fmt: skip
    root_path: Annotated[str, about("Path prefix that a proxy strips.")] = ""
    ssl_keyfile: Annotated[str | None, about("TLS key file.")] = None
    ssl_certfile: Annotated[str | None, about("TLS certificate file.")] = None
    ssl_ca_certs: Annotated[str | None, about("CA file that client certificates must be signed by.")] = None
    ui: Annotated[bool | None, about("Serve the status page at /; default: if only this machine can connect.")] = None
    vllm_metric_names: Annotated[
        bool, about("Also export the metrics that vLLM has under its names (vllm:...), for its dashboards and routers.")
    ] = False
    log_format: Annotated[Literal["text", "json"], about("Log lines for people, or a JSON object per line.")] = "text"
    log_requests: Annotated[
        bool, about("Log each request when it is accepted or refused and when it ends: counts and times, no prompts.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        about("URL to send OpenTelemetry traces of requests to, as OTLP over HTTP (http://HOST:4318/v1/traces); needs "
              "the extra `otel`. Default: none are sent."),
    ] = None  # fmt: skip
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("Lowest level of log lines.")] = "info"
    log_stats_interval: Annotated[
        float, about("Seconds between the one-line statistics while requests run.", gt=0, le=FOR_EVER)
    ] = 10.0


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the cost of a request (docs/security.md).  Further limits follow from the model."""

    max_stop_strings: Annotated[
        int, about("Most stop strings of a request, and most of its stop_token_sequences.", ge=0)
    ] = 1024
    max_bad_words: Annotated[int, about("Most bad_words of a request, and most of its bad_token_sequences.", ge=0)] = (
        1024
    )
    max_words_bytes: Annotated[
        int, about("Most bytes of a request's stop strings together, and of its bad_words together.", ge=1)
    ] = 64 << 10
    max_messages: Annotated[int, about("Most messages of a chat, parts of contents and tool calls included.", ge=1)] = (
        1 << 14
    )
    max_body_values: Annotated[
        int,
        about("Most values in a request body, counted before it is decoded: a number or a text is one, a name in an "
              "object two, an object or a list eight.", ge=1000),
    ] = 2_000_000  # fmt: skip
    max_body_memory_bytes: Annotated[
        int,
        about("Most bytes of request bodies in memory at once, beyond the first 256 KiB of each; a request that would "
              "exceed it is refused with 503.", ge=1 << 20),
    ] = 512 << 20  # fmt: skip
    body_timeout: Annotated[
        float,
        about("Longest silence in seconds while a request body arrives, else 408; all of a body may take ten times as "
              "long.", gt=0, le=FOR_EVER),
    ] = 30.0  # fmt: skip
    max_reply_bytes: Annotated[
        int,
        about("Largest reply, as estimated from the choices, tokens and logprobs that a request asks for.", ge=1 << 20),
    ] = GIB  # fmt: skip


# what --rl changes where an option is not given
RL_DEFAULTS = {"logprobs_mode": "processed", "generation_config": "none", "scheduling_policy": "priority"}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The groups.  `Config.make(model="demo", port=8001)` fills them by field name."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculativeConfig = SpeculativeConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    weights: WeightsConfig = WeightsConfig()
    lora: LoraConfig = LoraConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()

    @classmethod
    def make(cls, **values: Any) -> Config:
        """Build from flat field names; None means the default.  Raises StartError naming the field at fault."""
        if values.get("rl"):
            values = values | {name: value for name, value in RL_DEFAULTS.items() if values.get(name) is None}
        groups: dict[str, dict[str, Any]] = {}
        homes = {name: group for group, name, _ in fields()}
        for name, value in values.items():
            if name not in homes:
                raise StartError(f"unknown option {name!r}{_nearest(name, homes)}")
            if name == "model" and value is None:  # an unset variable must not select the demo model
                raise StartError("option model: must be str, got None")
            if value is not None:
                groups.setdefault(homes[name], {})[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            return msgspec.convert(groups, cls)
        except msgspec.ValidationError as error:
            raise StartError(_readable(str(error), values)) from None


@cache
def fields() -> tuple[tuple[str, str, Any], ...]:
    """(group, field name, annotated type) of every option, in order of definition."""
    rows = []
    for group in msgspec.structs.fields(Config):
        hints = get_type_hints(group.type, include_extras=True)
        rows += [(group.name, field.name, hints[field.name]) for field in msgspec.structs.fields(group.type)]
    return tuple(rows)


def _nearest(name: str, known: dict[str, str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else "; `tokserve serve --help` lists all"


def _readable(message: str, values: dict[str, Any]) -> str:
    """msgspec's message, which ends with a path, as a sentence about the option and its value."""
    what, _, path = message.partition(" - at `$.")
    if not path:
        return message
    name, _, inside = path.rstrip("`").split(".", 1)[-1].partition("[")
    if what.startswith("Invalid enum value"):
        hint = next(hint for _, field, hint in fields() if field == name)
        what = f"must be one of {', '.join(str(choice) for choice in _choices(hint))}"
    elif bound := re.fullmatch(r"Expected `\w+` (>=|<=|>) (\S+)", what):
        words = {">=": "at least", "<=": "at most", ">": "above"}
        what = f"must be {words[bound[1]]} {bound[2]}"
    elif kind := re.match(r"Expected `([^`]+)`, got", what):
        what = f"must be {kind[1].replace(' | null', '').replace(' | ', ' or ').replace('array', 'list')}"
    given = "" if name in SECRET else f", got {values[name]!r}"
    return f"option {name}{'[' if inside else ''}{inside}: {what}{given}"


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of an annotated field's Literal."""
    return get_args(hint) if get_origin(hint) is Literal else next(filter(None, map(_choices, get_args(hint))), ())
