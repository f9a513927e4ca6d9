"""A tokenizer with an id per byte."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tokserve.text.tokenizer import Tokenizer

EOS = 0
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}{{ name | default('assistant') }}:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Ids 0 <eos>, 1 <bos>, 2 <x>; then one id per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS, "<bos>": 1, "<x>": 2, **{char: 3 + i for i, char in enumerate(alphabet)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>", "<x>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, TEMPLATE)


TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)
