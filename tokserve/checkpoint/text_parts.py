"""Models that read images or sound, of which only the text model is served.

Their config.json has the text model's attributes in `text_config`, and their tensors have its names behind a prefix;
the towers' tensors are not read.  Without images they compute what the text model does alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PART_OF = "text_part_of"  # in the text model's attributes: the architecture of the whole
QUANTIZATIONS = ("quantization_config", "compression_config")  # of the whole, which say how the text model is stored
TEXT_MODELS = {  # architecture, by the model_type of `text_config`
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ATTRIBUTES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# The values that transformers assumes, by model_type: inside another config, it saves only those that differ.
ABSENT = {
    "cohere2": (256000, 8192, 22528, 40, 64, 64),
    "exaone4": (102400, 4096, 16384, 32, 32, 32),
    "gemma4_text": (262144, 2304, 9216, 30, 8, 4),
    "granite": (32000, 4096, 11008, 32, 32, 32),
    "lfm2": (65536, 2560, 12288, 32, 32, 8),
    "llama": (32000, 4096, 11008, 32, 32, 32),
    "ministral3": (131072, 4096, 14336, 34, 32, 8),
    "mistral": (32000, 4096, 14336, 32, 32, 8),
    "qwen2": (151936, 4096, 22016, 32, 32, 32),
    "qwen3": (151936, 4096, 22016, 32, 32, 32),
}
WHOLES = {
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Ovis2ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
}
_LANGUAGE_MODEL = (  # prefixes of the text model's names, and what is behind them by itself
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
)
_OTHERS = (  # modules of images and sound, in the whole or in its `model`
    "aligner.",
    "audio_tower.",
    "connector.",
    "embed_audio.",
    "embed_vision.",
    "encoder.",
    "generation_aligner.",
    "generation_embeddings.",
    "generation_head.",
    "image_newline",
    "image_tower.",
    "mm_projector.",
    "multi_modal_projector.",
    "projector.",
    "video_tower.",
    "vision_embed_tokens.",
    "vision_encoder.",
    "vision_model.",
    "vision_projection.",
    "vision_tower.",
    "visual.",
    "visual_embeddings_table.",
    "vqmodel.",
)
RENAMES = tuple((prefix + name, "") for prefix in ("", "model.") for name in _OTHERS) + _LANGUAGE_MODEL


def text_part(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text model of a whole; None if this is not that of one, or its text model is unknown."""
    inner, names = value.get("text_config"), value.get("architectures")
    if not isinstance(inner, dict) or not isinstance(names, list):
        return None
    whole = next((name for name in names if name in WHOLES), None)
    architecture = TEXT_MODELS.get(str(inner.get("model_type")))
    if whole is None or architecture is None:
        return None
    shared = {name: one for name, one in value.items() if not isinstance(one, dict) or name in QUANTIZATIONS}
    tied = [config["tie_word_embeddings"] for config in (value, inner) if "tie_word_embeddings" in config]
    absent = dict(zip(ATTRIBUTES, ABSENT.get(inner["model_type"], ()), strict=False))
    part = {**shared, **absent, **inner, "architectures": [architecture], PART_OF: whole}
    return part | ({"tie_word_embeddings": True in tied} if tied else {})


def renames(hf: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """How a checkpoint's names begin, and those of the model that is served; "": what has no part in it."""
    return RENAMES if hf.get(PART_OF) else ()
