"""Text to token ids and back, from a checkpoint's tokenizer.json, without torch or transformers.

The `tokenizers` library encodes and decodes; this file adds the special tokens and chat templates, which are spread
over several JSON files, and the exact bytes of a single token.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from string import ascii_letters
from typing import Any

import tokenizers

from tokserve import checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.text.token_texts import TokenTexts

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG = 1 << 12  # ids that take a millisecond to decode
SLACK = 4  # factor by which a normalizer may shorten a text
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ADDED_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class Pieces(dict[int, bytes]):
    """Token id to the bytes it adds to a text, filled on first use; ids outside the vocabulary add none, and are not
    kept, since clients choose them."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skip, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        pieces = self._tokenizer.pieces(skip_special_tokens=False)
        piece = self._tokenizer.token_bytes(token) if self is pieces else pieces[token]
        if self._tokenizer.spelling(token) is not None:
            self[token] = piece
        return piece


class Texts(dict[int, str]):
    """Token id to the text of its bytes alone, filled on first use.  Part of a character becomes U+FFFD, or nothing
    where it ends the token and `final` is False."""

    def __init__(self, pieces: Pieces, *, final: bool) -> None:
        super().__init__()
        self._pieces = pieces
        self._final = final

    def __missing__(self, token: int) -> str:
        text, _ = codecs.utf_8_decode(self._pieces[token], "replace", self._final)
        if token in self._pieces:
            self[token] = text = sys.intern(text)  # many are U+FFFD
        return text


class Tokenizer:
    """The tokenizer of a checkpoint.

    `special_tokens` maps `bos_token`, `eos_token` ... to their text, `special_ids` are the ids that
    `skip_special_tokens` leaves out, `chat_template` is a template, or several by name, or None.
    `class_name` is the tokenizer class that the checkpoint names, `source` where it was read from, for messages.
    `is_byte_level`: a text's bytes are exactly its tokens' bytes, one after the other.
    `byte_ids`: the tokens of vocabularies with byte fallback that stand for one byte.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        class_name: str | None = None,
        source: str = "the tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        self.class_name = class_name
        self.source = source
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._decoders = _flat_decoders(backend)
        kinds = [decoder["type"] for decoder in self._decoders]
        self.is_byte_level = kinds == ["ByteLevel"]
        self.byte_ids = _byte_tokens(backend) if "ByteFallback" in kinds else frozenset()
        self._pieces = {skip: Pieces(self, self.special_ids if skip else frozenset()) for skip in (False, True)}
        self._texts = {final: Texts(self._pieces[False], final=final) for final in (False, True)}

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read the files of a checkpoint directory.  Raises StartError."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise StartError(
                f"{checkpoint.without_tokenizer(directory)}; name another tokenizer with --tokenizer, "
                "or serve token ids without text with --tokens-only"
            )
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StartError(f"{path} cannot be read: {error}") from error
        config = checkpoint.read_json(directory, "tokenizer_config.json") or {}
        named = _named_tokens(config)
        if "added_tokens_decoder" not in config:  # older checkpoints keep the names in a separate file
            named |= _named_tokens(checkpoint.read_json(directory, "special_tokens_map.json") or {})
        try:
            _add_missing(backend, config, named)
            templates = _chat_templates(directory, config)
        except (LookupError, TypeError, ValueError) as error:
            raise StartError(f"tokenizer_config.json of {directory} has an unknown form: {error!r}") from error
        class_name = config.get("tokenizer_class")
        source = checkpoint.given_name(str(directory))
        return cls(backend, named, templates, class_name if isinstance(class_name, str) else None, source)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of the longest token: a text of more than n times so many bytes has more than n tokens.  Multiplied by
        `SLACK` where a normalizer may shorten the text."""
        added = {entry.content for entry in self._backend.get_added_tokens_decoder().values()}
        spelled = self._backend.get_vocab(with_added_tokens=False).keys() - added
        sizes = map(len, spelled if self.is_byte_level else map(str.encode, spelled))
        longest = max(max(sizes, default=1), max(map(len, map(str.encode, added)), default=1))
        return longest if self.is_byte_level and self._backend.normalizer is None else longest * SLACK

    def check_fits(self, text: str, context: int, field: str, min_bytes: int = 0) -> None:
        """Raise `RequestError` naming `field` for a text of over `min_bytes` that `context` tokens cannot have."""
        if 4 * len(text) <= max(context, min_bytes):  # a character has at most 4 bytes, and a token at least one
            return
        bound = max(min_bytes, context * self.bytes_per_token)
        size = len(text) if len(text) > bound else len(text.encode("utf-8", "surrogatepass"))
        if size > bound:
            raise RequestError(
                f"This model's maximum context length is {context} tokens (max_model_len), of at most "
                f"{self.bytes_per_token} bytes each: {field} may have at most {bound} bytes, and has at least {size}",
                field=field,
                code="context_length_exceeded",
            )

    def id_of(self, token: str) -> int | None:
        """The id of the token spelled `token` in the vocabulary."""
        return self._backend.token_to_id(token)

    def described(self) -> str:
        """The tokenizer.json, with the tokens that other files add."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.  Raises RequestError for invalid Unicode."""
        return self.encode_each([text], add_special_tokens)[0]

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each of several texts.  Raises RequestError for invalid Unicode."""
        return [one.ids for one in self._encoded(list(texts), add_special_tokens)]

    def _encoded(self, inputs: list[Any], add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        try:  # `encode` would hold the interpreter's lock, and take twice the time
            return self._backend.encode_batch_fast(inputs, add_special_tokens=add_special_tokens)
        except TypeError:
            raise RequestError("text must be valid Unicode, but it holds half of a surrogate pair") from None

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, and the place of each in it: of its first code point and of the one after its last.
        Special tokens that are added have (0, 0).  Raises RequestError for invalid Unicode."""
        try:
            encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            raise RequestError("text must be valid Unicode, but it holds half of a surrogate pair") from None
        return encoded.ids, encoded.offsets

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts, joined with special tokens as the tokenizer joins a pair, and the first position of
        the second type, -1 for none.  Raises RequestError."""
        (encoded,) = self._encoded([(first, second)])
        kinds: list[int] = encoded.type_ids
        return encoded.ids, kinds.index(1) if 1 in kinds else -1

    @cached_property
    def frame(self) -> tuple[int, int]:
        """How many special tokens stand before a text, and how many after it."""
        mask: list[int] = self._backend.encode("a").special_tokens_mask
        text = [index for index, special in enumerate(mask) if not special]
        return (text[0], len(mask) - text[-1] - 1) if text else (0, 0)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary add nothing.  Raises RequestError for negative ids."""
        try:
            if len(ids) > LONG:  # without the interpreter's lock
                return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise RequestError("token ids must be from 0 to 4294967295") from None
        return text

    @cached_property
    def context(self) -> list[int]:
        """A letter that outputs are decoded behind, as they continue a text; empty where that makes no difference.
        Decoders with words or leading spaces decode a token at the beginning of a text otherwise than inside."""
        if self.is_byte_level:
            return []
        ids = (self._backend.token_to_id(letter) for letter in ascii_letters)
        known = next((token for token in ids if token is not None and token not in self.added_ids), None)
        tokens = range(self.vocab_size) if known is None else (known,)
        return next(([token] for token in tokens if self.decode([token], True).isalnum()), [])

    def continuation(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text that `ids` add to a text: a leading space stays."""
        return self.decode([*self.context, *ids], skip_special_tokens)[len(self.decode(self.context)) :]

    def spelling(self, token: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`), None if there is no such id."""
        return self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None

    def token(self, token: int) -> str:
        """The text of one token inside a text; part of a character becomes U+FFFD."""
        return self._texts[True][token]

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of tokens at their places, special ones too."""
        return TokenTexts(self.pieces(skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to a text."""
        spelled = self.spelling(token)
        if spelled is None:
            return b""
        if self.is_byte_level:
            return _byte_level(spelled)
        piece = _sentence_piece(spelled, self._decoders)
        return self.decode([token], False).encode() if piece is None else piece

    def texts(self, *, final: bool) -> Texts:
        """The texts of tokens by id, special ones too; `final`: with U+FFFD for a character that a token begins."""
        return self._texts[final]

    def pieces(self, skip_special_tokens: bool) -> Pieces:
        """The bytes of tokens by id; special tokens have none if they are skipped."""
        return self._pieces[skip_special_tokens]


def _byte_tokens(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the byte-fallback tokens (`<0xE2>`), each one byte of a character."""
    ids = (backend.token_to_id(f"<0x{byte:{form}}>") for byte in range(256) for form in ("02X", "02x"))
    return frozenset(token for token in ids if token is not None)


def _flat_decoders(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the decoder, as in tokenizer.json, with sequences flattened."""
    if backend.decoder is None:
        return []
    described = json.loads(backend.decoder.__getstate__())
    steps = [described]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in step.get("decoders", [step])]
    return steps


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (GPT-2's table)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(spelled: str) -> bytes:
    """Bytes of a byte-level token; one with a character outside the alphabet (an added token) is literal text."""
    try:
        return bytes([_ALPHABET[char] for char in spelled])
    except KeyError:
        return spelled.encode()


def _sentence_piece(spelled: str, decoders: list[dict[str, Any]]) -> bytes | None:
    """Bytes of a SentencePiece-style token inside a text; None if a decoder step is of another kind."""
    fused = False
    byte: bytes | None = None
    for step in decoders:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                spelled = spelled.replace(pattern, content)
            case {"type": "Metaspace", "replacement": str(mark)}:
                spelled = spelled.replace(mark, " ")
            case {"type": "ByteFallback"}:
                match = _BYTE_TOKEN.fullmatch(spelled)
                byte = bytes.fromhex(match[1]) if match else None
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "stop": 0} if fused:
                pass  # affects only the beginning of the whole text
            case _:
                return None
    return None if not decoders else byte or spelled.encode()


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`NAMED_TOKENS`, which may be strings or objects with a content."""
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _add_missing(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that are in tokenizer_config.json but not in tokenizer.json, in the order of their ids."""
    known = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    added = config.get("added_tokens_decoder")
    entries = sorted((added if isinstance(added, dict) else {}).items(), key=lambda item: int(item[0]))
    missing = [
        tokenizers.AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in _ADDED_FLAGS})
        for _, entry in entries
        if entry["content"] not in known
    ]
    known |= {entry.content for entry in missing}
    unnamed = [*_texts(config.get("additional_special_tokens")), *_texts(config.get("extra_special_tokens"))]
    for text in dict.fromkeys([*named.values(), *unnamed]):
        if text not in known:
            missing.append(tokenizers.AddedToken(text, special=True, normalized=False))
    if missing:
        backend.add_tokens(missing)


def _texts(value: Any) -> list[str]:
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return [text for text in texts if isinstance(text, str)]


def _chat_templates(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The template files, or else tokenizer_config.json's template or list of named templates, or else that of
    chat_template.json, where older processors of images keep it."""
    templates: dict[str, str] = {}
    paths = [("default", directory / "chat_template.jinja")]
    paths += [(path.stem, path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    try:
        templates = {name: path.read_text(encoding="utf-8") for name, path in paths if path.is_file()}
    except (OSError, ValueError) as error:
        raise StartError(f"a chat template of {directory} cannot be read: {error}") from error
    value = config.get("chat_template")
    if not templates and not value:
        value = (checkpoint.read_json(directory, "chat_template.json") or {}).get("chat_template")
    if not templates and isinstance(value, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in value}
    elif not templates and isinstance(value, str):
        templates = {"default": value}
    return templates["default"] if list(templates) == ["default"] else templates or None
