"""GGUF files written by gguf-py: the model of what their blocks mean, served from the file alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from tests.models import gguf_mixtures, gguf_models
from tests.models.driver import Driver, prefill, random_ids
from tests.tiers import slow_after
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.families.gguf import tokenizer as gguf_tokenizer
from tokserve.families.gguf.header import GgufHeader
from tokserve.features.chat.chat import ChatTemplate
from tokserve.models.decoder import Decoder
from tokserve.models.load import load_decoder
from tokserve.ops import PackedWna16
from tokserve.text.tokenizer import Tokenizer

IDS = random_ids(90, gguf_models.VOCAB, seed=3)
KINDS = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "F16",
    "BF16",
    "F32",
]


def opened(path: Path, **options: Any) -> Decoder:
    directory = checkpoint.locate(str(path))
    options = {"dtype": "float32", "head_dtype": "auto", "load_format": "auto", "seed": 0} | options
    return load_decoder(directory, checkpoint.hf_config(directory), **options)


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return logprobs(model(torch.tensor([IDS])).logits[0])


@pytest.mark.some(7)
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_the_model_that_its_blocks_mean(tmp_path: Path, kind: str) -> None:
    model = gguf_models.write(tmp_path / "m.gguf", "llama", kind)
    decoder = opened(tmp_path / "m.gguf")
    assert (logprobs(prefill(decoder, IDS)) - expected(model)).abs().max() < 2e-4


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_architectures_with_types_that_differ_within_a_layer(tmp_path: Path, architecture: str) -> None:
    model = gguf_models.write(tmp_path / "m.gguf", architecture, "Q4_0", value_kind="Q8_0")
    decoder = opened(tmp_path / "m.gguf")
    assert decoder.quantization == "wna16"
    assert (logprobs(prefill(decoder, IDS)) - expected(model)).abs().max() < 2e-4
    dense = opened(tmp_path / "m.gguf", quantization="none")
    assert dense.quantization is None
    assert (logprobs(prefill(dense, IDS)) - expected(model)).abs().max() < 2e-4


MIXTURES = {  # types of the experts' gate, up and down matrices, and of the others
    "qwen3moe": ("Q4_K", "Q4_K", "Q6_K", "Q8_0"),
    "qwen2moe": ("Q4_0", "Q8_0", "Q5_1", "Q4_1"),
    "gpt-oss": ("MXFP4", "MXFP4", "MXFP4", "Q8_0"),
    "llama": ("IQ4_NL", "IQ4_NL", "BF16", "Q4_0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", slow_after(MIXTURES, 2))
def test_a_mixture_is_the_model_that_its_blocks_mean(tmp_path: Path, architecture: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    hf = tiny_config(gguf_mixtures.FAMILIES[architecture], **sizes)
    if architecture == "qwen2moe":
        hf |= {"shared_expert_intermediate_size": 256, "mlp_only_layers": [], "norm_topk_prob": False}
    hf |= {"layer_types": None} if architecture == "gpt-oss" else {}
    directory = write_checkpoint(tmp_path / "m", hf, seed=1)
    kinds = dict(zip(("gate", "up", "down", ""), MIXTURES[architecture], strict=True))
    dequantized = gguf_mixtures.write(tmp_path / "m.gguf", directory, architecture, kinds)
    decoder = opened(tmp_path / "m.gguf")
    experts = decoder.blocks[1].mlp.experts
    assert all(isinstance(packed, PackedWna16) for packed in experts.gate_up), "as they are stored"
    assert len(experts.gate_up[0].parts) == (1 if kinds["gate"] == kinds["up"] else 2)
    result = logprobs(prefill(decoder, IDS))
    save_file(dequantized, directory / "model.safetensors")
    expected = logprobs(
        prefill(load_decoder(directory, hf, dtype="float32", head_dtype="auto", load_format="auto", seed=0), IDS)
    )
    assert (result - expected).abs().max() < 2e-4
    dense = logprobs(prefill(opened(tmp_path / "m.gguf", quantization="none"), IDS))
    assert (dense - expected).abs().max() < 2e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_has_the_bits_of_a_prompt(tmp_path: Path, dtype: str) -> None:
    gguf_models.write(tmp_path / "m.gguf", "qwen3", "Q4_K", value_kind="Q6_K")
    decoder = opened(tmp_path / "m.gguf", dtype=dtype)
    expected = prefill(decoder, IDS[:40])
    driver = Driver(decoder, length=40)
    steps = [driver.step({0: part})[0] for part in (IDS[:7], IDS[7:31], *([token] for token in IDS[31:40]))]
    assert torch.equal(torch.cat(steps), expected)


def test_the_header_gives_tokenizer_template_and_end_of_sequence(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "m.gguf", "llama", "Q4_0")
    directory = checkpoint.locate(str(tmp_path / "m.gguf"))
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.chat_template == gguf_models.TEMPLATE
    text = "Grüße, 12 <extra_3>!"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert len(tokenizer.encode("<extra_3>")) == 1
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [257]


def test_a_file_without_a_vocabulary_serves_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GGUFWriter, "add_token_list", lambda *_: None)
    gguf_models.write(tmp_path / "m.gguf", "llama", "Q4_0")
    directory = checkpoint.locate(str(tmp_path / "m.gguf"))
    assert not caplog.records  # no tokenizer may be needed
    with pytest.raises(StartError, match=r"/m\.gguf: the file holds no vocabulary; name another .* --tokens-only$"):
        Tokenizer.load(directory)


def test_pieces_of_spaces_in_gemma_s_files_keep_their_ids() -> None:
    tokens = ["<unk>", "<bos>", "  ", "    ", "\u2581", "\u2581a", "a", "\n", "\n\n"]
    kinds = [2, 3, 4, 4, 1, 1, 1, 4, 4]
    metadata = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    converted, _ = gguf_tokenizer.convert(GgufHeader((), metadata, {}))
    backend = tokenizers.Tokenizer.from_str(converted)
    assert backend.get_vocab_size() == len(tokens)
    for text, ids in (("  ", [2]), ("a  a a", [6, 2, 6, 5]), ("     \n\na", [3, 4, 8, 6]), ("\n", [7])):
        assert backend.encode(text).ids == [1, *ids], text
        assert backend.decode(ids) == text


def test_checksums_are_of_the_file_s_bytes(tmp_path: Path) -> None:
    from gguf import GGUFReader

    from tokserve.rl.digests import checksum

    gguf_models.write(tmp_path / "m.gguf", "qwen3", "Q4_0")
    digests, _ = opened(tmp_path / "m.gguf").provenance.checksums((), tied=True)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    assert digests["model.layers.1.mlp.up_proj.weight"] == checksum(tensors["blk.1.ffn_up.weight"])
    assert digests["model.norm.weight"] == checksum(tensors["output_norm.weight"])


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    path = tmp_path / "m.gguf"

    def written(architecture: str, kind: GGMLQuantizationType | None = None) -> None:
        writer = GGUFWriter(path, architecture)
        raw = torch.zeros(256, 66 if kind else 4, dtype=torch.uint8 if kind else torch.int8).numpy()
        writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()

    written("mamba")
    with pytest.raises(StartError, match="I8, which is not supported"):
        checkpoint.locate(str(path))
    written("llama", GGMLQuantizationType.IQ2_XXS)
    with pytest.raises(StartError, match="IQ2_XXS"):
        checkpoint.locate(str(path))
    gguf_models.write(path, "llama", "Q4_0")
    data = path.read_bytes().replace(b"llama", b"mamba")
    path.write_bytes(data)
    with pytest.raises(StartError, match="'mamba', which is not supported"):
        checkpoint.locate(str(path))


def test_a_policy_refuses_a_quantized_file(tmp_path: Path) -> None:
    from tokserve.train.policy import PolicyModel

    gguf_models.write(tmp_path / "m.gguf", "qwen3", "Q4_0")
    with pytest.raises(StartError, match="Q4_0: a quantized checkpoint cannot be trained"):
        PolicyModel.from_pretrained(tmp_path / "m.gguf", dtype="float32")


def byte_level(**more: Any) -> GgufHeader:
    """The header of a vocabulary of letters."""
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "</s>"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.eos_token_id": 2,
    } | more
    return GgufHeader((Path("m.gguf"),), metadata, {})


def test_named_templates_are_read(tmp_path: Path) -> None:
    """serving-faults F10"""
    named = {
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "T{{ tools }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.pre": "gpt-2",
    }
    text, settings = gguf_tokenizer.convert(byte_level(**named))
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate(Tokenizer.load(tmp_path))
    assert template.sources == {"default": "{{ messages[0].content }}", "tool_use": "T{{ tools }}"}
    messages, tools = [{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "f"}}]
    assert template.text(messages) == "a" and template.text(messages, tools=tools).startswith("T[")
    assert template.text(messages, template="tool_use", must_show_tools=False) == "TNone"
    del named["tokenizer.chat_template.tool_use"]
    assert gguf_tokenizer.convert(byte_level(**named))[1]["chat_template"] == "{{ messages[0].content }}"


def test_a_file_that_does_not_say_how_text_is_cut_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """serving-faults F10"""
    gguf_tokenizer.convert(byte_level(**{"tokenizer.ggml.pre": "gpt-2"}))
    assert not caplog.records
    gguf_tokenizer.convert(byte_level())
    (record,) = caplog.records
    assert "m.gguf" in record.getMessage() and "tokenizer.ggml.pre" in record.getMessage()
