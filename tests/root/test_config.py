"""Configuration: names, ranges and what "auto" becomes."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import pytest
from huggingface_hub import errors as hub

from tokserve.base import gpus
from tokserve.base.errors import StartError
from tokserve.checkpoint import DEMO_DIR
from tokserve.config import Config, RuntimeConfig, fields, vllm
from tokserve.config.engine_config import replica_config
from tokserve.config.resolve import resolve


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write(tmp_path, max_position_embeddings=512, torch_dtype="bfloat16", eos_token_id=5)
    return tmp_path


def write(directory: Path, **config: object) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(StartError, match="unknown option 'max_model_length'; did you mean 'max_model_len'"):
        Config.make(max_model_length=5)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"port": 70000}, "must be at most 65535, got 70000"),
        ({"max_num_seqs": 0}, "must be at least 1, got 0"),
        ({"dtype": "int4"}, "must be one of auto, float32, bfloat16, float16, got 'int4'"),
        (
            {"quantization": "bits"},
            "must be one of int8, int4, fp8, none, gptq, awq, compressed-tensors, mxfp4, gguf, got 'bits'",
        ),
        ({"depth": 3}, "must be one of 1, 2, got 3"),
        ({"scheduling_policy": "lifo"}, "must be one of priority, fcfs, got 'lifo'"),
        ({"gpu_memory_utilization": 1.5}, "must be at most 1.0, got 1.5"),
        ({"gpu_memory_utilization": 0}, "must be above 0.0, got 0"),
        ({"block_size": 0}, "must be at least 1, got 0"),
        ({"max_model_len": "x"}, "must be int, got 'x'"),
        ({"keep_alive": 1}, "must be at least 5, got 1"),
        ({"quantize_lm_head": 1}, "must be bool, got 1"),
        ({"start_timeout": float("inf")}, "must be at most 1000000000.0, got inf"),
        ({"shutdown_timeout": 1e10}, "must be at most 1000000000.0, got 10000000000.0"),
        ({"model": None}, "must be str, got None"),
        ({"api_key": "secret"}, "must be list"),
    ],
)
def test_bad_value_is_refused_with_the_options_name(option: dict[str, object], words: str) -> None:
    with pytest.raises(StartError) as refused:
        Config.make(**option)
    assert str(refused.value) == f"option {next(iter(option))}: {words}"


def test_rl_changes_defaults_only() -> None:
    config = Config.make(rl=True)
    assert (config.model.logprobs_mode, config.model.generation_config) == ("processed", "none")
    assert Config.make(rl=True, logprobs_mode="raw").model.logprobs_mode == "raw"
    assert Config.make().model.logprobs_mode == "raw"


def test_an_unknown_option_without_a_near_name_refers_to_help() -> None:
    with pytest.raises(StartError, match="unknown option 'best_of_all'; `tokserve serve --help=all` lists all"):
        Config.make(best_of_all=2)


def test_adapters_of_the_start(checkpoint: Path) -> None:
    config = Config.make(model=str(checkpoint), enable_lora=True, lora_modules=["a=/x", "b=/y=z"])
    assert resolve(config).lora.modules() == [("a", "/x"), ("b", "/y=z")]
    for module in ("a", "a=", "=/x"):
        with pytest.raises(StartError, match="lora_modules: expected NAME=DIRECTORY"):
            resolve(Config.make(model=str(checkpoint), enable_lora=True, lora_modules=[module]))
    with pytest.raises(StartError, match="lora_modules needs enable_lora"):
        resolve(Config.make(model=str(checkpoint), lora_modules=["a=/x"]))


@pytest.mark.parametrize(
    "option",
    [
        {"chat_template": "{{ 1 }}"},
        {"default_chat_template_kwargs": {"a": 1}},
        {"enable_auto_tool_choice": True},
        {"reasoning_parser": "qwen3"},
        {"tool_call_parser": "hermes"},
    ],
)
def test_options_of_text_need_a_tokenizer(checkpoint: Path, option: dict[str, object]) -> None:
    with pytest.raises(StartError, match=f"{next(iter(option))} has no effect with tokens_only"):
        resolve(Config.make(model=str(checkpoint), tokens_only=True, **option))


def test_defaults_of_text_are_no_options(checkpoint: Path) -> None:
    defaults = {"tool_call_parser": "auto", "enable_auto_tool_choice": False}
    assert resolve(Config.make(model=str(checkpoint), tokens_only=True, **defaults)).server.tokens_only


@pytest.mark.parametrize(("name", "mode"), [("processed_logprobs", "processed"), ("raw_logprobs", "raw")])
def test_vllm_names_of_logprobs_modes(checkpoint: Path, name: str, mode: str) -> None:
    assert resolve(Config.make(model=checkpoint, logprobs_mode=name)).model.logprobs_mode == mode
    with pytest.raises(StartError, match="must be one of raw, temperature"):
        Config.make(logprobs_mode="raw_logits")


def test_resolve_fills_in_what_the_checkpoint_says(checkpoint: Path) -> None:
    config = resolve(Config.make(model=str(checkpoint)))
    assert config.model.dtype == "bfloat16"
    assert config.model.max_model_len == 512
    assert config.model.eos_token_ids == [5]
    assert config.cache.block_size == 16
    assert config.runtime.device == "cpu"
    assert config.runtime.cpu_threads and config.runtime.cpu_threads >= 1
    assert config.server.served_model_name == [str(checkpoint)]


@pytest.mark.parametrize(("device", "defaults"), [("cpu", (1, 128, 512)), ("cuda", (2, 256, 8192))])
def test_steps_are_larger_and_overlap_on_a_gpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, device: str, defaults: tuple[int, ...]
) -> None:
    monkeypatch.setattr("tokserve.config.resolve._device", lambda name: device)

    def scheduler(**options: object) -> tuple[int | None, ...]:
        actual = resolve(Config.make(model=str(checkpoint), **options)).scheduler
        return actual.depth, actual.max_num_seqs, actual.max_num_batched_tokens

    assert scheduler() == defaults
    explicit = {"depth": 1, "max_num_seqs": 128, "max_num_batched_tokens": 512}
    assert scheduler(**explicit) == (1, 128, 512)


@pytest.mark.parametrize("wrong", ['"</s>"', "[5, null]", "true"])
def test_an_eos_that_is_no_id_is_refused_with_its_name(checkpoint: Path, wrong: str) -> None:
    (checkpoint / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
    with pytest.raises(StartError, match="eos_token_id"):
        resolve(Config.make(model=str(checkpoint)))


def test_eos_ids_of_generation_config_come_first_and_all_count(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 5, 9]}')
    assert resolve(Config.make(model=str(checkpoint))).model.eos_token_ids == [7, 5, 9]


IM_END = {"id": 7, "content": "<|im_end|>"}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}},
        {"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer": {"added_tokens": [IM_END]}},
        {"special_tokens_map": {"eos_token": "<|im_end|>"}, "tokenizer": {"model": {}, "added_tokens": [IM_END]}},
    ],
)
def test_the_tokenizers_eos_token_counts_as_well(checkpoint: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (checkpoint / f"{name}.json").write_text(json.dumps(value))
    assert resolve(Config.make(model=str(checkpoint))).model.eos_token_ids == [5, 7]
    assert resolve(Config.make(model=str(checkpoint), tokens_only=True)).model.eos_token_ids == [5, 7]
    assert resolve(Config.make(model=str(checkpoint), eos_token_ids=[3])).model.eos_token_ids == [3]


@pytest.mark.parametrize(
    "tokenizer_config",
    [
        "{",
        "[]",
        '{"eos_token": null}',
        '{"eos_token": "</s>"}',
        '{"eos_token": "</s>", "added_tokens_decoder": {"x": 1}}',
    ],
)
def test_a_tokenizer_without_a_known_eos_token_adds_none(checkpoint: Path, tokenizer_config: str) -> None:
    (checkpoint / "tokenizer_config.json").write_text(tokenizer_config)
    assert resolve(Config.make(model=str(checkpoint), tokens_only=True)).model.eos_token_ids == [5]


def test_eos_ids_outside_the_vocabulary(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 320, -1, 319]}')
    sized = {"model": str(checkpoint), "hf_overrides": {"vocab_size": 320}}
    assert resolve(Config.make(**sized)).model.eos_token_ids == [7, 319, 5]
    assert resolve(Config.make(**sized, eos_token_ids=[319, 0])).model.eos_token_ids == [319, 0]
    for token in (320, -1):
        with pytest.raises(StartError, match=f"option eos_token_ids: ids are from 0 to 319 .*, got {token}"):
            resolve(Config.make(**sized, eos_token_ids=[5, token]))


@pytest.mark.parametrize("count", [0, 1025, 10**6])
def test_threads_that_no_machine_has(count: int) -> None:
    with pytest.raises(StartError, match=r"option cpu_threads: must be at (least 1|most 1024), got"):
        Config.make(cpu_threads=count)


def test_asking_for_more_context_than_the_checkpoint_has(checkpoint: Path) -> None:
    with pytest.raises(StartError, match=r"max_model_len 1024 is above .* 512.*--hf-overrides"):
        resolve(Config.make(model=str(checkpoint), max_model_len=1024))
    overridden = Config.make(model=str(checkpoint), max_model_len=1024, hf_overrides={"max_position_embeddings": 1024})
    assert resolve(overridden).model.max_model_len == 1024


def test_yarn_increases_the_allowed_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    write(tmp_path, max_position_embeddings=512, rope_scaling=yarn)
    assert resolve(Config.make(model=str(tmp_path))).model.max_model_len == 512
    assert resolve(Config.make(model=str(tmp_path), max_model_len=2048)).model.max_model_len == 2048
    with pytest.raises(StartError, match="max_model_len 2049 is above"):
        resolve(Config.make(model=str(tmp_path), max_model_len=2049))


def test_the_context_of_gpt2_has_a_name_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, n_positions=512)
    assert resolve(Config.make(model=str(tmp_path))).model.max_model_len == 512
    with pytest.raises(StartError, match=r"n_positions 512.*--hf-overrides '\{\"n_positions\": 513\}'"):
        resolve(Config.make(model=str(tmp_path), max_model_len=513))


@pytest.mark.parametrize("length", ["256", 256.5, True, 0, -1, 1])
def test_a_context_of_no_length(tmp_path: Path, length: Any) -> None:
    write(tmp_path, max_position_embeddings=length)
    with pytest.raises(StartError, match="max_position_embeddings must be an integer of at least 2, found"):
        resolve(Config.make(model=str(tmp_path)))


def test_a_checkpoint_without_context_length_or_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path)
    actual = resolve(Config.make(model=str(tmp_path), max_model_len=700)).model
    assert (actual.max_model_len, actual.dtype, actual.eos_token_ids) == (700, "float32", [])
    assert not caplog.records
    assert resolve(Config.make(model=str(tmp_path))).model.max_model_len == 2048
    assert "has no max_position_embeddings: contexts of 2048 tokens" in caplog.text
    with pytest.raises(StartError, match=r"\(BertModel\) has no max_position_embeddings; give --max-model-len"):
        resolve(Config.make(model=str(tmp_path), hf_overrides={"architectures": ["BertModel"]}))


def test_a_model_without_a_head_pools(tmp_path: Path) -> None:
    for name, runner in (("Qwen3Model", "pooling"), ("Gemma3TextModel", "pooling"), ("GPT2LMHeadModel", "generate")):
        write(tmp_path, architectures=[name], max_position_embeddings=64)
        assert resolve(Config.make(model=str(tmp_path))).model.runner == runner
    write(tmp_path, architectures=["Qwen3Model"], max_position_embeddings=64)
    with pytest.raises(StartError, match="option runner: the checkpoint has no language-model head"):
        resolve(Config.make(model=str(tmp_path), runner="generate"))


def test_api_key_from_the_environment(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKSERVE_API_KEY", "from-env")
    assert resolve(Config.make(model=str(checkpoint), api_key=["a"])).server.api_key == ["a", "from-env"]
    monkeypatch.setenv("VLLM_API_KEY", "vllms")
    assert resolve(Config.make(model=str(checkpoint))).server.api_key == ["from-env", "vllms"]


def test_the_kind_of_a_quantized_checkpoint_may_be_named(tmp_path: Path) -> None:
    write(tmp_path, max_position_embeddings=64, quantization_config={"quant_method": "gptq", "bits": 4})
    for name in ("gptq", "gptq_marlin"):
        assert resolve(Config.make(model=str(tmp_path), quantization=name)).model.quantization is None
    with pytest.raises(StartError, match="option quantization: the checkpoint is of kind gptq, not awq; leave"):
        resolve(Config.make(model=str(tmp_path), quantization="awq"))
    write(tmp_path, max_position_embeddings=64)
    with pytest.raises(StartError, match="option quantization: the checkpoint is not quantized, not gptq; leave"):
        resolve(Config.make(model=str(tmp_path), quantization="gptq"))


@dataclass
class StructuredOutputsConfig:
    """The options as an object, as vLLM has them."""

    backend: str
    disable_any_whitespace: bool
    reasoning_parser: str


def test_options_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.make(
        model="demo",
        dtype="half",
        generation_config="vllm",
        enable_log_requests=True,
        log_requests=True,
        max_num_queued_reqs=5,
        skip_tokenizer_init=True,
        response_role="assistant",
        trust_remote_code=True,
        swap_space=4,
        revision=None,
        convert="none",
    )
    assert (config.model.dtype, config.model.generation_config) == ("float16", "none")
    assert (config.logs.log_requests, config.server.tokens_only) == (True, True)
    assert config.scheduler.max_queued_requests == 5
    options = [record.args[0] for record in caplog.records if record.args]
    assert options == ["response_role", "trust_remote_code", "swap_space", "convert"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "main"}, "option revision is not supported: download the model first and name its directory"),
        ({"response_role": "user"}, "option response_role is not supported: answers are the assistant's"),
        ({"enable_log_requests": True, "log_requests": False}, "options enable_log_requests and log_requests are the"),
    ],
)
def test_options_of_vllm_that_would_change_something(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        Config.make(**options)


@pytest.mark.parametrize(
    "value",
    [
        {"backend": "guidance", "disable_any_whitespace": True, "reasoning_parser": "qwen3"},
        '{"backend": "guidance", "disable_any_whitespace": true, "reasoning_parser": "qwen3"}',
        StructuredOutputsConfig("guidance", True, "qwen3"),
    ],
)
def test_structured_outputs_config_of_vllm(value: Any) -> None:
    """peer suites A8: a backend name changes no result, and the rest are options of their own."""
    config = Config.make(structured_outputs_config=value)
    assert (config.server.structured_outputs_compact, config.server.reasoning_parser) == (True, "qwen3")
    for backend in ("auto", "xgrammar", "outlines", "lm-format-enforcer"):
        config = Config.make(structured_outputs_config={"backend": backend, "reasoning_parser": ""})
        assert config.server == Config.make().server
    closing = {"disable_additional_properties": True, "enable_in_reasoning": False, "reasoning_parser_plugin": None}
    assert Config.make(structured_outputs_config=closing).server.structured_outputs_closed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"backend": "fast"}, r"option structured_outputs_config\.backend is not supported: one library compiles"),
        ({"bakend": "auto"}, "option structured_outputs_config: unknown key 'bakend'; keys are backend, "),
        ("{", "option structured_outputs_config: not JSON"),
        (5, "option structured_outputs_config: must be an object, got 5"),
        (
            {"reasoning_parser_plugin": "x.py"},
            r"structured_outputs_config\.reasoning_parser_plugin is not supported",
        ),
    ],
)
def test_a_wrong_structured_outputs_config(value: Any, message: str) -> None:
    with pytest.raises(StartError, match=message):
        Config.make(structured_outputs_config=value)


def test_parsers_of_one_format_have_several_names() -> None:
    """peer suites A27: granite4 writes calls as Hermes does, and deepseek_v3 thinks as Qwen 3."""
    server = Config.make(tool_call_parser="granite4", reasoning_parser="deepseek_v3").server
    assert (server.tool_call_parser, server.reasoning_parser) == ("hermes", "qwen3")
    assert Config.make(tool_call_parser="qwen3_xml").server.tool_call_parser == "qwen3_coder"


def test_vllms_model_of_the_method_ngram() -> None:
    for value in ({"method": "ngram", "model": "[ngram]"}, {"model": "[ngram]"}, {"method": "[ngram]"}):
        plan = Config.make(speculative_config=value | {"num_speculative_tokens": 4}).speculation.resolved()
        assert (plan.method, plan.model, plan.num_drafts) == ("ngram", None, 4)


def test_options_of_vllm_and_tokserve_are_disjoint() -> None:
    assert not vllm.OPTIONS.keys() & {name for _, name, _ in fields()}
    assert all(option.same_as in {name for _, name, _ in fields()} for option in vllm.SAME.values())


def test_adapters_in_vllms_json() -> None:
    modules = ["a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "m"}']
    assert Config.make(lora_modules=modules).lora.modules() == [("a", "/x=y"), ("b", "/z")]
    with pytest.raises(StartError, match="option lora_modules: two adapters have one name"):
        Config.make(lora_modules=["a=/x", "a=/y"]).lora.modules()
    for wrong in ("a", "=b", '{"name": "b"}', '{"name": 5, "path": "/z"}'):
        with pytest.raises(StartError, match="option lora_modules: expected NAME=DIRECTORY"):
            Config.make(lora_modules=[wrong]).lora.modules()


def test_adapters_with_hub_names_are_downloaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peer suites A27: vLLM's --lora-modules name=owner/repository."""
    fetched: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        fetched.append((name, allow_patterns))
        return str(tmp_path / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    modules = ["a=owner/name", f"b={tmp_path}", "c=./no/such"]
    config = resolve(Config.make(model=str(checkpoint), enable_lora=True, lora_modules=modules))
    assert config.lora.modules() == [("a", str(tmp_path / "hub")), ("b", str(tmp_path)), ("c", "./no/such")]
    assert fetched == [("owner/name", ["adapter_config.json", "adapter_model.safetensors"])]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("/no/such/place", "neither a directory"),
        ("./nowhere", "neither a directory"),
        ("just-a-name", "neither a directory"),
        ("/" + "a" * 4000, "neither a directory"),
        ("/" + "a" * 4000 + ".gguf", "neither a directory"),
    ],
)
def test_a_model_that_is_not_there(model: str, text: str) -> None:
    with pytest.raises(StartError, match=text):
        resolve(Config.make(model=model))


def test_a_missing_tokenizer_is_an_error_before_the_engine_loads(checkpoint: Path) -> None:
    with pytest.raises(StartError, match="tokenizer '/no/such/place' is neither a directory"):
        resolve(Config.make(model=str(checkpoint), tokenizer="/no/such/place"))
    named = Config.make(model=str(checkpoint), tokenizer="demo")
    assert resolve(named).model.tokenizer == str(DEMO_DIR)
    unused = Config.make(model=str(checkpoint), tokenizer="/no/such/place", tokens_only=True)
    assert resolve(unused).model.tokenizer == "/no/such/place"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (hub.GatedRepoError, "must be granted"),
        (hub.RepositoryNotFoundError, "no such repository"),
        (hub.LocalEntryNotFoundError, "cannot be reached"),
        (hub.OfflineModeIsEnabled, "switched off"),
        (PermissionError, "PermissionError"),
    ],
)
def test_a_failed_download_has_a_reason(error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StartError, match=f"model 'owner/name' .*{reason}"):
        resolve(Config.make(model="owner/name"))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"max_model_len": 1}, "max_model_len: must be at least 2"),
        ({"served_model_name": ["a", ""]}, "served_model_name: must not be empty"),
        ({"host": ""}, "option host: must not be empty"),
        ({"uds": ""}, "option uds: must not be empty"),
        ({"client_header": "X Client"}, "option client_header: 'X Client' is not the name of a header"),
        ({"client_header": ""}, "option client_header: '' is not the name of a header"),
        ({"ssl_ca_certs": "x"}, "ssl_ca_certs needs ssl_certfile"),
        ({"ssl_keyfile": "/no/key", "ssl_certfile": "/no/cert"}, "ssl_keyfile: no file '/no/key'"),
        ({"api_key": ["a", ""]}, "api_key: must not be empty"),
        ({"admin_api_key": [""]}, "admin_api_key: must not be empty"),
        ({"weight_transfer_config": {"backend": "smoke"}}, "weight_transfer_config: expected"),
        ({"weight_transfer_config": {"back": "gloo"}}, "weight_transfer_config: expected"),
        ({"allowed_weight_dirs": ["/", "/no/place"]}, "allowed_weight_dirs: no directory '/no/place'"),
        ({"allowed_weight_dirs": ["/" + "a" * 4000]}, "allowed_weight_dirs: no directory '/aaa"),
        ({"ssl_keyfile": "a" * 4000, "ssl_certfile": "/no/cert"}, "ssl_keyfile: no file 'aaa"),
        ({"otlp_traces_endpoint": "collector:4318"}, "otlp_traces_endpoint: expected an http URL"),
        ({"hf_overrides": {"torch_dtype": "float64"}}, "dtype is 'float64'; choose one with --dtype: float32, bfloat"),
        (
            {"hf_overrides": {"max_position_embeddings": 10**12}},
            "max_position_embeddings is 1000000000000",
        ),
        ({"max_model_len": 10**12}, "option max_model_len: must be at most 33554432"),
    ],
)
def test_contradictory_options_are_refused(checkpoint: Path, option: Any, text: str) -> None:
    with pytest.raises(StartError, match=text):
        resolve(Config.make(model=str(checkpoint), **option))


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no config\.json"):
        resolve(Config.make(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(StartError, match=r"config\.json of the model cannot be read"):
        resolve(Config.make(model=str(tmp_path)))


def test_a_config_that_may_not_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)  # root may read everything
    with pytest.raises(StartError, match=r"config\.json of the model cannot be read: .*Permission denied"):
        resolve(Config.make(model=str(checkpoint)))


def test_tls_needs_both_files(checkpoint: Path) -> None:
    with pytest.raises(StartError, match="ssl_keyfile and ssl_certfile"):
        resolve(Config.make(model=str(checkpoint), ssl_keyfile="x"))


def test_a_quantized_head_needs_no_quantization_and_excludes_another_type(checkpoint: Path) -> None:
    for quantization in (None, "none"):
        alone = Config.make(model=str(checkpoint), quantization=quantization, quantize_lm_head=True, device="cpu")
        assert resolve(alone).model.quantize_lm_head
        on_gpu = resolve(msgspec.structs.replace(alone, runtime=RuntimeConfig(device="cuda")))
        assert on_gpu.model.quantize_lm_head
    both = Config.make(model=str(checkpoint), quantization="int8", quantize_lm_head=True)
    assert resolve(both).model.quantization == "int8"
    with pytest.raises(StartError, match="quantize_lm_head and head_dtype exclude each other"):
        resolve(Config.make(model=str(checkpoint), quantization="int8", quantize_lm_head=True, head_dtype="float32"))


def test_a_gpu_is_taken_where_there_is_one_with_its_kernels(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(**options: object) -> tuple[str, int | None]:
        actual = resolve(Config.make(model=str(checkpoint), **options))
        return actual.runtime.device, actual.cache.block_size

    monkeypatch.setattr(gpus, "count_nvidia_gpus", lambda: 0)
    assert resolved() == ("cpu", 16)
    assert resolved(device="cuda") == ("cuda", 64)
    assert resolved(device="cuda", block_size=32) == ("cuda", 32)
    monkeypatch.setattr(gpus, "count_nvidia_gpus", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolved() == ("cpu", 16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "triton")
    assert resolved() == ("cuda", 64)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert resolved() == ("cpu", 16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for quantization in ("int8", "int4"):
        assert resolved(quantization=quantization) == ("cuda", 64)
    with pytest.raises(StartError, match="quantization_activations is for integer weights on a CPU"):
        resolved(quantization="int4", quantization_activations="int8")
    assert resolved(quantization="fp8", kv_cache_dtype="fp8_e4m3") == ("cuda", 64)
    with pytest.raises(StartError, match="kv_cache_dtype fp8 needs a GPU"):
        resolved(device="cpu", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("bind", "threads", "words"),
    [
        ("0-", None, "option cpu_bind: expected auto, none or CPUs such as 0-15,32-47, got '0-'"),
        ("3-1", None, "option cpu_bind: expected auto, none or CPUs"),
        ("numa", None, "option cpu_bind: expected auto, none or CPUs"),
        ("0,0", None, "option cpu_bind: expected different CPUs of those that this process may use, got '0,0'"),
        ("0,9", None, "option cpu_bind: expected different CPUs of those that this process may use, got '0,9'"),
        ("0-3", 2, "option cpu_bind: names 4 CPUs for 2 threads (cpu_threads)"),
    ],
)
def test_cpus_that_threads_cannot_be_bound_to_are_refused(
    bind: str, threads: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    with pytest.raises(StartError) as refused:
        resolve(Config.make(cpu_bind=bind, cpu_threads=threads))
    assert str(refused.value).startswith(words)


def test_there_is_a_thread_for_each_cpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert resolve(Config.make(cpu_bind="1-2,0")).runtime.cpu_threads == 3
    assert resolve(Config.make(cpu_bind="none")).runtime.cpu_threads == 4
    assert resolve(Config.make(cpu_threads=1)).runtime.cpu_threads == 1


def test_cpu_options_are_refused_on_another_device() -> None:
    for option in ({"cpu_arithmetic": "fma"}, {"cpu_kernels": "avx2"}):
        with pytest.raises(StartError, match=f"option {next(iter(option))} is for a CPU, and the device is cuda"):
            resolve(Config.make(device="cuda", **option))


def test_hosts_that_may_control_a_server_that_only_this_machine_can_reach() -> None:
    def hosts(**options: object) -> list[str] | None:
        return resolve(Config.make(model="demo", **options)).server.allowed_hosts

    local = ["localhost", "127.0.0.1", "[::1]"]
    assert hosts() == local and hosts(host="127.0.0.5") == [*local, "127.0.0.5"]
    assert hosts(host="::1") == [*local, "::1"]
    assert hosts(host="0.0.0.0") == hosts(uds="/tmp/x.sock") == hosts(host="10.0.0.3") == ["*"]
    assert hosts(allowed_hosts=["box.lan"]) == ["box.lan"]


@pytest.mark.parametrize(
    ("options", "resolved"),
    [
        ({}, ("suffix", 32, 64 << 20, None, None)),
        ({"spec_method": "ngram"}, ("ngram", 32, 0, None, None)),
        ({"speculative_config": {"method": "none"}}, ("none", 32, 0, None, None)),
        (
            {"speculative_config": {"num_speculative_tokens": 5, "prompt_lookup_max": 4}, "spec_tokens": 5},
            ("suffix", 5, 64 << 20, None, None),
        ),
        ({"speculative_history_bytes": 0}, ("suffix", 32, 0, None, None)),
        (
            {
                "speculative_config": {
                    "method": "ngram_gpu",
                    "num_speculative_tokens_per_batch_size": [[1, 4, 8]],
                    "rejection_sample_method": "standard",
                    "draft_tensor_parallel_size": 1,
                }
            },
            ("ngram", 32, 0, None, None),
        ),
        ({"spec_method": "self"}, ("self", 32, 64 << 20, None, "int8")),
        ({"spec_method": "self-int4", "spec_tokens": 3}, ("self", 3, 64 << 20, None, "int4")),
        ({"speculative_config": {"method": "self", "quantization": "int4"}}, ("self", 32, 64 << 20, None, "int4")),
        ({"spec_model": "x"}, ("draft_model", 32, 64 << 20, "x", None)),
        (
            {"speculative_config": {"method": "draft_model", "model": "x", "quantization": "int8"}, "spec_model": "x"},
            ("draft_model", 32, 64 << 20, "x", "int8"),
        ),
    ],
)
def test_speculation(options: dict[str, Any], resolved: tuple[Any, ...]) -> None:
    assert tuple(Config.make(**options).speculation.resolved()) == resolved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"spec_method": "eagle"},
            "methods are suffix, ngram, prediction, draft_model, self, mtp, eagle3, none",
        ),
        ({"speculative_config": {"model": 3}}, "model must be a directory or a hub name, got 3"),
        ({"speculative_config": {"method": ["eagle"]}}, "no method ..eagle"),
        ({"speculative_config": {"method": "medusa"}}, "no method 'medusa'; methods are suffix"),
        ({"speculative_config": {"rejection_sample_method": "synthetic"}}, 'sample_method must be "standard"'),
        ({"speculative_config": {"draft_tensor_parallel_size": 2}}, "draft_tensor_parallel_size must be 1"),
        ({"speculative_config": {"synthetic_acceptance_length": 2}}, "unknown key 'synthetic_acceptance_length'"),
        ({"spec_model": "x", "spec_method": "suffix"}, "need a model, and no other takes one; got suffix"),
        ({"spec_model": "x", "spec_method": "mtp"}, "draft_model and eagle3 need a model, .* got mtp"),
        ({"spec_method": "draft_model"}, "draft_model and eagle3 need a model, .* got draft_model"),
        ({"spec_method": "eagle3"}, "draft_model and eagle3 need a model, .* got eagle3"),
        ({"spec_method": "self-int2"}, "quantization is int8 or int4, .* got 'int2' for self"),
        ({"speculative_config": {"quantization": "int8"}}, "got 'int8' for suffix"),
        ({"speculative_config": {"tokens": 4}}, "unknown key 'tokens'"),
        ({"speculative_config": {"num_speculative_tokens": 0}, "spec_tokens": None}, "from 1 to 128, got 0"),
        ({"speculative_config": {"num_speculative_tokens": 500}}, "from 1 to 128, got 500"),
        ({"speculative_config": {"num_speculative_tokens": True}}, "must be an integer"),
        ({"spec_tokens": 129}, "must be an integer from 1 to 128, got 129"),
        ({"speculative_config": {"method": ["suffix"]}}, "there is no method"),
        ({"speculative_config": {"method": "ngram"}, "spec_method": "suffix"}, "'suffix' by its own flag"),
    ],
)
def test_speculation_that_is_not_served(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    option = next(name for name in ("speculative_config", "spec_method", "spec_tokens") if name in options)
    with pytest.raises(StartError, match=f"option {option}: .*{message}"):
        resolve(Config.make(model=str(checkpoint), **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "data_parallel_backend ray needs cpu_threads: the CPUs that each engine gets of the cluster"),
        ({"cpu_bind": "0"}, "option cpu_bind: CPUs of another node cannot be named (data_parallel_backend ray)"),
        ({"cpu_threads": 99, "api_server_count": 2}, "data_parallel_backend ray requires api_server_count 1"),
    ],
)
def test_what_engines_on_other_nodes_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=re.escape(message)):
        resolve(Config.make(model="demo", device="cpu", data_parallel_backend="ray", **options))


def test_engines_on_other_nodes_are_bound_to_no_cpu_of_this_one() -> None:
    options = {"data_parallel_backend": "ray", "data_parallel_size": 2, "cpu_threads": 99}
    config = resolve(Config.make(model="demo", device="cpu", **options))
    assert [replica_config(config, rank).runtime.cpu_bind for rank in range(2)] == ["auto", "auto"]
    assert replica_config(config, 1).runtime.cpu_threads == 99
