"""A PEFT adapter directory to low-rank weights for a model's projections, or the reason why it does not fit.

Everything is checked before a weight is read: an option beyond plain LoRA is refused by name, and so is a tensor that
belongs to no projection or has another shape.  Nothing is unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError

from tokserve import checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.layers.low_rank import LowRank
from tokserve.models import weights
from tokserve.models.formats import FLOATS, is_finite
from tokserve.models.weights import Entry

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FIELD = "lora_path"
NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")
PLAIN = re.compile(r"[A-Za-z0-9_.]+")  # a pattern's key that means itself
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that go with another base weight
Sizes = Mapping[str, tuple[int, int]]  # of projections, by name: inputs, outputs
Positive = Annotated[int, Meta(ge=1)]


def is_adapter(directory: Path) -> bool:
    """Whether a directory is a PEFT adapter's, and no checkpoint's."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


class AdapterConfig(msgspec.Struct, frozen=True):
    """adapter_config.json as far as it matters; PEFT's names and defaults."""

    peft_type: str
    r: Positive
    lora_alpha: float
    use_rslora: bool | None = False
    use_dora: bool | None = False
    lora_bias: bool | None = False
    bias: str | None = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, Positive] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    layer_replication: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: bool | None = False
    use_bdlora: Any = None
    kasa_config: Any = None
    arrow_config: Any = None

    def check(self) -> None:
        """Refuse what is not plain LoRA."""
        if self.peft_type.upper() != "LORA":
            _refuse(f"peft_type must be LORA, got {self.peft_type!r}")
        if self.bias not in (None, "none"):
            _refuse(f"bias must be none, got {self.bias!r}")
        names = (
            "use_dora",
            "lora_bias",
            "modules_to_save",
            "layer_replication",
            "target_parameters",
            "trainable_token_indices",
            "alora_invocation_tokens",
            "use_qalora",
            "use_bdlora",
            "kasa_config",
            "arrow_config",
        )
        for name in names:
            if getattr(self, name):
                _refuse(f"{name} is not supported")
        if isinstance(self.init_lora_weights, str) and self.init_lora_weights.lower().startswith(CHANGE_BASE):
            _refuse(
                f"init_lora_weights {self.init_lora_weights!r} goes with a base model that was changed too; "
                "convert the adapter (PEFT: path_initial_model_for_weight_conversion)"
            )
        for name in ("rank_pattern", "alpha_pattern"):
            for key in getattr(self, name) or ():
                if not PLAIN.fullmatch(key):
                    _refuse(f"{name}: the key {key!r} is a regular expression; only names are supported")

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """What the product of a module's weights is multiplied with."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter(
    directory: Path, sizes: Sizes, renames: tuple[tuple[str, str], ...], max_rank: int
) -> dict[str, LowRank]:
    """Weights by projection.  Raises RequestError about `lora_path`."""
    try:
        config = _config(directory)
        tensors = pair_tensors(_catalogue(directory), renames, TENSORS)
        check_fit(tensors, config, sizes, max_rank, TENSORS)
        return {
            module: LowRank(weights.read_tensor(parts["A"]), weights.read_tensor(parts["B"]), config.scale(module))
            for module, parts in tensors.items()
        }
    except (StartError, OSError, SafetensorError) as error:
        _refuse(str(error))


def check_finite(adapter: Mapping[str, LowRank], dtype: torch.dtype) -> None:
    """Raise RequestError about `lora_path` for weights that are not finite in `dtype`, or whose scale makes them so."""
    tensors = {f"{module}.lora_A": low_rank.down for module, low_rank in adapter.items()}
    tensors |= {f"{module}.lora_B": low_rank.up for module, low_rank in adapter.items()}
    if names := sorted(name for name, tensor in tensors.items() if not is_finite(tensor, dtype)):
        error = weights.not_finite(names, dtype)
        error.field = FIELD
        raise error
    # a norm squares what a layer adds, in float32
    largest = min(torch.finfo(dtype).max, math.sqrt(torch.finfo(torch.float32).max))
    if modules := sorted(module for module, low_rank in adapter.items() if not _bound(low_rank) <= largest):
        raise RequestError(
            f"{CONFIG}: lora_alpha is too large: {weights.counted('overflowing products of scale, A and B', modules)} "
            "(--check-weights)",
            field=FIELD,
            code="weights_not_finite",
        )


def _bound(weights: LowRank) -> float:
    """No element of scale * up down is larger than this."""
    down, up = weights.down.abs().amax(1).double(), weights.up.abs().amax(0).double()
    return abs(weights.scale) * float(up @ down)


def _config(directory: Path) -> AdapterConfig:
    value = checkpoint.read_json(directory, CONFIG, "adapter")
    if value is None:
        _refuse(f"{directory} holds no {CONFIG}; is it a PEFT adapter?")
    return parse_config(value)


def parse_config(value: Any) -> AdapterConfig:
    """The content of adapter_config.json.  Raises RequestError about `lora_path`."""
    try:
        config = msgspec.convert(value, AdapterConfig)
        config.check()
    except (msgspec.ValidationError, RequestError) as error:
        _refuse(f"{CONFIG}: {error}")
    largest = torch.finfo(torch.float32).max
    if not all(abs(alpha) <= largest for alpha in (config.lora_alpha, *(config.alpha_pattern or {}).values())):
        _refuse(f"{CONFIG}: lora_alpha must be finite as a float32")
    return config


def _catalogue(directory: Path) -> dict[str, Entry]:
    if not (directory / TENSORS).is_file():
        _refuse(f"{directory} holds no {TENSORS}{weights.pickled(directory)}")
    return weights.headers(directory / TENSORS)


def pair_tensors(
    entries: Mapping[str, Entry], renames: tuple[tuple[str, str], ...], source: str, *, complete: bool = True
) -> dict[str, dict[str, Entry]]:
    """Module -> its A and B.  `source`: what has these tensors; `complete`: no others come.  Raises RequestError."""
    tensors: dict[str, dict[str, Entry]] = {}
    unknown, duplicates = [], []
    for name, entry in entries.items():
        match = NAME.fullmatch(name)
        if match is None:
            unknown.append(name)
            continue
        module = weights.model_name(match["module"], renames) or match["module"]
        if match["part"] in tensors.setdefault(module, {}):
            duplicates.append(name)
        tensors[module][match["part"]] = entry
    single = [f"{module}.lora_{part}" for module, parts in tensors.items() for part in {"A", "B"} - parts.keys()]
    problems = (
        ("no weight of a linear layer's adapter", unknown),
        ("twice", duplicates),
        ("missing", sorted(single) if complete else []),
    )
    listed = [weights.counted(kind, names) for kind, names in problems if names]
    if not entries:
        listed = ["there are none"]
    if listed:
        _refuse(f"the tensors of {source} are not those of a LoRA adapter: {'; '.join(listed)}")
    return tensors


def check_fit(
    tensors: Mapping[str, dict[str, Entry]], config: AdapterConfig, sizes: Sizes, max_rank: int, source: str
) -> None:
    """Refuse, in one list, what does not fit the model, the configuration or `max_rank`."""
    unknown = [module for module in tensors if module not in sizes]
    misshapen, mistyped = [], []
    for module, parts in tensors.items():
        if module not in sizes:
            continue
        inputs, outputs = sizes[module]
        rank = config.rank(module)
        if rank > max_rank:
            _refuse(f"the rank of {module} is {rank}, above --max-lora-rank {max_rank}")
        shapes = {"A": (rank, inputs), "B": (outputs, rank)}
        for part, entry in parts.items():
            if entry.shape != (shape := shapes[part]):
                misshapen.append(f"{entry.key} (expected {list(shape)}, found {list(entry.shape)})")
            if entry.dtype not in FLOATS.values():
                mistyped.append(f"{entry.key} ({entry.dtype})")
    problems = (
        ("for modules that adapters cannot change here", unknown),
        ("misshapen", misshapen),
        ("of an unsupported dtype", mistyped),
    )
    listed = [weights.counted(kind, names) for kind, names in problems if names]
    if listed:
        _refuse(f"the tensors of {source} do not fit the model: {'; '.join(listed)}")


def _by_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """PEFT's rule: the first key that is the end of the module's name, whole parts of it."""
    for key, value in (pattern or {}).items():
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, field=FIELD)
