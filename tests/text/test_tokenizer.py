"""Tokenizer: the same ids and text as transformers, exact bytes per token, clear start errors."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from tests.text.checkpoints import (
    CHATML,
    KINDS,
    TEXTS,
    byte_level_json,
    oracle,
    sentence_piece_json,
    write,
    write_chatml,
)
from tokserve.base.errors import RequestError, StartError
from tokserve.text.tokenizer import Tokenizer

TOKENIZERS = {name: Tokenizer(Backend.from_str(make())) for name, make in KINDS.items()}
DEMO = Path(__file__).parents[2] / "tokserve" / "demo_model"


def test_encode_and_decode_equal_transformers(tmp_path: Path) -> None:
    directory = write_chatml(tmp_path)
    tokenizer, reference = Tokenizer.load(directory), oracle(directory)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|> <tool_call>{}", "", " ", "\x00\u200b"]:
        for special in (False, True):
            assert tokenizer.encode(text, special) == reference.encode(text, add_special_tokens=special)
    ids = tokenizer.encode("<|im_start|>naïve 漢字<|im_end|>", False)
    for skip in (False, True):
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.bos_token is None
    assert tokenizer.special_tokens == reference.special_tokens_map
    assert tokenizer.special_ids == {tokenizer.id_of(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_if_tokenizer_json_says_so(tmp_path: Path, add_bos: bool) -> None:
    backend = Backend.from_str(byte_level_json())
    if add_bos:
        backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    directory = write_chatml(tmp_path, bos_token="<|endoftext|>", add_bos_token=True)
    (directory / "tokenizer.json").write_text(backend.to_str())
    tokenizer, reference = Tokenizer.load(directory), oracle(directory)
    assert tokenizer.encode("a b", True) == reference.encode("a b")
    assert (tokenizer.encode("a", True)[0] == 0) == add_bos
    assert tokenizer.encode("a b", False) == reference.encode("a b", add_special_tokens=False)


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    first = Backend.from_str(byte_level_json()).get_vocab_size()
    entry = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {
        str(first): {"content": "<extra>", "special": True, **entry},
        str(first + 1): {"content": "<plain>", "special": False, **entry},
    }
    directory = write_chatml(tmp_path, added_tokens_decoder=added, pad_token="<pad>")
    tokenizer, reference = Tokenizer.load(directory), oracle(directory)
    text = "a<extra>b<plain>c<pad>"
    assert tokenizer.encode(text, False) == reference.encode(text, add_special_tokens=False)
    assert first in tokenizer.special_ids and first + 1 not in tokenizer.special_ids
    assert tokenizer.id_of("<pad>") == first + 2 == reference.pad_token_id and first + 2 in tokenizer.special_ids
    assert tokenizer.class_name == "PreTrainedTokenizerFast"


def test_additional_special_tokens_may_be_texts_or_descriptions(tmp_path: Path) -> None:
    directory = write_chatml(tmp_path, additional_special_tokens=["<one>", {"content": "<two>"}])
    tokenizer = Tokenizer.load(directory)
    for text in ("<one>", "<two>"):
        assert (
            tokenizer.id_of(text) in tokenizer.special_ids
            and tokenizer.decode([tokenizer.id_of(text) or 0], True) == ""
        )


def test_special_tokens_map_of_older_checkpoints_is_read(tmp_path: Path) -> None:
    directory = write(tmp_path, byte_level_json(), eos_token="<|im_end|>")
    tokens = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|im_start|>", "lstrip": False}}
    (directory / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer, reference = Tokenizer.load(directory), oracle(directory)
    assert tokenizer.special_tokens == reference.special_tokens_map
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_start|>")


def test_templates_come_from_files_before_the_config(tmp_path: Path) -> None:
    directory = write_chatml(tmp_path)
    (directory / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(directory).chat_template == "from the file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert Tokenizer.load(directory).chat_template == {"default": "from the file", "tool_use": "with tools"}
    listed = write_chatml(tmp_path / "listed", chat_template=[{"name": "a", "template": "A"}])
    assert Tokenizer.load(listed).chat_template == {"a": "A"}
    older = write_chatml(tmp_path / "older", chat_template=None)
    (older / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert Tokenizer.load(older).chat_template == "of the processor"
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(StartError, match=r"chat template of .* cannot be read"):
        Tokenizer.load(directory)


def test_without_a_tokenizer_the_error_has_instructions(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--tokens-only"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        StartError, match=r"holds no tokenizer.json \(only vocab.json: transformers' AutoTokenizer reads"
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(StartError, match=r"only tekken.json, which is not read: .*convert_tekken_tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    with pytest.raises(StartError, match="unknown form"):
        Tokenizer.load(write(tmp_path / "x", byte_level_json(), added_tokens_decoder={"one": {}}))


def test_truncation_and_padding_of_the_file_are_off() -> None:
    backend = Backend.from_str(byte_level_json())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    assert len(Tokenizer(backend).encode("a b c d e f", False)) == len(TOKENIZERS["byte_level"].encode("a b c d e f"))


def test_bytes_of_tokens_byte_level() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the 漢🙂", False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "the 漢🙂".encode()
    split = tokenizer.encode("🚀", False)
    assert len(split) > 1 or tokenizer.token(split[0]) == "🚀"
    one_byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe6")
    assert tokenizer.token(one_byte) == "\ufffd"
    assert tokenizer.token_bytes(tokenizer.id_of("<|im_end|>") or 0) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.id_of("漢 word") or 0) == "漢 word".encode()


def test_bytes_of_tokens_sentence_piece() -> None:
    tokenizer = TOKENIZERS["llama2"]
    assert tokenizer.token(tokenizer.id_of("▁the") or 0) == " the"
    assert tokenizer.token_bytes(tokenizer.id_of("<0xE6>") or 0) == b"\xe6"
    assert tokenizer.token_bytes(tokenizer.id_of("<0x00>") or 0) == b"\x00"
    assert tokenizer.token_bytes(tokenizer.id_of("漢") or 0) == "漢".encode()
    assert tokenizer.id_of("<0x41>") in tokenizer.byte_ids
    assert tokenizer.id_of("a") not in tokenizer.byte_ids
    ids = tokenizer.encode("the win 🙂 é", False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " the win 🙂 é".encode()
    metaspace, words = TOKENIZERS["metaspace"], TOKENIZERS["word_piece"]
    assert metaspace.token(metaspace.id_of("▁the") or 0) == " the"
    assert words.token(words.id_of("hello") or 0) == "hello"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_outside_the_vocabulary_add_nothing(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    outside = tokenizer.vocab_size + 5
    assert tokenizer.token(outside) == "" and tokenizer.token_bytes(outside) == b""
    assert tokenizer.token_bytes(-1) == b"" and tokenizer.spelling(1 << 40) is None
    assert tokenizer.decode([outside], False) == ""
    for ids in (tokenizer.pieces(False), tokenizer.texts(final=True)):  # clients may choose any
        assert not ids[outside] and outside not in ids and -1 not in ids


def test_the_bytes_of_a_token_are_kept_once() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token = max(tokenizer.encode("the", False))
    assert tokenizer.pieces(True)[token] and tokenizer.pieces(True)[token] is tokenizer.pieces(False)[token]


def test_tokens_that_are_no_whole_character_share_a_text() -> None:
    texts = TOKENIZERS["byte_level"].texts(final=True)
    ids = [i for i in range(TOKENIZERS["byte_level"].vocab_size) if texts[i] == "\ufffd"]
    assert len(ids) > 100 and len({id(texts[i]) for i in ids}) == 1


def test_what_cannot_be_converted_is_the_requests_error() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        TOKENIZERS["byte_level"].encode("a\ud800")
    with pytest.raises(RequestError, match="token ids"):
        TOKENIZERS["byte_level"].decode([-1])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 440), max_size=20), st.booleans())
def test_bytes_of_tokens_joined_are_the_decoded_text(ids: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    joined = b"".join(tokenizer.pieces(skip)[i] for i in ids)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip)


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(Backend.from_str(sentence_piece_json()))
    wrong: list[str] = []

    def work() -> None:
        for _ in range(50):
            ids = tokenizer.encode("the win and a wing", False)
            if tokenizer.decode(ids) != "the win and a wing" or tokenizer.token(ids[0]) != " the":
                wrong.append("wrong")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_demo_model_equals_transformers() -> None:
    tokenizer, reference = Tokenizer.load(DEMO), oracle(DEMO)
    for text in [*TEXTS, "What is 47 + 38?", "Reverse: abc"]:
        ids = tokenizer.encode(text, True)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids, True) == reference.decode(ids, skip_special_tokens=True)
