"""Flags made from the config fields."""

from __future__ import annotations

import argparse

from tokserve.cli import options


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    return parser.parse_args(words)


def test_adapters_of_the_start_follow_one_flag_or_several() -> None:
    assert parsed("--lora-modules", "a=/x", "b=/y", "--lora-modules", "c=/z").lora_modules == ["a=/x", "b=/y", "c=/z"]
    assert parsed().lora_modules is None


def test_other_lists_take_a_value_a_flag() -> None:
    assert parsed("--api-key", "a", "--api-key", "b").api_key == ["a", "b"]
