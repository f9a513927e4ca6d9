"""The table of architectures: which function reads the config.json of which.

A family's module is imported when a checkpoint names the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from tokserve.base.errors import StartError
from tokserve.base.rooms import part
from tokserve.checkpoint import text_parts
from tokserve.checkpoint.architectures import (
    BASE_SUFFIX,
    ENDINGS,
    SUFFIX,
    TOKEN_SUFFIX,
    base_name,
    causal_name,
    encoder_family,
)
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import DecoderSpec

ARCHITECTURES = {
    "ArceeForCausalLM": "tokserve.models.dense.llama:arcee",
    "BambaForCausalLM": "tokserve.families.state_space.hybrid:bamba",
    "Cohere2ForCausalLM": "tokserve.models.dense.cohere:cohere2",
    "CohereForCausalLM": "tokserve.models.dense.cohere:cohere",
    "CwmForCausalLM": "tokserve.models.dense.llama:cwm",
    "DeepseekV2ForCausalLM": "tokserve.families.latent.deepseek:deepseek2",
    "DeepseekV3ForCausalLM": "tokserve.families.latent.deepseek:deepseek3",
    "Dots1ForCausalLM": "tokserve.families.mixtures.small_moe:dots1",
    "Ernie4_5ForCausalLM": "tokserve.models.dense.llama:ernie4_5",
    "Ernie4_5_MoeForCausalLM": "tokserve.families.mixtures.small_moe:ernie4_5_moe",
    "Exaone4ForCausalLM": "tokserve.models.dense.llama:exaone4",
    "ExaoneForCausalLM": "tokserve.models.dense.llama:exaone",
    "FalconH1ForCausalLM": "tokserve.families.state_space.falcon:falcon_h1",
    "FlexOlmoForCausalLM": "tokserve.families.mixtures.small_moe:flex_olmo",
    "Gemma2ForCausalLM": "tokserve.models.dense.gemma:gemma2",
    "Gemma3ForCausalLM": "tokserve.models.dense.gemma:gemma3",
    "Gemma3ForConditionalGeneration": "tokserve.features.images.gemma_vision:gemma3",
    "Gemma4ForCausalLM": "tokserve.families.mixtures.gemma4:gemma4",
    "GemmaForCausalLM": "tokserve.models.dense.gemma:gemma",
    "Glm4ForCausalLM": "tokserve.models.dense.glm:glm4",
    "Glm4MoeForCausalLM": "tokserve.families.mixtures.moe:glm4_moe",
    "Glm4MoeLiteForCausalLM": "tokserve.families.latent.deepseek:glm4_moe_lite",
    "GlmForCausalLM": "tokserve.models.dense.glm:glm",
    "GPT2LMHeadModel": "tokserve.models.dense.gpt2:gpt2",
    "GPTNeoXForCausalLM": "tokserve.models.dense.gpt_neox:gpt_neox",
    "GptOssForCausalLM": "tokserve.families.mixtures.gpt_oss:gpt_oss",
    "GraniteForCausalLM": "tokserve.models.dense.granite:granite",
    "GraniteMoeForCausalLM": "tokserve.families.mixtures.granite_moe:granite_moe",
    "GraniteMoeHybridForCausalLM": "tokserve.families.state_space.hybrid:granite_hybrid",
    "GraniteMoeSharedForCausalLM": "tokserve.families.mixtures.granite_moe:granite_moe_shared",
    "HunYuanDenseV1ForCausalLM": "tokserve.models.dense.llama:hunyuan",
    "HunYuanMoEV1ForCausalLM": "tokserve.families.mixtures.small_moe:hunyuan_moe",
    "Lfm2ForCausalLM": "tokserve.families.recurrent.hybrid:lfm2",
    "Lfm2MoeForCausalLM": "tokserve.families.recurrent.hybrid:lfm2_moe",
    "InternLM3ForCausalLM": "tokserve.models.dense.llama:internlm3",
    "Llama4ForCausalLM": "tokserve.families.mixtures.llama4:llama4",
    "LlamaForCausalLM": "tokserve.models.dense.llama:llama",
    "Mamba2ForCausalLM": "tokserve.families.state_space.single:mamba2",
    "MiniCPM3ForCausalLM": "tokserve.families.latent.deepseek:minicpm3",
    "MiniMaxM2ForCausalLM": "tokserve.families.mixtures.small_moe:minimax_m2",
    "MinistralForCausalLM": "tokserve.models.dense.llama:ministral",
    "Ministral3ForCausalLM": "tokserve.models.dense.llama:ministral3",
    "MistralForCausalLM": "tokserve.models.dense.llama:mistral",
    "MixtralForCausalLM": "tokserve.families.mixtures.moe:mixtral",
    "NemotronForCausalLM": "tokserve.models.dense.stablelm:nemotron",
    "NemotronHForCausalLM": "tokserve.families.state_space.single:nemotron_h",
    "OPTForCausalLM": "tokserve.models.dense.opt:opt",
    "OlmoForCausalLM": "tokserve.models.dense.olmo:olmo",
    "Olmo2ForCausalLM": "tokserve.models.dense.olmo:olmo2",
    "Olmo3ForCausalLM": "tokserve.models.dense.olmo:olmo3",
    "OlmoeForCausalLM": "tokserve.families.mixtures.small_moe:olmoe",
    "PhiForCausalLM": "tokserve.models.dense.phi:phi",
    "Phi3ForCausalLM": "tokserve.models.dense.phi:phi3",
    "Qwen2ForCausalLM": "tokserve.models.dense.llama:qwen2",
    "Qwen2_5_VLForConditionalGeneration": "tokserve.features.images.vision_language:qwen2_5_vl",
    "Qwen2MoeForCausalLM": "tokserve.families.mixtures.moe:qwen2_moe",
    "Qwen3ForCausalLM": "tokserve.models.dense.llama:qwen3",
    "Qwen3MoeForCausalLM": "tokserve.families.mixtures.moe:qwen3_moe",
    "Qwen3NextForCausalLM": "tokserve.families.recurrent.hybrid:qwen3_next",
    "Qwen3VLForConditionalGeneration": "tokserve.features.images.vision_language:qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "tokserve.features.images.vision_language:qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "tokserve.families.recurrent.hybrid:qwen3_5",
    "Qwen3_5ForConditionalGeneration": "tokserve.features.images.vision_language:qwen3_5",
    "Qwen3_5MoeForCausalLM": "tokserve.families.recurrent.hybrid:qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "tokserve.features.images.vision_language:qwen3_5_moe",
    "SeedOssForCausalLM": "tokserve.models.dense.llama:seed_oss",
    "SmolLM3ForCausalLM": "tokserve.models.dense.llama:smollm3",
    "SolarOpenForCausalLM": "tokserve.families.mixtures.moe:solar_open",
    "StableLmForCausalLM": "tokserve.models.dense.stablelm:stablelm",
    "Starcoder2ForCausalLM": "tokserve.models.dense.starcoder:starcoder2",
    "YoutuForCausalLM": "tokserve.families.latent.deepseek:youtu",
}
# Families that transformers saves under another's architecture, whose configs and tensors have names of their own.
# None: no spec function reads their tensors.
BY_MODEL_TYPE = {"exaone": "ExaoneForCausalLM", "internlm3": "InternLM3ForCausalLM", "sarvam_moe": None}
ENCODERS = {  # by family
    "Bert": "tokserve.features.pooling.bert:bert",
    "ModernBert": "tokserve.features.pooling.bert:modern_bert",
    "Roberta": "tokserve.features.pooling.bert:roberta",
    "XLMRoberta": "tokserve.features.pooling.bert:roberta",
}
# Architectures with layers that are neither attention nor one of the recurrent kinds built in.
RECURRENT = {
    "FalconMambaForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm3ForCausalLM",
    "MambaForCausalLM",
    "MiniMaxForCausalLM",
    "OlmoHybridForCausalLM",
    "RecurrentGemmaForCausalLM",
    "RwkvForCausalLM",
    "Zamba2ForCausalLM",
    "ZambaForCausalLM",
    "xLSTMForCausalLM",
}


def refuse_recurrent(hf: Mapping[str, Any]) -> None:
    """Raise StartError for an architecture that no implementation can serve."""
    for name in ConfigReader(hf).texts("architectures"):
        if name in RECURRENT:
            built_in = ", ".join(
                one for one, place in ARCHITECTURES.items() if "recurrent" in place or "state_space" in place
            )
            raise StartError(
                f"architecture {name} is not supported: its recurrent layers are of a kind that is not built in, and "
                f"transformers' modules are served for attention only; those built in are: {built_in}"
            )


def is_known(hf: Mapping[str, Any]) -> bool:
    """Whether a function of the table reads this config.json."""
    known = any(_with_head(name) in ARCHITECTURES for name in _names(hf))
    return known or encoder_family(hf) is not None


def _with_head(name: str) -> str:
    return name if name in ARCHITECTURES else causal_name(name) or base_name(name)


def _names(hf: Mapping[str, Any]) -> list[str]:
    fields = ConfigReader(hf)
    names, model_type = fields.texts("architectures"), fields.text("model_type", "")
    if model_type not in BY_MODEL_TYPE:
        return names
    architecture = BY_MODEL_TYPE[model_type]
    return [architecture] if architecture else [f"{name} of {model_type}" for name in names]


def decoder_spec(hf: Mapping[str, Any]) -> DecoderSpec:
    """The spec for this config.json; StartError if no architecture it names is known."""
    names, family = _names(hf), encoder_family(hf)
    if family is not None:
        return _read(ENCODERS[family], hf)
    for name in names:
        known = _with_head(name)
        if known in ARCHITECTURES:
            spec = _read(ARCHITECTURES[known], hf)
            spec = replace(spec, renames=text_parts.renames(hf) + spec.renames)
            if base_name(name):  # a head that is the embedding needs no memory
                return replace(spec, tied=True)
            if known == name:
                return spec
            classifier: DecoderSpec = part("pooling", "with_classifier")(spec, hf)
            return classifier
    problem = f"architecture {', '.join(names)} is not supported" if names else "config.json names no architecture"
    raise StartError(
        f"{problem}; supported are: {', '.join(ARCHITECTURES)}, of the same families those with {SUFFIX}, "
        f"{TOKEN_SUFFIX} or {BASE_SUFFIX}, and the encoders {', '.join(ENCODERS)} with {', '.join(ENDINGS)}"
    )


def _read(place: str, hf: Mapping[str, Any]) -> DecoderSpec:
    module, function = place.split(":")
    return getattr(import_module(module), function)(hf)
