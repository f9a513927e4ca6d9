"""Flags made from the config fields."""

from __future__ import annotations

import argparse

import pytest

from tokserve.cli import options


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    return parser.parse_args(words)


def test_adapters_of_the_start_follow_one_flag_or_several() -> None:
    assert parsed("--lora-modules", "a=/x", "b=/y", "--lora-modules", "c=/z").lora_modules == ["a=/x", "b=/y", "c=/z"]
    assert parsed().lora_modules is None


def test_other_lists_take_a_value_a_flag() -> None:
    assert parsed("--admin-api-key", "a", "--admin-api-key", "b").admin_api_key == ["a", "b"]


def test_sizes_have_suffixes() -> None:
    for text, size in (("5", 5), ("2k", 2048), ("1.5M", 3 << 19), ("4G", 4 << 30)):
        assert parsed("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == size

    assert parsed("--max-media-memory", "2G").max_media_memory == 2 << 30


def test_numbers_of_tokens_have_suffixes() -> None:
    names = "max_model_len", "max_num_batched_tokens", "max_queued_tokens", "max_chunk", "state_snapshot_interval"
    for text, count in (("4096", 4096), ("4k", 4000), ("4K", 4096)):
        values = parsed(*(word for name in names for word in ("--" + name.replace("_", "-"), text)))
        assert [getattr(values, name) for name in names] == [count] * len(names)


@pytest.mark.parametrize("text", ["", "G", "x", "1.5", "infG", "nanK"])
def test_invalid_sizes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--kv-cache-memory-bytes", text)
    assert "not a size" in capsys.readouterr().err


def test_lists_of_cors_may_be_json_as_vllm_has_them() -> None:
    assert parsed("--allowed-origins", '["http://a", "http://b"]').allowed_origins == ["http://a", "http://b"]
    several = parsed("--allowed-origins", "http://a", "http://b", "--allowed-origins", '["*"]')
    assert several.allowed_origins == ["http://a", "http://b", "*"]


def test_defaults_are_computed_once_for_all_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of a server makes the parser: it took a second when each flag listed all options."""
    calls = []
    original = options.options.option_values
    monkeypatch.setattr(options.options, "option_values", lambda config: calls.append(0) or original(config))
    options._defaults.cache_clear()
    assert parsed("--max-model-len", "5").max_model_len == 5 and parsed().max_model_len is None
    assert len(calls) == 1
