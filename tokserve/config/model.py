"""Options of the model, its KV cache, its adapters and its weights."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokserve.base.errors import StartError
from tokserve.config.common import FOR_EVER, GIB, NotNegative, Positive, about
from tokserve.protocol.params import LogprobsMode

BACKENDS = ("disk", "http", "ipc", "gloo", "nccl")  # of weight transfers
PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")  # must be equal at both ends of a broadcast
DEFAULT_CPU_KV_BYTES = 4 * GIB
DEFAULT_BLOCK_SIZE = 16


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
        Literal["int8", "int4", "fp8", "none", "gptq", "awq", "compressed-tensors", "mxfp4", "gguf"] | None,
        about(
            "Quantize the projections of a floating checkpoint as it loads. int4: weights by groups of inputs, "
            "activations as they are. Per channel, activations per token: int8, and fp8 (e4m3), on a CPU or a GPU of "
            "compute capability 8.9 or more. none: compute with a quantized checkpoint in the model's dtype. gptq to "
            "gguf: the checkpoint must be of that kind. Default: as the checkpoint stores its weights; activations "
            "become float8 only on such a GPU."
        ),
    ] = None
    quantization_group_size: Annotated[
        Literal[32, 64, 128], about("With quantization int4, inputs that share a scale: fewer are more accurate.")
    ] = 128
    quantization_activations: Annotated[
        Literal["int8"] | None,
        about(
            "Round activations to int8, a group at a time, before they are multiplied by weights of 4 or 8 bits (W4A8, "
            "W8A8), on a CPU: faster, above all in batches and prompts, and less accurate. Default: they are not "
            "rounded."
        ),
    ] = None
    quantize_lm_head: Annotated[
        bool,
        about(
            "Quantize the output projection too, as --quantization says, or to int8 without it: faster, and slightly "
            "less accurate."
        ),
    ] = False
    max_model_len: Annotated[
        Positive | None,
        about(
            "Longest prompt plus output in tokens; default (auto): the checkpoint's limit, or with a warning what "
            "the KV cache holds."
        ),
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
        about(
            "Where the text routes take sampling defaults from: auto (the model), none, or a directory, whose "
            "max_new_tokens is also the most output tokens of any request."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None,
        about(
            'JSON object of sampling defaults of the text routes, such as {"temperature": 0.7}, which win over those '
            "of --generation-config; max_new_tokens is also the most output tokens of any request."
        ),
    ] = None
    seed: Annotated[int, about("Seed of dummy weights.")] = 0
    max_logprobs: Annotated[
        int, about("Most top logprobs per position that a request may have; -1: the whole vocabulary.", ge=-1)
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
        bool,
        about("Return the ids that each token was sampled from, and their probability, unless requests set the field."),
    ] = False
    max_sampling_mask: Annotated[
        int, about("Most ids of a sampling mask for one token; the mask of a token with more of them is null.", ge=1)
    ] = 1024
    eos_token_ids: Annotated[
        list[int] | None,
        about(
            "End-of-sequence ids as a JSON list; default: those of generation_config.json and config.json, and the "
            "tokenizer's eos_token."
        ),
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache."""

    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=512)] | None,
        about(
            "Tokens in a KV page; default: 16, on a GPU 64. On a CPU, attention takes 2.6 times as long if the size "
            "is not a multiple of 16."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        about(
            "Size of the KV cache in bytes (suffixes K, M, G are understood); default: what "
            "max_num_seqs full contexts need, at most gpu_memory_utilization of the free memory and, on a CPU, "
            "4 GiB (or one full context, if that is more)."
        ),
    ] = None
    shorten_context: Annotated[
        bool | None,
        about(
            "Serve shorter contexts, with a warning, where the KV cache cannot hold one of max_model_len, instead of "
            "refusing to start. Default: if max_model_len is not given."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3"],
        about(
            "Type of cached keys and values; auto: the model's. fp8 (that is fp8_e4m3, on a GPU): half the memory, "
            "each rounded to 4 bits of precision, by the layers' scales if the checkpoint has some."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, about("Share of the device's free memory that the KV cache may take.", gt=0, le=1)
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool, about("Reuse the KV pages of earlier requests that begin with the same tokens.")
    ] = True
    state_snapshot_interval: Annotated[
        NotNegative,
        about(
            "Of models with recurrent states: tokens between two snapshots of a request's state, rounded up to whole "
            "KV pages. The prefix cache reuses a prefix up to its last snapshot; one more is taken where the last "
            "full page of a prompt ends. 0: none are taken, so such a model's prefixes are not reused."
        ),
    ] = 512
    state_snapshot_memory_bytes: Annotated[
        NotNegative,
        about(
            "Most memory for snapshots of recurrent states (suffixes K, M, G are understood); the least recently "
            "used are dropped first."
        ),
    ] = GIB
    grammar_cache_bytes: Annotated[
        Positive,
        about(
            "Memory for compiled grammars (structured outputs) that are kept for later requests, the least recently "
            "used dropped first (suffixes K, M, G are understood)."
        ),
    ] = 128 << 20


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weight updates while serving."""

    weight_transfer_config: Annotated[
        dict[str, str | int | bool] | None,
        about(
            'JSON object {"backend": NAME}: how update_weights gets tensors, one of disk, http, ipc, gloo, nccl; '
            "default: disk. disk and http always work. packed and packed_buffer_size_bytes may be given as well."
        ),
    ] = None
    weight_staging: Annotated[
        Literal["auto", "beside", "in_place"],
        about(
            "Where an update goes: beside the old weights, which keep serving, or in their place (nothing is served "
            "until it is complete); auto: beside, if a second set fits in the free memory."
        ),
    ] = "auto"
    check_weights: Annotated[
        Literal["finite", "off"],
        about(
            "finite: an update with a weight that is not finite, or not in the server's dtype, is rolled back at its "
            "commit, and such an adapter is refused."
        ),
    ] = "finite"
    weight_transfer_timeout: Annotated[
        float, about("Seconds that a weight transfer waits for its sender before it fails.", gt=0, le=FOR_EVER)
    ] = 300.0
    control_lease: Annotated[
        float,
        about(
            "Seconds without a call of an open weight update after which it is rolled back, as its trainer has "
            "probably gone; 0: never. A call can set its own (lease), that of a pause too.",
            ge=0,
            le=FOR_EVER,
        ),
    ] = 600.0
    weight_checksums: Annotated[
        bool,
        about(
            "Compute a checksum of every tensor that is pushed, for /weight_checker; it takes about a second per "
            "gigabyte of an update. Weights that are read from files need none."
        ),
    ] = True
    allowed_weight_dirs: Annotated[
        list[str] | None,
        about("Directory, with all below it, that weights may be read from while serving (repeatable); default: any."),
    ] = None
    worker_extension_cls: Annotated[
        str | None,
        about(
            "module:Class whose methods /collective_rpc may call; constructed with the runner, or mixed into a worker."
        ),
    ] = None


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters."""

    enable_lora: Annotated[
        bool, about("Serve LoRA adapters: requests name one as their model, control routes load and unload them.")
    ] = False
    max_loras: Annotated[
        int,
        about("Most adapters on the device at once; memory for all of them is allocated at the start.", ge=1, le=1024),
    ] = 4
    lora_eviction: Annotated[
        Literal["lru", "none"],
        about(
            "When --max-loras adapters are loaded and another is named: with lru the one that has been unused for "
            "longest gives up its place, and is read again when a request names it; none refuses to load more."
        ),
    ] = "lru"
    max_lora_rank: Annotated[int, about("Highest rank an adapter may have.", ge=1, le=512)] = 16
    lora_modules: Annotated[
        list[str] | None,
        about(
            "Adapter to load at the start, as NAME=DIRECTORY (several may follow one flag; repeatable).",
            extra={"several": True},
        ),
    ] = None

    def modules(self) -> list[tuple[str, str]]:
        """(name, directory) of each of `lora_modules`.  Raises StartError."""
        pairs = [_name_and_path(module) for module in self.lora_modules or []]
        for module, (name, path) in zip(self.lora_modules or [], pairs, strict=True):
            if not (name and path):
                raise StartError(f"option lora_modules: expected NAME=DIRECTORY, got {module!r}")
        if len(dict(pairs)) < len(set(pairs)):
            raise StartError("option lora_modules: two adapters have one name")
        return pairs


def _name_and_path(module: str) -> tuple[str, str]:
    """An adapter's name and directory, from NAME=DIRECTORY or vLLM's JSON; empty where they are not said."""
    if module.startswith("{"):
        with suppress(msgspec.DecodeError):
            held = msgspec.json.decode(module, type=dict[str, str | None])
            return held.get("name") or "", held.get("path") or ""
    name, _, path = module.partition("=")
    return name, path
