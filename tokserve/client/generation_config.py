"""What a checkpoint's generation_config.json says of sampling, and the options that replace or override it.

Names are transformers'.  `max_new_tokens` is the default of `max_tokens`; of the operator (in the option, or in a
directory that it names) it is also the most output tokens of any request to a server, as in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokserve import checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.config import ModelConfig
from tokserve.protocol.params import SamplingParams

logger = logging.getLogger(__name__)

RECOMMENDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
    "max_tokens",
)
NAMES = {"max_new_tokens": "max_tokens"}  # of transformers, and here
KNOWN = tuple(name for name in RECOMMENDED if name != "max_tokens") + tuple(NAMES)
# entries that would change outputs, with the value of each that would not
NOT_FOLLOWED: Mapping[str, Any] = {
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "do_sample": True,
    "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
}


def generation_defaults(model: ModelConfig) -> SamplingParams:
    """The sampling parameters that the checkpoint's generation_config.json recommends, or the options.  Raises
    StartError."""
    values = _recommended(model) | _overrides(model)
    try:
        params = msgspec.convert(values, SamplingParams)
        params.validate()
    except (msgspec.ValidationError, RequestError) as error:
        place = "override_generation_config or " if model.override_generation_config else ""
        raise StartError(f"{place}generation_config.json of the model has a bad value: {error}") from None
    return params


def output_cap(model: ModelConfig) -> int | None:
    """The most output tokens that the operator allows any request of a server; None: as many as the context holds."""
    of_operator = model.generation_config not in ("auto", "none")
    return generation_defaults(
        model if of_operator else msgspec.structs.replace(model, generation_config="none")
    ).max_tokens


def capped(params: SamplingParams, cap: int | None) -> SamplingParams:
    """The parameters with no more output tokens than `cap`."""
    if cap is None or (params.max_tokens is not None and params.max_tokens <= cap):
        return params
    return msgspec.structs.replace(params, max_tokens=cap)


def log_what_is_not_followed(model: ModelConfig) -> None:
    """Say which entries would change outputs, and do not here."""
    entries = _read(model)
    names = [name for name, usual in NOT_FOLLOWED.items() if entries.get(name) not in (None, usual, [], {})]
    if entries.get("temperature") == 0 and "do_sample" in names:  # it is followed
        names.remove("do_sample")
    if names:
        logger.info("generation_config.json: these have no effect here: %s", ", ".join(names))


def _read(model: ModelConfig) -> dict[str, Any]:
    if model.generation_config == "none":
        return {}
    directory = Path(model.model if model.generation_config == "auto" else model.generation_config)
    if not directory.is_dir():
        raise StartError(f"option generation_config: {str(directory)!r} is not a directory")
    return checkpoint.read_json(directory, "generation_config.json") or {}


def _recommended(model: ModelConfig) -> dict[str, Any]:
    entries = _read(model)
    return {NAMES.get(name, name): entries[name] for name in KNOWN if entries.get(name) is not None}


def _overrides(model: ModelConfig) -> dict[str, Any]:
    values = model.override_generation_config or {}
    if unknown := values.keys() - set(KNOWN):
        raise StartError(f"option override_generation_config: {min(unknown)} is not one of {', '.join(KNOWN)}")
    return {NAMES.get(name, name): value for name, value in values.items() if value is not None}
