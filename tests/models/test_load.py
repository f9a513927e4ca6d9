"""Reading checkpoints: what is accepted gives the same model, what is refused is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.driver import prefill, random_ids
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.models import weights
from tokserve.models.decoder import Decoder
from tokserve.models.load import load_decoder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNTIED, TIED = tiny_config("llama"), tiny_config("qwen3")
IDS = random_ids(20, 320)


def opened(directory: Path, **options: Any) -> Decoder:
    hf = json.loads((directory / "config.json").read_text())
    options = {"dtype": "float32", "head_dtype": "auto", "load_format": "auto", "seed": 0} | options
    return load_decoder(directory, hf, **options)


def logits(directory: Path, **options: Any) -> Tensor:
    return prefill(opened(directory, **options), IDS)


def stored(directory: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(directory / weights.SINGLE).items()}


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / weights.SINGLE)


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(StartError) as caught:
        opened(directory, **options)
    return str(caught.value)


@pytest.mark.parametrize("hf", [UNTIED, TIED])
def test_a_sharded_checkpoint_is_the_same_model(hf: dict[str, Any], tmp_path: Path) -> None:
    expected = logits(write_checkpoint(tmp_path / "one", hf))
    sharded = write_checkpoint(tmp_path / "many", hf, shards=3)
    assert len(list(sharded.glob("model-*.safetensors"))) == 3
    assert not (sharded / weights.SINGLE).exists()
    assert torch.equal(logits(sharded), expected)


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    expected = logits(write_checkpoint(tmp_path, TIED))
    rewrite(tmp_path, {name.removeprefix("model."): tensor for name, tensor in stored(tmp_path).items()})
    assert torch.equal(logits(tmp_path), expected)


def test_a_name_under_two_spellings_is_refused(tmp_path: Path) -> None:
    tensors = stored(write_checkpoint(tmp_path, UNTIED))
    rewrite(tmp_path, tensors | {"norm.weight": torch.ones(64)})
    message = refusal(tmp_path)
    assert "model.norm.weight twice" in message
    assert "and norm.weight" in message or "as norm.weight" in message


def test_stored_inverse_frequencies_are_ignored(tmp_path: Path) -> None:
    expected = logits(write_checkpoint(tmp_path, UNTIED))
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(8) for n in range(3)}
    rewrite(tmp_path, stored(tmp_path) | extra | {"model.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(logits(tmp_path), expected)


def test_a_tied_weight_under_both_names_or_the_heads_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(write_checkpoint(tmp_path, TIED))
    tensors = stored(tmp_path)
    rewrite(tmp_path, tensors | {HEAD: tensors[EMBEDDING].clone()})
    assert torch.equal(logits(tmp_path), expected) and "differ" not in caplog.text
    rest = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    rewrite(tmp_path, rest | {HEAD: tensors[EMBEDDING]})
    assert torch.equal(logits(tmp_path), expected)


def test_tied_weights_that_differ_are_both_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = stored(write_checkpoint(tmp_path, TIED))
    rewrite(tmp_path, tensors | {HEAD: 2 * tensors[EMBEDDING]})
    actual = logits(tmp_path)
    assert "tie_word_embeddings" in caplog.text
    rewrite(tmp_path, tensors)
    torch.testing.assert_close(actual, 2 * logits(tmp_path))


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    tensors = stored(write_checkpoint(tmp_path, UNTIED))
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"], tensors[HEAD]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(31, 64)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16)
    tensors["model.layers.2.self_attn.v_proj.weight"] = torch.zeros(32, 64, dtype=torch.int8)
    rewrite(tmp_path, tensors)
    message = refusal(tmp_path)
    assert "3 missing: " in message
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", HEAD):
        assert name in message
    assert "1 unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "1 misshapen: model.layers.0.self_attn.k_proj.weight (expected [32, 64], found [31, 64])" in message
    assert "1 of an unsupported dtype: model.layers.2.self_attn.v_proj.weight (I8)" in message


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    tensors = stored(write_checkpoint(tmp_path, UNTIED))
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    rewrite(tmp_path, kept)
    message = refusal(tmp_path)
    assert "27 missing: " in message
    assert "and 17 more" in message
    assert message.count("model.layers.") == 10


def test_another_family_than_the_config_says_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3", tie_word_embeddings=False))
    (tmp_path / "config.json").write_text(json.dumps(UNTIED))
    assert "6 unexpected: model.layers.0.self_attn.k_norm.weight" in refusal(tmp_path)


def test_a_pointer_of_git_lfs_is_refused_by_name(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, UNTIED) / weights.SINGLE
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
    assert "git lfs pull" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_files_are_refused(kept: int, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, UNTIED) / weights.SINGLE
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    message = refusal(tmp_path)
    assert "model.safetensors is not a complete safetensors file" in message


def test_a_file_that_may_not_be_read_is_not_called_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, UNTIED)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(StartError, match=r"model\.safetensors cannot be read: Permission denied"):
        weights.catalogue(tmp_path)


def test_corrupt_headers_are_refused(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, UNTIED) / weights.SINGLE
    content = bytearray(file.read_bytes())
    content[8:40] = bytes(32)
    file.write_bytes(content)
    assert "not a complete safetensors file" in refusal(tmp_path)


def test_no_weights_and_pickles_only_are_refused(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, UNTIED) / weights.SINGLE).unlink()
    message = refusal(tmp_path)
    assert "holds no model.safetensors" in message
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message
    assert "convert it to safetensors" in message


def test_files_without_an_index(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "whole", UNTIED)
    parts = write_checkpoint(tmp_path / "parts", UNTIED, shards=3)
    (parts / weights.INDEX).unlink()
    shutil.copy(directory / weights.SINGLE, parts / "consolidated.safetensors")
    shutil.copy(directory / weights.SINGLE, parts / "adapter_model.safetensors")
    assert {name: entry.shape for name, entry in weights.catalogue(parts).items()} == {
        name: entry.shape for name, entry in weights.catalogue(directory).items()
    }
    shutil.copy(directory / weights.SINGLE, parts / "other.safetensors")
    with pytest.raises(
        StartError, match=r"holds no model.safetensors.index.json, and several files have lm_head\.weight"
    ):
        weights.catalogue(parts)


def test_index_faults_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, UNTIED, shards=2)
    path = directory / weights.INDEX
    index = json.loads(path.read_text())

    def with_map(changes: dict[str, Any]) -> str:
        path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | changes}))
        return refusal(directory)

    assert "1 files that are not there: gone.safetensors" in with_map({"a": "gone.safetensors"})
    assert "../model-00001-of-00002.safetensors" in with_map({"a": "../model-00001-of-00002.safetensors"})
    assert "1 tensors that are not in their file: a" in with_map({"a": "model-00001-of-00002.safetensors"})
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {index["weight_map"][HEAD]}
    assert f"not in their file: {HEAD}" in with_map({HEAD: other.pop()})
    assert "no weight_map" in with_map({"a": 3})
    path.write_text("{")
    assert "cannot be read" in refusal(directory)
    path.write_text("{}")
    assert "no weight_map" in refusal(directory)
    path.write_text(json.dumps(index))
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert "model-00002-of-00002.safetensors is not a complete" in refusal(directory)


def test_refusals_of_config_and_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, UNTIED)
    assert "unknown dtype 'int8'" in refusal(tmp_path, dtype="int8")
    (tmp_path / "config.json").write_text(json.dumps(UNTIED | {"quantization_config": {"quant_method": "gptq"}}))
    assert "'gptq'" in refusal(tmp_path)
    assert "'gptq'" in refusal(tmp_path, load_format="dummy")


def test_the_model_outlives_its_files(tmp_path: Path) -> None:
    decoder = opened(write_checkpoint(tmp_path, UNTIED))
    expected = prefill(decoder, IDS)
    file = tmp_path / weights.SINGLE
    size = file.stat().st_size
    with file.open("r+b") as overwritten:  # in place: a mapping would see it
        overwritten.seek(size // 2)
        overwritten.write(bytes(size - size // 2))
    assert torch.equal(prefill(decoder, IDS), expected)


def test_loading_again_replaces_the_weights(tmp_path: Path) -> None:
    """What a live update does: the same steps with other tensors."""
    decoder = opened(write_checkpoint(tmp_path / "old", TIED, seed=0))
    new = write_checkpoint(tmp_path / "new", TIED, seed=1)
    parameters = decoder.parameters_by_name()
    tensors = stored(new)
    weights.check_names(tensors, parameters, "the update")
    weights.load_into(parameters, tensors.items())
    assert torch.equal(prefill(decoder, IDS), logits(new))


def test_dummy_weights_read_no_file_and_equal_the_written_ones(tmp_path: Path) -> None:
    expected = logits(write_checkpoint(tmp_path, UNTIED, seed=5))
    (tmp_path / weights.SINGLE).unlink()
    assert torch.equal(logits(tmp_path, load_format="dummy", seed=5), expected)
    assert not torch.equal(logits(tmp_path, load_format="dummy", seed=6), expected)


def test_positions_default_to_the_configs_limit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, UNTIED)
    assert len(opened(tmp_path).rope_table) == UNTIED["max_position_embeddings"]
    assert len(opened(tmp_path, max_model_len=33).rope_table) == 33


def test_int8_is_near_the_original_and_quantizes_the_head_only_if_asked(tmp_path: Path) -> None:
    """Tied too: the embedding keeps its own copy."""
    for hf in (UNTIED, TIED):
        directory = write_checkpoint(tmp_path / str(hf["tie_word_embeddings"]), hf)
        original = logits(directory).log_softmax(-1)
        differences = []
        for quantize_lm_head in (False, True):
            decoder = opened(directory, quantization="int8", quantize_lm_head=quantize_lm_head)
            blocks = [decoder.blocks[0].attention.qkv, decoder.blocks[0].mlp.gate_up, decoder.blocks[-1].mlp.down]
            assert all(isinstance(linear.packed, ops.PackedInt8) for linear in blocks)
            assert isinstance(decoder.head.linear.packed, ops.PackedInt8) == quantize_lm_head
            quantized = prefill(decoder, IDS).log_softmax(-1)
            differences.append((quantized - original).abs().mean().item())
            assert 0 < differences[-1] < 0.2
        assert differences[0] != differences[1]


def test_int8_layers_accept_new_weights_and_report_their_dtypes(tmp_path: Path) -> None:
    decoder = opened(write_checkpoint(tmp_path / "old", TIED, seed=0), quantization="int8")
    new = write_checkpoint(tmp_path / "new", TIED, seed=1)
    parameters = decoder.parameters_by_name()
    weights.load_into(parameters, stored(new).items())
    assert torch.equal(prefill(decoder, IDS), logits(new, quantization="int8"))
    kept = {name: parameter.dtype for name, parameter in parameters.items()}
    assert kept["model.layers.0.mlp.up_proj.weight"] == torch.int8
    assert kept["model.norm.weight"] == kept[EMBEDDING] == torch.float32
