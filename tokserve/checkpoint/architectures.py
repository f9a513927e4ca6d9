"""What the name of an architecture in config.json says: what a model makes, and whether it reads a prompt both ways.

A classifier, a model without a head and an encoder make no tokens.  An encoder reads a prompt both ways: it is computed
whole in one step, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUFFIX = "ForSequenceClassification"
TOKEN_SUFFIX = "ForTokenClassification"
BASE_SUFFIX, LM_SUFFIX = "Model", "LMHeadModel"
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
SHIFTED = ("Roberta", "XLMRoberta")  # their positions begin behind the padding id


def encoder_family(hf: Mapping[str, Any]) -> str | None:
    """The family of the encoder that config.json names; None: it names none."""
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else ():
        for one in ENCODERS:
            if name in {one + ending for ending in ENDINGS}:
                return one
    return None


def first_position(hf: Mapping[str, Any]) -> int:
    """The row of the table of positions that a prompt's first token has."""
    padding = hf.get("pad_token_id")
    return (padding if isinstance(padding, int) else 1) + 1 if encoder_family(hf) in SHIFTED else 0


def is_classifier(hf: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture that classifies."""
    return _has_suffix(hf, (SUFFIX, TOKEN_SUFFIX))


def labels_tokens(hf: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture that classifies each token of a prompt."""
    return _has_suffix(hf, TOKEN_SUFFIX)


def _has_suffix(hf: Mapping[str, Any], suffix: str | tuple[str, ...]) -> bool:
    names = hf.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(suffix) for name in names)


def causal_name(name: str) -> str:
    """The architecture without the head of a classifier, as `LlamaForCausalLM`; "" if it is none."""
    if not name.endswith((SUFFIX, TOKEN_SUFFIX)):
        return ""
    return name.removesuffix(SUFFIX).removesuffix(TOKEN_SUFFIX).removesuffix("Text") + "ForCausalLM"


def base_name(name: str) -> str:
    """The architecture with a head for tokens, as `LlamaForCausalLM`, of one without, as `LlamaModel`; "" if it is no
    such."""
    if not name.endswith(BASE_SUFFIX) or name.endswith(LM_SUFFIX):
        return ""
    return name.removesuffix(BASE_SUFFIX).removesuffix("Text") + "ForCausalLM"


def is_base(hf: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture without a head: its hidden states are what it makes."""
    names = hf.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and base_name(name) for name in names)
