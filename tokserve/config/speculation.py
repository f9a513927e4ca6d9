"""Options of speculation, and what they amount to (docs/speculation.md)."""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple

import msgspec

from tokserve.base.errors import StartError
from tokserve.config.common import NotNegative, Positive, about
from tokserve.protocol.params import DraftReport

# the first is the default
SPECULATION_METHODS = ("suffix", "ngram", "prediction", "draft_model", "self", "mtp", "eagle3", "none")
DRAWING = ("draft_model", "self", "mtp", "eagle3")  # methods by which the device draws drafts, where texts have none
WITH_MODEL = ("draft_model", "eagle3")  # methods with a checkpoint of their own
QUANTIZED = ("draft_model", "self")  # methods of which drafts may come from quantized weights
SELF_QUANTIZATIONS = ("int8", "int4")  # of the method self; the first is the default
_SPECULATION = ", ".join(SPECULATION_METHODS)
# keys of vLLM's that tune how drafts are found, how many, or how they are computed: that is adaptive here, so they
# change nothing, as results do not depend on it
SPECULATION_HINTS = (
    "prompt_lookup_max",
    "prompt_lookup_min",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification",
    "draft_sample_method",
    "attention_backend",
    "moe_backend",
    "disable_padded_drafter_batch",
    "max_model_len",
)
# and those of which one value is what is done here
_AS_HERE: dict[str, Any] = {
    "rejection_sample_method": "standard",
    "draft_tensor_parallel_size": 1,
    "parallel_drafting": False,
    "use_heterogeneous_vocab": False,
}
_OF_VLLM = {  # its names of methods
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    **{f"{family}_mtp": "mtp" for family in ("deepseek", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_next")},
}
_NO_MODEL = ("ngram", "[ngram]")  # its model of the method ngram, which has none
DEFAULT_DRAFTS, MAX_DRAFTS = 32, 128  # of a request in a step


class SpeculationPlan(NamedTuple):
    """What speculation does: its method, most drafts of a request in a step, and bytes of earlier outputs.

    `model`: where the draft model is; `quantization`: of the draft model, or of the method self.
    """

    method: str
    num_drafts: int
    history_bytes: int
    model: str | None = None
    quantization: str | None = None

    @property
    def draws(self) -> bool:
        """Whether the device draws drafts: with a draft model, a copy of the model, or its draft head."""
        return self.method in DRAWING


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculation: drafts of the next tokens that a step verifies (docs/speculation.md)."""

    speculative_config: Annotated[
        dict[str, Any] | None,
        about(
            'JSON object {"method": NAME, "num_speculative_tokens": N}: drafts come from what requests predict '
            "(prediction), also from their own text (ngram), also from earlier outputs (suffix, the default), also "
            'from a smaller model (draft_model, with "model": DIR), a quantized copy of the model (self, with '
            '"quantization": "int8" or "int4"), the draft head of its checkpoint (mtp) or one of another (eagle3, with '
            '"model": DIR), or nowhere (none). No result depends on it.'
        ),
    ] = None
    spec_method: Annotated[
        str | None, about("The same as method in speculative_config; or self-int8 or self-int4.")
    ] = None
    spec_model: Annotated[
        str | None,
        about(
            "The same as model in speculative_config: directory or hub name of what drafts, a smaller model with the "
            "same vocabulary or an EAGLE-3 head."
        ),
    ] = None
    spec_tokens: Annotated[
        Positive | None,
        about(
            "The same as num_speculative_tokens in speculative_config: most drafts of a request in a step; default: 32."
        ),
    ] = None
    speculative_history_bytes: Annotated[
        NotNegative,
        about(
            "Memory for earlier outputs that are drafts for later ones (suffixes K, M, G are understood); 0: none "
            "are kept."
        ),
    ] = 64 << 20
    per_request_spec_decode_metrics: Annotated[
        DraftReport,
        about(
            "What replies say about their drafts, as metrics.speculative_decoding: nothing, counts, or every step's "
            "too. A request's spec_decode_metrics overrides it."
        ),
    ] = "none"

    def resolved(self) -> SpeculationPlan:
        """What the options amount to.  Raises StartError for what is not served."""
        options = self._options()
        model, quantization = options.pop("model", None), options.pop("quantization", None)
        method = options.pop("method", None)
        if model in _NO_MODEL and method in (None, "ngram", *_OF_VLLM):
            model, method = None, "ngram"
        method = _OF_VLLM.get(method, method) if isinstance(method, str) else method
        method = method or (SPECULATION_METHODS[0] if model is None else "draft_model")
        if method not in SPECULATION_METHODS:
            raise StartError(
                f"option {self._source('method')}: there is no method {method!r}; methods are {_SPECULATION}"
            )
        if model is not None and not isinstance(model, str):
            raise StartError(f"option speculative_config: model must be a directory or a hub name, got {model!r}")
        if (method in WITH_MODEL) != (model is not None):
            raise StartError(
                f"option {self._source('method')}: the methods {' and '.join(WITH_MODEL)} need a model, and no other "
                f"takes one; got {method}"
            )
        if quantization is None and method == "self":
            quantization = SELF_QUANTIZATIONS[0]
        if quantization is not None and (method not in QUANTIZED or quantization not in SELF_QUANTIZATIONS):
            raise StartError(
                f"option {self._source('quantization')}: quantization is {' or '.join(SELF_QUANTIZATIONS)}, for the "
                f"methods {' and '.join(QUANTIZED)}; got {quantization!r} for {method}"
            )
        most = options.pop("num_speculative_tokens", None)
        most = DEFAULT_DRAFTS if most is None else most
        if type(most) is not int or not 1 <= most <= MAX_DRAFTS:
            raise StartError(
                f"option {self._source('num_speculative_tokens')}: num_speculative_tokens must be an integer from 1 "
                f"to {MAX_DRAFTS}, got {most!r}"
            )
        for name, value in _AS_HERE.items():
            if options.pop(name, None) not in (None, value):
                raise StartError(f"option speculative_config: {name} must be {json.dumps(value)}")
        unknown = [name for name in options if options[name] is not None and name not in SPECULATION_HINTS]
        if unknown:
            raise StartError(
                f"option speculative_config: unknown key {unknown[0]!r}; keys are method, model, quantization and "
                "num_speculative_tokens"
            )
        history = self.speculative_history_bytes if method in ("suffix", *DRAWING) else 0
        return SpeculationPlan(method, most, history, model, quantization)

    def _source(self, name: str) -> str:
        """The option that a value comes from, for errors."""
        flag = "spec_tokens" if name == "num_speculative_tokens" else "spec_method"
        is_a_flags = name not in (self.speculative_config or {}) and getattr(self, flag) is not None
        return flag if is_a_flags else "speculative_config"

    def _options(self) -> dict[str, Any]:
        """The object, with what the flags say."""
        options = dict(self.speculative_config or {})
        flags: dict[str, Any] = {
            "method": self.spec_method,
            "model": self.spec_model,
            "num_speculative_tokens": self.spec_tokens,
        }
        name, _, quantization = (self.spec_method or "").partition("-")
        if name == "self" and quantization:
            flags |= {"method": name, "quantization": quantization}
        for name, flag in flags.items():
            if flag is not None and options.setdefault(name, flag) != flag:
                conflict = f"{name} is {options[name]!r}, and {flag!r} by its own flag"
                raise StartError(f"option speculative_config: {conflict}")
        return options
