"""Headers of GGUF files that are damaged, invalid or split: one clear error, in bounded time and memory.

No compiled code reads a file: the header is taken apart in Python, every size compared with the file's, and kernels get
tensors of torch.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import gguf_models
from tests.models.driver import prefill
from tests.models.test_gguf import IDS, opened
from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.cli.serve import chosen
from tokserve.config import Config
from tokserve.families.gguf import config as gguf_config
from tokserve.families.gguf.header import GgufHeader, read_header, read_headers
from tokserve.models.registry import decoder_spec

VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    2**31,
    2**63,
    -(2**63),
    10**9,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [1, 2],
    ["a"],
    True,
]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_models.write(path, "llama", "Q4_0")
    data = path.read_bytes()
    for size in (0, 3, 23, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(StartError):
            read_headers(path)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_damaged_header_is_one_clear_error(tmp_path: Path, rounds: int) -> None:
    """Bytes and whole numbers of the header are replaced: either it still reads, or it is a StartError."""
    path = tmp_path / "m.gguf"
    gguf_models.write(path, "llama", "Q4_0")
    header = read_headers(path)
    end = min(tensor.start for tensor in header.tensors.values())
    data, choices = bytearray(path.read_bytes()), random.Random(0)
    values = [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**40, 255]
    refused = 0
    path.write_bytes(data)
    with path.open("r+b") as file:
        for _ in range(rounds):
            at = choices.randrange(0, end - 8)
            damage = choices.choice(values).to_bytes(8, "little") if choices.random() < 0.5 else choices.randbytes(4)
            file.seek(at)
            file.write(damage)
            file.flush()
            try:
                for tensor in read_header(path).tensors.values():
                    assert tensor.start > 0 and tensor.start + tensor.size <= len(data)
            except StartError:
                refused += 1
            file.seek(at)
            file.write(data[at : at + 8])
            file.flush()
    assert refused > rounds // 10


@pytest.mark.parametrize("rounds", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_metadata_of_any_value_is_read_or_one_clear_error(tmp_path: Path, rounds: int, architecture: str) -> None:
    gguf_models.write(tmp_path / "m.gguf", architecture, "Q4_0")
    header = read_headers(tmp_path / "m.gguf")
    keys, choices, refused = list(header.metadata), random.Random(0), 0
    for _ in range(rounds):
        changes = {choices.choice(keys): choices.choice(VALUES) for _ in range(choices.choice((1, 1, 2, 3)))}
        kept = {key: value for key, value in (header.metadata | changes).items() if value is not None}
        try:
            config = gguf_config.model_config(GgufHeader(header.files, kept, header.tensors))
            gguf_config.end_ids(kept)
            assert len(decoder_spec(config).blocks) <= len(header.tensors)
        except StartError:
            refused += 1
    assert refused > rounds // 10


def test_the_largest_gemma_without_heads_is_refused(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "m.gguf", "gemma3", "Q4_0")
    header = read_headers(tmp_path / "m.gguf")
    metadata = header.metadata | {"gemma3.block_count": 62, "gemma3.attention.head_count": 0}
    with pytest.raises(StartError):
        decoder_spec(gguf_config.model_config(GgufHeader(header.files, metadata, header.tensors)))


def test_shards_are_one_model_and_a_missing_one_is_named(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "one.gguf", "qwen3", "Q4_0")
    gguf_models.write(tmp_path / "m.gguf", "qwen3", "Q4_0", split=9)
    shards = sorted(tmp_path.glob("m-*.gguf"))
    assert len(shards) == 3 and shards[0].name == "m-00001-of-00003.gguf"
    expected = prefill(opened(tmp_path / "one.gguf"), IDS)
    assert torch.equal(prefill(opened(shards[0]), IDS), expected)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(shards[0].read_bytes())
    with pytest.raises(
        StartError, match=r"alone\.gguf says that it is one of 3 files; name a file -00001-of-00003\.gguf"
    ):
        checkpoint.locate(str(alone))
    shards[1].unlink()
    with pytest.raises(StartError, match=r"one of 3 files, and m-00002-of-00003\.gguf is not there"):
        checkpoint.locate(str(shards[0]))


def test_messages_have_the_name_of_a_gguf_file_and_its_types(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_models.write(path, "qwen3", "Q4_0", value_kind="Q8_0")
    directory = checkpoint.locate(str(path))
    assert gguf_config.file_name(directory) == (str(path), "Q4_0, Q8_0")
    assert checkpoint.given_name(str(directory)) == str(path)
    assert chosen(Config.make(model=str(directory))) == f"model={path}"
    assert checkpoint.given_name(str(tmp_path)) == str(tmp_path) and gguf_config.file_name(tmp_path) is None


def test_a_name_that_is_too_long_for_a_file_is_that_of_no_gguf_file() -> None:
    assert checkpoint.single_file("/" + "a" * 4000) is None
