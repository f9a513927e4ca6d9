"""What is done for each prompt and each choice of a large request is done in threads, however short they are."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.server.fake_llm import TOKENIZER, endless, site
from tokserve.server.openai.completions import CompletionRenderer
from tokserve.server.sglang.reply import ChoiceDetails, GenerateRenderer
from tokserve.text.tokenizer import Tokenizer

COMPLETIONS = ("/v1/completions", "prompt", {"max_tokens": 2})
SGLANG = ("/generate", "text", {"sampling_params": {"max_new_tokens": 2}})


@pytest.mark.parametrize(("path", "field", "others"), [COMPLETIONS, SGLANG])
@pytest.mark.parametrize(("count", "in_threads"), [(2, False), (200, True)])
def test_where_prompts_are_tokenized_and_choices_written(
    monkeypatch: pytest.MonkeyPatch, path: str, field: str, others: dict[str, Any], count: int, in_threads: bool
) -> None:
    names: dict[str, set[str]] = {}

    def noted(kind: type, method: str) -> None:
        original = getattr(kind, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            names.setdefault(method, set()).add(threading.current_thread().name)
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, method, call)

    renderer = CompletionRenderer if path == COMPLETIONS[0] else GenerateRenderer
    for kind, method in ((Tokenizer, "encode_each"), (renderer, "reply"), (ChoiceDetails, "begin")):
        noted(kind, method)
    answer = site(endless, sglang_api=True).post(path, {field: ["ab"] * count, **others})
    assert answer.status_code == 200, answer.text
    assert {"encode_each", "reply"} <= names.keys()
    assert {name.startswith("tokserve-") for found in names.values() for name in found} == {in_threads}


def test_texts_are_encoded_together_as_each_alone() -> None:
    tokenizer = TOKENIZER
    texts = ["ab", "", "ü", "a" * 1000]
    assert tokenizer.encode_each(texts) == [tokenizer.encode(text) for text in texts]
