"""`exact`: the server's arithmetic under a transformers model, which stays the same module with the same parameters.

The backbone, the head and the causal model around them get a subclass of their own class, of the same name.  The
backbone's forward pass becomes the server's decoder over the backbone's parameters, the head's the server's product in
float32; all else (labels and loss, `logits_to_keep`, saving, peft, trainers) is transformers' code as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokserve.base.errors import StartError
from tokserve.models.decoder import DecoderSpec
from tokserve.models.provenance import EMBEDDING, HEAD
from tokserve.models.registry import ARCHITECTURES
from tokserve.ops.devices import DEVICES
from tokserve.protocol.kv_spec import dtype_name
from tokserve.train.compilation import uncompiled
from tokserve.train.layers import projections
from tokserve.train.padding import packed_positions, unpad
from tokserve.train.requests import Mask, Params, checked
from tokserve.train.served import PREFIX, ServedDecoder, ServedOptions
from tokserve.train.support import trainable_spec

# what is refused unless it is None or False; transformers before 5.24 calls the cache past_key_values
NOT_SUPPORTED = (
    "cache",
    "past_key_values",
    "inputs_embeds",
    "use_cache",
    "output_attentions",
    "output_router_logits",
)
DEFAULTS = ("is_causal",)  # what is so anyway if it is true
# what is used, belongs to the loss, or says again what other arguments say
WITHOUT_EFFECT = (
    "output_hidden_states",
    "return_dict",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
    "shift_labels",
    "ignore_index",
    "cache_position",
    "logits_to_keep",  # which the caller reads, too
)
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Model = TypeVar("Model", bound=nn.Module)


def exact(
    model: Model,
    *,
    dtype: str | torch.dtype | None = None,
    head_dtype: str = "auto",
    max_model_len: int | None = None,
    cpu_arithmetic: str = "auto",
    cpu_kernels: str | None = None,
    ops: dict[str, str] | None = None,
    share_prefixes: bool = True,
    max_tokens: int = 4096,
    activation_bytes: int | None = None,
) -> Model:
    """Give a transformers causal model, or peft's model of one, the server's arithmetic; returns it.

    `model(input_ids, attention_mask).logits` are then float32, and at every token the logits of a server with these
    weights, to the bit; `selective_logprobs` makes the server's logprobs of them.  Gradients arrive at the model's
    parameters.  What a batch holds at padding are zeros' logits.

    `dtype`: of the server, by default the model's.  Parameters may be wider: they are rounded as the server rounds what
    it is sent.  `head_dtype`, `cpu_arithmetic` and so on: the server's options, with the server's values.
    `share_prefixes`: prefixes that rows have in common are computed once.  `activation_bytes`: what a forward pass may
    keep for the backward pass, by default all; with the model's gradient checkpointing on, one hidden state a layer.
    It computes where the parameters are: on the CPU, or on the process's current GPU; move the model first.

    A model that is exact already gets these options instead.  Raises TypeError for what is no transformers causal model
    with whole tensors of floats on one device, and ValueError for an architecture or a setting that the server has not.
    """
    causal = _causal(model)
    name = _dtype_of(causal) if dtype is None else dtype_name(dtype)
    if name not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {name}")
    options = ServedOptions(
        dtype=name,
        head_dtype=head_dtype,
        max_model_len=max_model_len,
        cpu_arithmetic=cpu_arithmetic,
        cpu_kernels=cpu_kernels,
        ops=ops,
        max_tokens=max_tokens,
        activation_bytes=activation_bytes,
        share_prefixes=share_prefixes,
        device=_device_of(causal),
    )
    base, head = _backbone(causal), causal.get_submodule("lm_head")
    if type(head) is not nn.Linear and not isinstance(head, _ExactHead):
        raise TypeError(f"lm_head is a {type(head).__qualname__}: only a plain one is supported")
    try:
        served = ServedDecoder(_spec(causal, options.kind), options)
    except StartError as error:
        raise ValueError(str(error)) from error
    served.collect(base)
    replaced: list[tuple[Any, type]] = [(causal, _ExactCausalLM), (base, _ExactBackbone), (head, _ExactHead)]
    for module, methods in replaced:
        if not isinstance(module, methods):
            kind: Any = type(module)
            module.__class__ = _subclass(kind, methods)
        vars(module)["_served"] = served
    return model


def _causal(model: nn.Module) -> Any:
    """The transformers model, within peft's if it is one.  Raises TypeError, ValueError."""
    causal: Any = model
    if type(model).__module__.split(".")[0] == "peft" and hasattr(model, "get_base_model"):
        causal = causal.get_base_model()
    if not all(hasattr(causal, name) for name in ("config", "save_pretrained", "parameters")):
        raise TypeError(f"a transformers causal language model is needed, got {type(model).__qualname__}")
    name = type(causal).__name__
    if name not in ARCHITECTURES or not hasattr(causal, "lm_head") or _backbone(causal) is causal:
        raise ValueError(f"architecture {name} is not supported; supported are: {', '.join(ARCHITECTURES)}")
    config: dict[str, Any] = causal.config.to_dict()
    if config.get("quantization_config"):
        raise ValueError("the model is quantized; quantized weights have no useful gradient here")
    if config.get("output_router_logits"):
        raise ValueError("config.output_router_logits is set; an exact model returns none: set it to False")
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"):
        if config.get(name):
            raise ValueError(f"config.{name} is {config[name]}; the server drops nothing out: set it to 0.0")
    return causal


def _backbone(causal: Any) -> nn.Module:
    """All of the model but its head."""
    base: nn.Module = causal.base_model
    return base.get_submodule("decoder") if hasattr(base, "decoder") else base  # OPT's


def _device_of(causal: Any) -> str:
    """Where the model computes: the CPU, if its parameters are on nothing else that computes."""
    device: torch.device = causal.get_input_embeddings().weight.device
    return str(device) if device.type in DEVICES else "cpu"


def _dtype_of(causal: Any) -> str:
    weight = causal.get_input_embeddings().weight
    if weight.dtype not in DTYPES:
        raise TypeError(f"the model's weights are {weight.dtype}; give dtype and weights of a float type")
    return DTYPES[weight.dtype]


def _spec(causal: Any, device: str) -> DecoderSpec:
    config = causal.config.to_dict() | {"architectures": [type(causal).__name__]}
    spec = trainable_spec(config)
    base, head = _backbone(causal), causal.get_submodule("lm_head").weight
    tied = head is projections.collect(base, [EMBEDDING], PREFIX, head.device, spec.renames).masters[EMBEDDING]
    if tied != spec.tied:
        spec = trainable_spec(config | {"tie_word_embeddings": tied})
    if spec.logits_multiplier != 1.0 or spec.logits_softcap:
        raise ValueError(
            f"{type(causal).__name__} scales or caps logits after its head, where an exact model cannot: "
            "train a tokserve.train.PolicyModel"
        )
    return spec


class _ExactModule(nn.Module):
    """A module whose class was replaced by a subclass, which copies and pickles as the class and what it adds."""

    _served: ServedDecoder

    def __reduce_ex__(self, protocol: Any) -> Any:
        classes = type(self).__mro__
        original = next(kind for kind in classes[1:] if not issubclass(kind, _ExactModule))
        methods = next(kind for kind in classes if kind in (_ExactBackbone, _ExactHead, _ExactCausalLM))
        return _blank, (original, methods), vars(self)


class _ExactBackbone(_ExactModule):
    @uncompiled
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' output of hidden states [B, L, H], zeros at padding."""
        arguments = {"cache": cache, "inputs_embeds": inputs_embeds, "use_cache": use_cache, **kwargs}
        _refuse_unsupported(arguments)
        if input_ids is None:
            raise ValueError("input_ids are needed")
        position_ids = packed_positions(
            tuple(input_ids.shape),
            position_ids,
            kwargs.get("cu_seq_lens_q"),
            kwargs.get("cu_seq_lens_k"),
            masked=attention_mask is not None,
        )
        config: Any = self.config
        streams = arguments.get("output_hidden_states")
        streams = bool(config.output_hidden_states if streams is None else streams)
        served = self._served
        with torch.autocast(input_ids.device.type, enabled=False):
            weights = served.collect(self)
            served.sync(weights)
            modules = served.modules
            batch = unpad(input_ids, attention_mask, position_ids, vocab=modules.vocab, positions=modules.num_positions)
            whole, before = served.hidden(
                weights.masters, batch, input_ids.numel(), recompute=_checkpoints(self), streams=streams
            )
        last, *states = (part.view(*input_ids.shape, part.shape[-1]) for part in (whole, *before))
        out = _output_type()(last_hidden_state=last, hidden_states=(*states, last) if streams else None)
        vars(out)["cross_attentions"] = None  # which GPT-2 reads
        return out.to_tuple() if arguments.get("return_dict") is False else out


@functools.cache
def _output_type() -> Any:
    """transformers' output of models with experts, with what Gemma 4's head passes on, too."""
    parent: Any = import_module("transformers.modeling_outputs").MoeModelOutputWithPast
    fields = [("shared_kv_states", Any, field(default=None))]
    return make_dataclass(parent.__name__, fields, bases=(parent,))


class _ExactHead(_ExactModule):
    weight: nn.Parameter

    @uncompiled
    def forward(self, hidden: Tensor) -> Tensor:
        """Logits float32 [..., V] of hidden states [..., H]."""
        served = self._served
        with torch.autocast(hidden.device.type, enabled=False):
            weight = projections.parameter(self, "lm_head", "weight", served.device)
            served.sync_head(weight)
            flat = served.logits(hidden.reshape(-1, hidden.shape[-1]), weight)
        return flat.view(*hidden.shape[:-1], flat.shape[-1])


class _ExactCausalLM(_ExactModule):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, without a cache: every step computes the whole sequences again."""
        parent: Any = super()
        return parent.generate(*args, **kwargs | {"use_cache": False})

    @uncompiled
    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        temperature: float | Sequence[float] = 1.0,
        logprobs_mode: str = "raw",
        sampling_masks: Sequence[Sequence[Mask] | None] | None = None,
        sampling_params: Params | None = None,
    ) -> list[Tensor]:
        """Logprobs as `PolicyModel.logprobs` gives them: of lists of ids, without padding, and without logits of what
        is not scored."""
        base, served = _backbone(self), self._served
        requests = checked(
            sequences,
            starts,
            temperature,
            logprobs_mode,
            sampling_masks,
            sampling_params,
            vocab=served.modules.vocab,
            positions=served.modules.num_positions,
        )
        with torch.autocast(served.device.type, enabled=False):
            weights = served.collect(base)
            if served.modules.head_name == HEAD:
                head = _exact_head(self)
                weights.masters[HEAD] = projections.parameter(head, "lm_head", "weight", served.device)
            served.sync(weights)
            return served.rows(weights.masters, requests, mode=logprobs_mode, recompute=_checkpoints(base))


def _refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Refuse what would change the result, or is unknown.  Raises ValueError."""
    for name, value in arguments.items():
        is_absent = value is None or (value is False and name in NOT_SUPPORTED) or (value is True and name in DEFAULTS)
        if not is_absent and name not in WITHOUT_EFFECT:
            reason = "it computes whole sequences of ids" if name in NOT_SUPPORTED else "it would have no effect"
            raise ValueError(f"{name} is not supported by an exact model: {reason}")


def _exact_head(causal: nn.Module) -> nn.Module:
    """The head, if it still is the one that `exact` found.  Raises TypeError."""
    head = causal.get_submodule("lm_head")
    if not isinstance(head, _ExactHead):
        raise TypeError(f"lm_head is a {type(head).__qualname__} now; call exact again, or leave the head as it was")
    return head


def _checkpoints(base: nn.Module) -> bool:
    return base.training and any(
        hasattr(module, "gradient_checkpointing") and module.gradient_checkpointing for module in base.modules()
    )


@functools.cache
def _subclass(kind: type, methods: type) -> type:
    """A class like `kind` in name and module, whose methods are those of `methods` first."""
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if methods is _ExactCausalLM:
        members["forward"] = _with_exact_head(kind.forward)  # type: ignore[attr-defined]
    return type(kind.__name__, (methods, kind), members)


def _with_exact_head(forward: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled
    @functools.wraps(forward)  # trainers read the signature
    def checked_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _exact_head(self)
        return forward(self, *args, **kwargs)

    return checked_forward


def _blank(kind: type, methods: type) -> Any:
    cls: Any = _subclass(kind, methods)
    return cls.__new__(cls)
