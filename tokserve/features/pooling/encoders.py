"""Architectures that read a prompt both ways: their names, and how long a prompt they take.

Such a model makes vectors or classes and no tokens.  A prompt is computed whole in one step, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
SHIFTED = ("Roberta", "XLMRoberta")  # their positions begin behind the padding id


def family(hf: Mapping[str, Any]) -> str | None:
    """The family of the encoder that config.json names; None: it names none."""
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else ():
        for one in FAMILIES:
            if name in {one + ending for ending in ENDINGS}:
                return one
    return None


def first_position(hf: Mapping[str, Any]) -> int:
    """The row of the table of positions that a prompt's first token has."""
    padding = hf.get("pad_token_id")
    return (padding if isinstance(padding, int) else 1) + 1 if family(hf) in SHIFTED else 0


def pools_mean(hf: Mapping[str, Any]) -> bool:
    """Whether the head of a classifier reads the mean of all tokens, not the first."""
    return family(hf) == "ModernBert" and hf.get("classifier_pooling") == "mean"
