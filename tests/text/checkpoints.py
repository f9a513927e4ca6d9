"""Small tokenizers of the kinds met in the field, written as checkpoints; and transformers as the oracle."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. What is 47 + 38? It is 85.",
    "naïve café, Ünïcode, 漢字 and かな, Ελληνικά, emoji 🙂🚀 and code: def f(x): return x ** 2",
    "user assistant system tool\n\n\t  spaces   and\nlines",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_json() -> str:
    """A byte-level BPE in the manner of GPT-2, Llama 3 and Qwen, with a few added tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("漢 word", special=False)])
    text: str = backend.to_str()
    return text


@cache
def sentence_piece_json(strip: bool = True) -> str:
    """A BPE with byte fallback and ▁ for spaces in the manner of Llama 2 (strip) and Gemma (no strip)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    for char in "▁abcdefghilmnoprstuwxyz.,!?é漢":
        vocab[char] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("a", "n"), ("i", "n"), ("▁", "w"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoding, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    text: str = backend.to_str()
    return text


@cache
def word_piece_json() -> str:
    """A vocabulary whose decoder puts spaces between tokens."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##s", "##ing", "play", ".", "don", "'", "t", "hé"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    text: str = backend.to_str()
    return text


def metaspace_json() -> str:
    """The tokenizer of `sentence_piece_json`, with the Metaspace decoder."""
    described = json.loads(sentence_piece_json())
    described["decoder"] = json.loads(decoders.Metaspace().__getstate__())
    return json.dumps(described)


def plain_json() -> str:
    """No decoder at all: tokens are joined with spaces."""
    described = json.loads(word_piece_json())
    described["decoder"] = None
    return json.dumps(described)


KINDS = {
    "byte_level": byte_level_json,
    "llama2": sentence_piece_json,
    "gemma": lambda: sentence_piece_json(False),
    "metaspace": metaspace_json,
    "word_piece": word_piece_json,
    "plain": plain_json,
}


def write(directory: Path, backend_json: str, **config: Any) -> Path:
    """A checkpoint directory with tokenizer.json and tokenizer_config.json."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(backend_json)
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_chatml(directory: Path, **config: Any) -> Path:
    """The ChatML checkpoint of the benchmarks."""
    base = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    return write(directory, byte_level_json(), **(base | config))


def oracle(directory: Path) -> Any:
    """transformers' tokenizer of the same files."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
