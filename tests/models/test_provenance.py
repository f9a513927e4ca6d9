"""Checksums of the tensors that weights were loaded from: names, dtypes, aliases, and when they are unavailable."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.base.errors import Conflict
from tokserve.models import weights
from tokserve.models.dummy import tensors
from tokserve.models.load import load_decoder
from tokserve.models.provenance import Provenance
from tokserve.rl import checksum, checksums

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_the_documented_algorithm() -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    expected = hashlib.sha256(b"torch.float32 (2, 3)" + values.tobytes()).hexdigest()
    tensor = torch.from_numpy(values)
    assert checksum(tensor) == checksum(tensor.t().contiguous().t()) == expected
    assert checksum(torch.nn.Parameter(tensor)) == expected != checksum(tensor.bfloat16())
    one = torch.tensor([1.5], dtype=torch.bfloat16)
    assert checksum(one) == hashlib.sha256(b"torch.bfloat16 (1,)\xc0\x3f").hexdigest()
    assert checksums({"a": one}) == checksums([("a", one)]) == {"a": checksum(one)}
    assert checksum(torch.tensor(2.0)) == hashlib.sha256(b"torch.float32 ()\x00\x00\x00\x40").hexdigest()


def test_pushed_tensors_have_their_names_and_dtypes() -> None:
    provenance = Provenance()
    sent = {"model.norm.weight": torch.ones(2), "m.x": torch.ones(2, dtype=torch.float16)}
    for name, tensor in sent.items():
        provenance.add_pushed(name, tensor)
    provenance.add_pushed("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2))
    assert provenance.checksums([("m.", "model.")], tied=False) == (checksums(sent), {})


@pytest.mark.parametrize("sent_names", [[EMBEDDING], [HEAD], [EMBEDDING, HEAD], ["embed_tokens.weight"]])
def test_a_tied_tensor_is_listed_under_both_names(sent_names: list[str]) -> None:
    provenance = Provenance()
    tensor = torch.ones(3, 2)
    for name in sent_names:
        provenance.add_pushed(name, tensor)
    digests, aliases = provenance.checksums([("embed_tokens.", "model.embed_tokens.")], tied=True)
    embedding = sent_names[0] if sent_names[0].startswith("embed") else EMBEDDING
    assert digests == {embedding: checksum(tensor), HEAD: checksum(tensor)} and aliases == {HEAD: embedding}


def test_disabled_checksums_are_unavailable_after_a_push() -> None:
    provenance = Provenance(enabled=False)
    assert provenance.checksums([], tied=False) == ({}, {})
    provenance.add_pushed("a", torch.ones(2))
    with pytest.raises(Conflict, match="--no-weight-checksums"):
        provenance.checksums([], tied=False)


def test_files_are_read_again_and_must_be_the_ones_that_were_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    sent = {"model.norm.weight": torch.rand(4), "model.layers.0.rotary_emb.inv_freq": torch.rand(2)}
    save_file(sent, file)
    listed = weights.catalogue(tmp_path)
    provenance = Provenance()
    provenance.add_files(listed, weights.stamp(listed))
    assert provenance.checksums([], tied=False)[0] == checksums({"model.norm.weight": sent["model.norm.weight"]})
    os.utime(file, ns=(1, 1))
    with pytest.raises(Conflict, match="have changed since"):
        provenance.checksums([], tied=False)
    file.unlink()
    with pytest.raises(Conflict, match="cannot be read again"):
        provenance.checksums([], tied=False)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "quantize_lm_head": True}], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_start_knows_what_it_read(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    hf = tiny_config(family, dtype="bfloat16")
    directory = write_checkpoint(tmp_path / "c", hf, seed=1, shards=2)
    stored = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    decoder = load_decoder(directory, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0, **options)
    digests, aliases = decoder.provenance.checksums(decoder.spec.renames, tied=decoder.spec.tied)
    expected = checksums(stored)
    assert digests == expected | ({HEAD: expected[EMBEDDING]} if decoder.spec.tied else {})
    assert bool(aliases) == decoder.spec.tied and any("q_proj" in name for name in digests)


def test_drawn_weights(tmp_path: Path) -> None:
    hf = tiny_config("llama")
    decoder = load_decoder(tmp_path, hf, dtype="bfloat16", head_dtype="auto", load_format="dummy", seed=3)
    digests, _ = decoder.provenance.checksums(decoder.spec.renames, tied=False)
    assert digests == checksums(tensors(decoder.parameters_by_name(), 3))
