"""The vocabulary in a GGUF header, as a tokenizer.json.

A "gpt2" vocabulary is byte-level BPE with its merges; how text is cut before that has a name, which ggml's source
defines.  A "llama" vocabulary is SentencePiece's BPE, whose merges follow from the pieces and their scores.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from tokserve.families.gguf.header import GgufHeader

logger = logging.getLogger(__name__)

TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"
CONTROL, USER_DEFINED = 3, 4  # token types
MAX_PIECE = 64  # characters of a piece whose merges are derived: longer ones are runs of one character
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTIONS
    + r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTIONS
    + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "default": GPT2_SPLIT,
    "gpt-2": GPT2_SPLIT,
    "mpt": GPT2_SPLIT,
    "olmo": GPT2_SPLIT,
    "qwen2": WORDS + r"\p{N}" + REST,
    "deepseek-r1-qwen": WORDS + r"\p{N}" + REST,
    "stablelm2": WORDS + r"\p{N}" + REST,
    "llama-bpe": WORDS + r"\p{N}{1,3}" + REST,
    "llama3": WORDS + r"\p{N}{1,3}" + REST,
    "llama-v3": WORDS + r"\p{N}{1,3}" + REST,
    "falcon3": WORDS + r"\p{N}{1,3}" + REST,
    "smaug-bpe": WORDS + r"\p{N}{1,3}" + REST,
    "dbrx": WORDS + r"\p{N}{1,3}" + REST,
    "gpt-4o": GPT4O_SPLIT,
    "tekken": LETTERS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")  # then as GPT-2
BEGINS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "tekken")  # begin with BOS unless told otherwise
# of these, a word that is a token is not cut first
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "gpt-4o")
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is normalized to NFC


class Unsupported(Exception):
    """The header's vocabulary cannot be converted; the message says why."""


def convert(header: GgufHeader) -> tuple[str, dict[str, Any]]:
    """tokenizer.json, and the entries of tokenizer_config.json.  Raises Unsupported."""
    metadata = header.metadata
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise Unsupported("the file holds no vocabulary")
    if model not in ("gpt2", "llama"):
        raise Unsupported(f"its tokenizer is of the kind {model!r}; gpt2 and llama are supported")
    try:
        if model == "gpt2":
            backend = _byte_level(metadata, tokens)
        else:
            backend = _sentencepiece(metadata, tokens, gemma=header.architecture.startswith("gemma"))
        _add_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
        named = _named(metadata, tokens)
        _add_template(backend, metadata, named, model)
        text = backend.to_str()
    except (ValueError, TypeError, LookupError) as error:
        raise Unsupported(f"its vocabulary is not consistent: {error}") from error
    settings: dict[str, Any] = dict(named) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    templates = _templates(metadata)
    if list(templates) == ["default"]:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    if model == "gpt2" and "tokenizer.ggml.pre" not in metadata:
        logger.warning(
            "%s does not say how its tokenizer cuts text into words (tokenizer.ggml.pre): GPT-2's way is assumed; if "
            "the model was trained with another, its outputs are worse: convert it anew, or give --tokenizer",
            ", ".join(str(file) for file in header.files) or "the GGUF file",
        )
    return text, settings


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name."""
    templates = {"default": metadata.get(TEMPLATE)}
    templates |= {
        key.removeprefix(f"{TEMPLATE}."): value for key, value in metadata.items() if key.startswith(f"{TEMPLATE}.")
    }
    return {name: source for name, source in templates.items() if isinstance(source, str)}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=name in WHOLE_WORDS))
    if name in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name in SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        raise Unsupported(f"its pre-tokenizer {name!r} is not supported")
    if name in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], *, gemma: bool) -> tokenizers.Tokenizer:
    # Gemma's files spell pieces of spaces as spaces, and the order of its merges is that of the pieces
    spelled = [SPACE * len(token) if gemma and token and not token.strip(" ") else token for token in tokens]
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens) and not gemma:
        raise Unsupported("the file has no score for each token")
    ranks = [-float(number) for number in range(len(tokens))] if gemma else scores
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(spelled)},
            _merges(spelled, ranks),
            fuse_unk=True,
            byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    replaced = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if prefix else replaced
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(tokens: Sequence[str], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the best third first."""
    numbers = {token: number for number, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, number in numbers.items():
        if 2 <= len(token) <= MAX_PIECE:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in numbers and right in numbers:
                    ranked.append((-ranks[number], numbers[left], numbers[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        # Gemma's pieces of spaces are in the model as it spells them; under this spelling they would get new ids
        if kind in (CONTROL, USER_DEFINED) and backend.token_to_id(token) is not None
    ]
    backend.add_tokens(added)


def _named(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token] for name, token in ids.items() if isinstance(token, int)}


def _add_template(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], named: Mapping[str, str], model: str
) -> None:
    """Have BOS added before a text, and EOS after it, if the header says so."""
    begins = metadata.get("tokenizer.ggml.add_bos_token")
    if begins is None:
        begins = model == "llama" or metadata.get("tokenizer.ggml.pre") in BEGINS
    first = [named["bos_token"]] if begins and "bos_token" in named else []
    last = [named["eos_token"]] if metadata.get("tokenizer.ggml.add_eos_token") and "eos_token" in named else []
    if first or last:
        special = [(token, backend.token_to_id(token)) for token in {*first, *last}]
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B", *last], special_tokens=special
        )
