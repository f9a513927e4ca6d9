"""Locates a model on disk or on the Hugging Face hub, and reads its JSON files as dictionaries.

`demo` is the model inside the package.  `resolve` interprets limits, dtype and end-of-sequence ids, `models/spec` the
architecture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokserve.base.errors import StartError
from tokserve.base.rooms import contributions
from tokserve.checkpoint import text_parts

DEMO_DIR = Path(__file__).parents[1] / "demo_model"
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
# reasons by class of the hub's errors; the first class of an error that is here counts
REASONS = {
    "GatedRepoError": "access to it must be granted first (HF_TOKEN)",
    "RepositoryNotFoundError": "there is no such repository, or it is private (HF_TOKEN)",
    "LocalEntryNotFoundError": "the hub cannot be reached, and the cache does not hold it",
    "OfflineModeIsEnabled": "the hub is switched off, and the cache does not hold it",
}
TEKKEN = "tekken.json"
CONVERT_TEKKEN = "transformers.integrations.mistral.convert_tekken_tokenizer converts it"
OLDER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")
NESTED = {  # architectures that read images; the attributes of the text model are in an object of their own
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Models in files whose header says what a checkpoint's JSON files say.

    `unpack`: makes a temporary directory of a header, which stands for the file and is deleted when this process ends.
    Of such a directory, `files` are those that it stands for, `name` is the file as it was named and the types of its
    matrices, `without_tokenizer` why it has no tokenizer; they return None for other directories.  `sources`: the
    import string of a function of the files that returns by name where each tensor lies, a `models.weights.Source`.
    """

    suffix: str
    unpack: Callable[[Path], Path]
    files: Callable[[Path], list[Path] | None]
    name: Callable[[Path], tuple[str, str] | None]
    without_tokenizer: Callable[[Path], str | None]
    sources: str


def model_files() -> Iterator[ModelFiles]:
    """The kinds of such files that can be read."""
    return (kind for _, kind in contributions("model_files"))


def locate(model: str, *, weights: bool = True, what: str = "model") -> Path:
    """The local directory of `model`; downloaded from the hub if it is a hub name.  `what`: its name in errors.  A file
    becomes a temporary directory with what its header says; the weights are read from the file."""
    if model == "demo":
        return DEMO_DIR
    path = Path(model).expanduser()
    if os.path.isdir(path):  # False for a directory without access and for a name that is too long
        return path
    for kind in model_files():
        if path.suffix == kind.suffix and os.path.isfile(path):
            return kind.unpack(path)
    if not _may_be_hub_name(model):
        raise StartError(
            f"{what} {model!r} is neither a directory, nor a GGUF file, nor 'demo', nor a hub name 'owner/name'"
        )
    return _download(model, [*TEXT_FILES, *(WEIGHT_FILES if weights else [])], what)


def locate_adapter(path: str) -> str:
    """The directory of an adapter; downloaded if `path` is a hub name and no directory.  Raises StartError."""
    if os.path.isdir(path) or not _may_be_hub_name(path):
        return path
    return str(_download(path, ADAPTER_FILES, "adapter"))


def _may_be_hub_name(name: str) -> bool:
    return not Path(name).is_absolute() and not name.startswith((".", "~")) and name.count("/") == 1


def single_file(model: str) -> tuple[str, str] | None:
    """The file that the directory of a located model stands for, and the types of its matrices; None: it is a
    checkpoint's own directory."""
    return next((name for kind in model_files() if (name := kind.name(Path(model))) is not None), None)


def given_name(model: str) -> str:
    """The name of a located model for people: of a GGUF file, the file's, not that of the directory made of it."""
    source = single_file(model)
    return model if source is None else source[0]


def without_tokenizer(directory: Path) -> str:
    """Why there is no tokenizer in a directory: it was made of a GGUF file that has none, or holds no file of one."""
    for kind in model_files():
        if reason := kind.without_tokenizer(directory):
            return reason
    if (directory / TEKKEN).is_file():
        return f"{directory} holds no tokenizer.json (only {TEKKEN}, which is not read: {CONVERT_TEKKEN})"
    older = next((name for name in OLDER_TOKENIZERS if (directory / name).is_file()), None)
    if older is None:
        return f"{directory} holds no tokenizer.json"
    return (
        f"{directory} holds no tokenizer.json (only {older}: transformers' AutoTokenizer reads that, and its "
        "save_pretrained writes the file)"
    )


def _download(model: str, patterns: list[str], what: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors; a bad name is a ValueError
        names = [kind.__name__ for kind in type(error).__mro__]
        reason = next((REASONS[name] for name in names if name in REASONS), names[0])
        raise StartError(
            f"{what} {model!r} is not a local directory and could not be fetched from the Hugging Face hub: {reason}"
        ) from error


def read_json(directory: Path, name: str, what: str = "model") -> dict[str, Any] | None:
    """The object in the file, or None if there is no file.  `what`: whose file it is, in errors."""
    value = read_any_json(directory, name, what)
    if value is not None and not isinstance(value, dict):
        raise StartError(f"{name} of the {what} is not a JSON object")
    return value


def read_any_json(directory: Path, name: str, what: str = "model") -> Any:
    """What the file holds, or None if there is no file.  `what`: as of `read_json`."""
    path = directory / name
    try:
        if not path.is_file():
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise StartError(f"{name} of the {what} cannot be read: {error}") from error


def hf_config(directory: Path) -> dict[str, Any]:
    value = read_json(directory, "config.json")
    if value is None:
        raise StartError(f"{directory} holds no config.json; is it a Hugging Face checkpoint?")
    return flat(value)


def flat(value: dict[str, Any]) -> dict[str, Any]:
    """The config of one of `NESTED` with the attributes of its text model beside those of the whole; of a model whose
    text part alone is served, that part's."""
    if (part := text_parts.text_part(value)) is not None:
        return part
    inner, names = value.get("text_config"), value.get("architectures")
    if not isinstance(inner, dict) or not isinstance(names, list) or not NESTED.intersection(map(str, names)):
        return value
    whole = {name: attribute for name, attribute in value.items() if name != "text_config"}
    tied = [config["tie_word_embeddings"] for config in (whole, inner) if "tie_word_embeddings" in config]
    return whole | inner | {"architectures": names} | ({"tie_word_embeddings": True in tied} if tied else {})
