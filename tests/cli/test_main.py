"""Wrong command lines, and command lines written for vLLM."""

from pathlib import Path
from typing import Any

import pytest

from tokserve.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve demo --tokens-onlly", "serve: error: unknown option --tokens-onlly; did you mean --tokens-only?"),
        ("serve demo --max_model_lne=5", "unknown option --max-model-lne; did you mean --max-model-len?"),
        ("serve demo --max-mod 5 --max-num 5", "serve: error: option --max-num could be --max-num-"),
        ("serve demo --no-tokens-onli", "did you mean --no-tokens-only?"),
        ("serve --modle demo", "unknown option --modle; did you mean --model?"),
        ("serve demo --foo", "unknown option --foo; see tokserve serve --help"),
        ("serve", "no model is named: a checkpoint directory, a hub name, or `demo`, which needs no download"),
        ("serve --port 8001", "tokserve serve: error: no model is named"),
        ("bench offline --num-prompts 1", "tokserve bench offline: error: no model is named"),
        ("serve one --model two", "two models are named: 'one' and 'two'"),
        ("serve --served-model-name a demo", "'demo' is a value of --served-model-name here, and no model is named"),
        ("serve --api-key a tests", "'tests' is a value of --api-key here, and no model is named"),
        ("serve demo --max-model-len 4x", "not a number of tokens: '4x'"),
        ("serve demo --config /no/such", "--config: '/no/such' cannot be read: No such file or directory"),
        ("bench serve --modle demo", "did you mean --model?"),
        ("serve --xyzzy", "unknown option --xyzzy; see tokserve serve --help"),
        ("serve one two", "tokserve serve: error: unexpected argument 'two'"),
        ("serve --port x", "tokserve serve: error: argument --port: invalid int value: 'x'"),
        ("bench serve --num-promts 3", "bench serve: error: unknown option --num-promts; did you mean --num-prompts?"),
        ("bench offline demo --max-num-sequences 3", "did you mean --max-num-seqs?"),
        ("--verzion", "tokserve: error: unknown option --verzion; did you mean --version?"),
        ("sevre demo", "invalid choice: 'sevre' (choose from "),
    ],
)
def test_a_wrong_command_line_has_an_error_of_two_lines(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 2 and not output.out


def test_an_empty_name_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    """newcomer-3 D14: `tokserve serve "$MODEL"` with an unset variable."""
    for words in (["serve", ""], ["serve", "--model", ""], ["bench", "offline", ""]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and "no model is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ("help", 0, "Begin with `tokserve serve demo`"),
        ("help serve", 0, "usage: tokserve serve MODEL"),
        ("serve --help", 0, "--help=GROUP   the options of a group: model, "),
        ("serve --help kv", 0, "--kv-cache-memory-bytes N"),
        ("serve --help=KV_cache", 0, "--kv-cache-dtype"),
        ("serve --help=images", 0, "--allowed-local-media-path"),
        ("serve --help-all", 0, "--no-enable-prefix-caching"),
        ("serve --help=all", 0, "--no-enable-prefix-caching"),
        ("help bench offline", 0, "usage: tokserve bench offline MODEL"),
        ("version", 0, "tokserve 0."),
        ("-V", 0, "tokserve 0."),
        ("bench", 2, "load on a running server"),
        ("", 2, "Begin with `tokserve serve demo`"),
    ],
)
def test_what_other_programs_call_help_and_version(
    words: str, code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    output = capsys.readouterr()
    assert ended.value.code == code and shown in output.out and not output.err


def values(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `tokserve serve` would serve with, without what is not given."""
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr("tokserve.cli.serve.serve", lambda config: configs.append(config) or 0)
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    assert ended.value.code == 0
    return {name: value for name, value in configs[0].items() if value is not None}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("demo", {"model": "demo"}),
        ("--model X", {"model": "X"}),
        ("X --model X", {"model": "X"}),
        ("X --served-model-name a b --served_model_name c", {"model": "X", "served_model_name": ["a", "b", "c"]}),
        ("X --api-key a b", {"model": "X", "api_key": ["a", "b"]}),
        ("--model demo --api-key " + "a" * 4000, {"model": "demo", "api_key": ["a" * 4000]}),
        ("X --max_model_len 4k", {"model": "X", "max_model_len": 4000}),
        ("X --max-model-len=4K", {"model": "X", "max_model_len": 4096}),
        ("X --max-model-len auto --max-num-batched-tokens 1.5k", {"model": "X", "max_num_batched_tokens": 1500}),
        ("X --max-model-len -1", {"model": "X"}),
        ("X --dtype half --log-level INFO", {"model": "X", "dtype": "float16", "log_level": "info"}),
        ("X -q awq_marlin -asc 2", {"model": "X", "quantization": "awq", "api_server_count": 2}),
        (
            "X -tp=2 -dp 3 -O3",
            {"model": "X", "tensor_parallel_size": 2, "data_parallel_size": 3, "optimization_level": "3"},
        ),
        (
            "X --swap-space 4 --no-enable-chunked-prefill",
            {"model": "X", "swap_space": "4", "enable_chunked_prefill": False},
        ),
        (
            "X --hf-overrides.rope_theta 5 --hf_overrides.rope_parameters.rope_type=yarn",
            {"model": "X", "hf_overrides": {"rope_theta": 5, "rope_parameters": {"rope_type": "yarn"}}},
        ),
        ("X --lora-module a=b --max-model=5", {"model": "X", "lora_modules": ["a=b"], "max_model_len": 5}),
        ("X --chat-template a_b.jinja", {"model": "X", "chat_template": "a_b.jinja"}),
        (
            "X --structured-outputs-config.backend xgrammar --moe-backend triton --cudagraph-capture-sizes 1 2",
            {
                "model": "X",
                "structured_outputs_config": '{"backend": "xgrammar"}',
                "moe_backend": "triton",
                "cudagraph_capture_sizes": ["1", "2"],
            },
        ),
    ],
)
def test_spellings_of_vllm(words: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert values(words.split(), monkeypatch) == expected


def test_a_file_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: X\nport: 8001\nmax_model_len: 4k\nserved-model-name: [a, b]\nadmin-api-key: [c, d]\n"
        "enable-prefix-caching: false\nenable-lora: true\nhf-overrides: {rope_theta: 5}\neos-token-ids: [1, 2]\n"
        "uvicorn-log-level: info\nseed: null\n"
    )
    expected = {
        "model": "X",
        "port": 8001,
        "max_model_len": 4000,
        "served_model_name": ["a", "b"],
        "admin_api_key": ["c", "d"],
        "enable_prefix_caching": False,
        "enable_lora": True,
        "hf_overrides": {"rope_theta": 5},
        "eos_token_ids": [1, 2],
        "uvicorn_log_level": "info",
    }
    assert values(["--config", str(file)], monkeypatch) == expected
    words = ["Y", "--config", str(file), "--port=1", "--served-model-name", "c", "--enable_prefix_caching"]
    others = {"model": "Y", "port": 1, "served_model_name": ["c"], "enable_prefix_caching": True}
    assert values(words, monkeypatch) == expected | others


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must map names of options to values"),
        ("{", "is not YAML"),
        ("porrt: 1", "unknown option 'porrt'"),
        ("enable_lora: 1", "enable-lora must be true or false, got 1"),
        ("port: x", "argument --port: invalid int value: 'x'"),
    ],
)
def test_a_wrong_file_of_options(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(tmp_path / "options.yaml")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
