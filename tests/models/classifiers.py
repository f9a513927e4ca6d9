"""Tiny classifiers with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.checkpoint import DEMO_DIR

LABELS = {"0": "bad", "1": "fair", "2": "good"}


def classifier(directory: Path, family: str, labels: dict[str, str] = LABELS, **changes: Any) -> Path:
    """A random checkpoint of a family with a head of these labels; one label makes it a reward model."""
    config = tiny_config(family, dtype="float32") | {"id2label": labels, "label2id": {}} | changes
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
    write_checkpoint(directory, config, seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, directory)
    return directory
