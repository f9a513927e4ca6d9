"""Models that read images or sound, served without: greedy tokens are those of transformers' whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.runner.test_with_engine import RealEngine
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.checkpoint.text_parts import ABSENT, ATTRIBUTES, PART_OF, TEXT_MODELS, WHOLES
from tokserve.layers.attention import AttentionSpec
from tokserve.models.registry import ARCHITECTURES, decoder_spec

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

pytestmark = pytest.mark.usefixtures("compiled")

IDS = [7 + (3 * i * i + i) % 290 for i in range(23)]
CLOSE = 1e-3  # a token whose logit is this near to the largest is as good
SIZES = {  # of towers and what joins them
    32: "hidden_size embed_dim d_model vision_output_dim projector_output_dim output_dim hidden_dim",
    64: "intermediate_size mlp_dim encoder_ffn_dim projector_input_dim",
    28: "image_size",
    16: "head_dim",
    14: "patch_size",
    2: "num_attention_heads num_heads encoder_attention_heads num_key_value_heads",
    1: "num_hidden_layers depth encoder_layers num_layers",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
NEEDS_MORE = {  # than transformers has here
    "Gemma3nForConditionalGeneration",  # timm
    "KimiK25ForConditionalGeneration",  # names of the checkpoint's own code
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",  # saves other names of its text model than it was released with
    "Llama4ForConditionalGeneration",  # its forward pass fails without images
}
KINDS = {
    architecture: kind
    for table in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    for kind, architecture in table.items()
}


def text_config(model_type: str) -> dict[str, Any]:
    pads = {"pad_token_id": 0} if model_type == "gemma4_text" else {}  # which puts it in the place of images
    return {name: value for name, value in tiny_config(model_type, **pads).items() if name != "architectures"}


def written(architecture: str, directory: Path, text: dict[str, Any] | None = None) -> torch.nn.Module:
    """A saved small random model whose norms are not the identity and whose biases are not zero."""
    kind = CONFIG_MAPPING[KINDS[architecture]]
    values = kind().to_dict()
    values.pop("architectures", None)
    for name, part in values.items():
        if name.endswith("_config") and isinstance(part, dict):
            part |= {size: SIZE_OF[size] for size in part.keys() & SIZE_OF.keys() if type(part[size]) is int}
        elif name.endswith(("token_index", "token_id")) and isinstance(part, int):
            values[name] = 5
    values["text_config"] = text or text_config(kind().text_config.model_type)
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class._from_config(kind.from_dict(values), dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.ndim == 1 else 0.08)
    model.save_pretrained(directory)
    return model


def served_tokens(directory: Path, lengths: list[int]) -> list[int]:
    """The greedy token after so many of `IDS`."""
    hf = json.loads((directory / "config.json").read_text())
    engine = RealEngine(directory, hf=hf, load_format="auto", dtype="float32", max_model_len=64)
    for length in lengths:
        engine.add(str(length), IDS[:length], temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.run(2000)
    engine.core.close()
    engine.real.close()
    return [engine.tokens(str(length))[0] for length in lengths]


def check(architecture: str, directory: Path, text: dict[str, Any] | None = None) -> None:
    model, lengths = written(architecture, directory, text), [3, 8, 15, 23]
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    for length, token in zip(lengths, served_tokens(directory, lengths), strict=True):
        assert logits[length - 1, token] > logits[length - 1].max() - CLOSE


def test_a_text_model_is_served_without_its_tower(tmp_path: Path) -> None:
    check("Mistral3ForConditionalGeneration", tmp_path)
    hf = checkpoint.hf_config(tmp_path)
    assert hf["architectures"] == ["MistralForCausalLM"] and hf[PART_OF] == "Mistral3ForConditionalGeneration"
    assert "vision_config" not in hf


@pytest.mark.slow
def test_text_models_of_one_whole_differ(tmp_path: Path) -> None:
    check("Mistral3ForConditionalGeneration", tmp_path, text_config("ministral3"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(WHOLES - NEEDS_MORE))
def test_tokens_are_those_of_the_whole(architecture: str, tmp_path: Path) -> None:
    check(architecture, tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_released_names_of_a_text_model(prefix: str, tmp_path: Path) -> None:
    """Kimi's: a DeepSeek V3 behind a prefix, beside tensors that are not read."""
    alone, multimodal = tmp_path / "alone", tmp_path / "multimodal"
    text = tiny_config("deepseek_v3")
    write_checkpoint(alone, text)
    multimodal.mkdir()
    tensors = load_file(alone / "model.safetensors")
    under = {prefix + (name if prefix[0] == "l" else name.removeprefix("model.")): one for name, one in tensors.items()}
    under |= {"vision_tower.patch_embed.proj.weight": torch.zeros(3), "mm_projector.proj.0.weight": torch.zeros(2)}
    if prefix[0] == "m":
        under["lm_head.weight"] = under.pop(prefix + "lm_head.weight")
    save_file(under, multimodal / "model.safetensors")
    names = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {}}
    (multimodal / "config.json").write_text(json.dumps(names | {"text_config": text | {"model_type": "kimi_k2"}}))
    assert served_tokens(multimodal, [3, 23]) == served_tokens(alone, [3, 23])


def test_what_no_part_of_the_model_takes_is_refused(tmp_path: Path) -> None:
    written("Mistral3ForConditionalGeneration", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"language_modle.norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=r"1 unexpected: language_modle\.norm\.weight"):
        served_tokens(tmp_path, [3])


def test_a_text_model_that_is_not_known_is_refused() -> None:
    value = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "unheard_of"}}
    assert checkpoint.flat(value) == value
    with pytest.raises(StartError, match="Mistral3ForConditionalGeneration is not supported"):
        decoder_spec(value)


def test_attributes_of_the_whole_count_where_its_text_model_has_none() -> None:
    inner = {"model_type": "mistral", "hidden_size": 64, "tie_word_embeddings": False}
    value = {
        "architectures": ["LlavaForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "hidden_size": 32,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8"},
        "vision_config": {"hidden_size": 16},
        "text_config": inner,
    }
    part = checkpoint.flat(value)
    assert part["hidden_size"] == 64 and part["torch_dtype"] == "bfloat16" and part["tie_word_embeddings"] is True
    assert part["architectures"] == ["MistralForCausalLM"] and "vision_config" not in part
    assert part["quantization_config"] == {"quant_method": "fp8"}


def test_what_a_nested_config_leaves_out_is_what_transformers_assumes() -> None:
    """Pixtral's and Llava's have no number of heads, or no sizes at all."""
    for model_type, values in ABSENT.items():
        config = CONFIG_MAPPING[model_type]()
        assert values == tuple(getattr(config, name) for name in ATTRIBUTES), model_type
    inner = {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 3}
    value = {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner}
    spec = decoder_spec(checkpoint.flat(value))
    attention = spec.blocks[0].attention
    assert isinstance(attention, AttentionSpec)
    assert (attention.heads, attention.kv_heads, attention.dim, len(spec.blocks)) == (32, 8, 128, 3)


def test_every_text_model_is_built_in_or_known_to_transformers() -> None:
    unknown = [name for name in TEXT_MODELS.values() if name not in ARCHITECTURES and not hasattr(transformers, name)]
    assert not unknown
