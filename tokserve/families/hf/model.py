"""A transformers model that a runner serves: what `models.decoder.Decoder` is for families with a spec function.

The module's linear layers, layer norms and activations are replaced by ours, and its attention works on our pages
through transformers' attention interface.  All else it computes itself, with torch, so bits are not promised.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.checkpoint import text_parts
from tokserve.families.hf.config import configuration
from tokserve.families.hf.conversion import Conversions
from tokserve.families.hf.modules import (
    ACTIVATIONS,
    Context,
    ElementwiseActivation,
    Normalization,
    Projection,
    attend,
)
from tokserve.layers.batch import ForwardBatch
from tokserve.layers.linear import Linear
from tokserve.layers.norm import LayerNorm, NormSpec
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, StackedParameter, owned_copy
from tokserve.models import weights
from tokserve.models.config_reader import LAYERS, ConfigReader
from tokserve.models.decoder import Decoder, DecoderSpec
from tokserve.models.provenance import Provenance
from tokserve.protocol.kv_spec import KVSpec, dtype_name

INTERFACE = "tokserve_paged"
PROBE = ((3, 1, 2), (1, 3, 2))  # token ids that end alike


class TransformersModel(Decoder):
    """`hf`: config.json; `options`: of the projections; `head`: of the output head; `max_model_len`: of contexts, None:
    any.  Raises StartError."""

    def __init__(
        self, hf: Mapping[str, Any], options: LayerOptions, head: LayerOptions, *, max_model_len: int | None = None
    ) -> None:
        self._hf, self._head_options, self._max_model_len = hf, head, max_model_len
        self.options, self.dtype, self.float8_cache = options, options.dtype, False
        config, model_class = configuration(hf, max_model_len)
        ConfigReader({LAYERS: getattr(config.get_text_config(), LAYERS, None)}).integer(LAYERS, 1)
        self.context = Context(None, {})
        try:
            with no_init_weights(), torch.device("cpu"):
                self.module = model_class._from_config(
                    config, dtype=options.dtype, attn_implementation=INTERFACE, experts_implementation="eager"
                )
        except KeyError as error:
            why = f"transformers does not know {error}, which config.json names"
            if error.args[0] == INTERFACE:
                why = "its attention does not use transformers' attention interface"
            raise StartError(f"{model_class.__name__} cannot be served by --model-impl transformers: {why}") from None
        except (ImportError, TypeError, ValueError, AttributeError) as error:
            raise StartError(f"{model_class.__name__} cannot be served by --model-impl transformers: {error}") from None
        self.module.eval().requires_grad_(False)
        for one in self.module.modules():
            vars(one)["paged_context"] = self.context
        self._name = model_class.__name__
        self._ignored = [re.compile(one) for one in model_class._keys_to_ignore_on_load_unexpected or ()]
        self._tied = self._is_tied()
        self.hidden = int(config.get_text_config().hidden_size)
        names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        state = self.module.state_dict(keep_vars=True)
        self.buffers = {name: buffer for name, buffer in state.items() if name not in names}
        self._parameters: dict[str, Parameter] = {}
        self._stacked: dict[str, StackedParameter] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._linears: dict[str, Linear] = {}
        self._replace()
        prefix = self.module.base_model_prefix
        prefix = prefix if hasattr(self.module, prefix) else "model"
        self._body, self._stub = getattr(self.module, prefix), _Body()
        if "position_ids" not in inspect.signature(self._body.forward).parameters:
            raise StartError(f"{self._name} cannot be served by --model-impl transformers: it takes no position_ids")
        setattr(self.module, prefix, self._stub)
        self.module.to(ops.torch_device)
        self._body.to(ops.torch_device)
        self.spec = self._spec(prefix)
        self.blocks, self.numbers = [], range(0)
        self.provenance = Provenance()

    def _is_tied(self) -> bool:
        output, source = self.module.get_output_embeddings(), self.module.get_input_embeddings()
        if type(output) is not nn.Linear:
            raise StartError(f"{self._name}: its output head is no linear layer")
        return output.weight is source.weight or bool(self.module.config.get_text_config().tie_word_embeddings)

    def _spec(self, prefix: str) -> DecoderSpec:
        """Sizes and renames, no specs of blocks.  Checkpoints of the model without its head lack the prefix."""
        config = self.module.config.get_text_config()
        tops = sorted({name.split(".")[1] for name in self._parameters if name.startswith(f"{prefix}.")})
        return DecoderSpec(
            vocab=self._head.outputs,
            hidden=self.hidden,
            max_position=int(config.to_dict().get("max_position_embeddings") or 0),
            blocks=(),
            norm=NormSpec(1.0),
            tied=False,
            renames=text_parts.renames(self._hf) + tuple((f"{top}.", f"{prefix}.{top}.") for top in tops),
        )

    def _replace(self) -> None:
        """Put our layers into the module, and collect where each checkpoint tensor goes."""
        output = self.module.get_output_embeddings()
        embedding = self.module.get_input_embeddings()
        for path, one in list(self.module.named_modules()):
            parent = self.module.get_submodule(path.rpartition(".")[0])
            name = path.rpartition(".")[2]
            if type(one) in ACTIVATIONS:
                setattr(parent, name, ElementwiseActivation(ACTIVATIONS[type(one)]))
            elif type(one) is nn.LayerNorm and one.weight is not None:
                norm = LayerNorm(one.normalized_shape[0], _norm_spec(one), self.dtype)
                setattr(parent, name, Normalization(norm))
                self._parameters |= {f"{path}.{part}": parameter for part, parameter in norm.parameters().items()}
            elif type(one) is nn.Linear:
                self._replace_linear(parent, path, one, is_head=one is output)
            else:
                for part, _ in one.named_parameters(recurse=False):
                    self._parameters[f"{path}.{part}" if path else part] = _module_parameter(one, part)
        if self._tied:
            path = next(path for path, one in self.module.named_modules() if one is embedding)
            self._tie(f"{path}.weight")
            self._tie_others()

    def _replace_linear(self, parent: nn.Module, path: str, linear: nn.Linear, *, is_head: bool) -> None:
        name = path.rpartition(".")[2]
        options = self._head_options if is_head else self.options
        layer = Linear(linear.in_features, {name: linear.out_features}, options, bias=linear.bias is not None)
        setattr(parent, name, Projection(layer, self.context, torch.float32 if is_head else None))
        self._parameters |= {
            f"{path.rpartition('.')[0]}.{part}".lstrip("."): one for part, one in layer.parameters().items()
        }
        if is_head:
            self._head = layer
        else:
            self._linears[path] = layer

    def _tie_others(self) -> None:
        """Parameters that have another's values, beside the head's weight: a checkpoint holds the other."""
        ties = self.module._tied_weights_keys
        for name, source in ties.items() if isinstance(ties, Mapping) else ():
            if name in self._parameters and source in self._parameters and name != source:
                self._parameters[source] = _load_two(self._parameters[source], self._parameters.pop(name))

    def _tie(self, name: str) -> None:
        """The head has the embedding's weight, under the embedding's name."""
        head = next(path for path, one in self.module.named_modules() if vars(one).get("linear") is self._head)
        of_head = self._parameters.pop(f"{head}.weight")
        of_embedding = self._parameters[name]

        if of_head.shape != of_embedding.shape:
            raise StartError(f"{self._name}: its output head is tied to an embedding of another shape")
        self._parameters[name] = _load_two(of_embedding, of_head)
        self.tied_head_name = f"{head}.weight"

    exact = False
    implementation = "transformers"
    tied_head_name: str | None = None

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint's tensor is one that the family's module does not want."""
        return name == self.tied_head_name or any(one.search(name) for one in self._ignored)

    def adopt(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Arrange for the tensors of a checkpoint, with these names and shapes: what they are called in the module, and
        which of them are joined or split for it.  Raises StartError."""
        conversions, self._shapes = Conversions(self.module), dict(shapes)
        pairs, converted = [], {}
        for name, shape in shapes.items():
            target = weights.model_name(name, self.spec.renames)
            if target is None or target in self._parameters:
                continue
            renamed, pattern = conversions.target(target)
            if target in self.buffers:
                renamed = target
            elif pattern is not None:
                converted[target] = shape
            elif renamed in self._parameters or renamed in self.buffers:
                pairs.append((name, renamed))
            if renamed in self.buffers and self.buffers[renamed].is_floating_point():
                self._parameters[renamed] = _of_buffer(self.buffers.pop(renamed))
        for group in conversions.groups(converted, self._parameters):
            self._parameters = {name: one for name, one in self._parameters.items() if name not in group.targets}
            self._parameters |= group.parameters
            if len(group.targets) == 1:
                name, whole = next(iter(group.targets.items()))
                self._stacked[name] = StackedParameter(whole, tuple(group.parameters))
        self.spec = replace(self.spec, renames=(*pairs, *self.spec.renames))

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """Tensors that an update may have in place of those that are joined for them."""
        return dict(self._stacked)

    def probe(self) -> None:
        """Find out what each layer keeps, and that tokens meet in attention alone.  Raises StartError that says why.
        Attention answers zeros, so what comes out at a token must not depend on the tokens before it.  The positions
        that the module gives tokens by itself must be those that a batch gives them."""
        states = []
        tries = ((PROBE[0], None), *((ids, torch.arange(len(ids))) for ids in PROBE))
        for ids, positions in tries:
            self.context.calls.clear()
            try:
                states.append(self._run(torch.tensor([ids]), positions))
            except StartError as error:
                raise StartError(f"{self._name}: {error}") from None
            except KeyError as error:
                why = (
                    "its attention does not use transformers' attention interface"
                    if INTERFACE in str(error)
                    else f"it misses {error}"
                )
                raise StartError(f"{self._name} cannot be served by --model-impl transformers: {why}") from None
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise StartError(f"{self._name} cannot be served by --model-impl transformers: {error}") from None
        layers = int(self.module.config.get_text_config().num_hidden_layers)
        if sorted(self.context.calls) != list(range(layers)):
            raise StartError(
                f"{self._name} cannot be served by --model-impl transformers: {len(self.context.calls)} of {layers} "
                "layers use transformers' attention interface"
            )
        by_itself, first, second = states
        if not torch.allclose(first[-1], second[-1], atol=1e-5, rtol=1e-3):
            raise StartError(f"{self._name} cannot be served: tokens influence each other outside of attention")
        if not torch.allclose(by_itself, first, atol=1e-5, rtol=1e-3):
            raise StartError(
                f"{self._name} cannot be served by --model-impl transformers: it does not count positions from 0, but "
                "from its padding id"
            )
        self._check_windows(layers)

    def _check_windows(self, layers: int) -> None:
        """A window that the config has must have been handed to attention."""
        values = self.module.config.get_text_config().to_dict()
        types = values.get("layer_types") or ["full_attention"] * layers
        if not values.get("layer_types") and values.get("sliding_window") and values.get("use_sliding_window", True):
            types = ["sliding_attention"] * layers
        for layer, kind in enumerate(types):
            if kind == "sliding_attention" and not self.context.calls[layer].window:
                raise StartError(
                    f"{self._name}: the window of layer {layer} is not passed to transformers' attention interface"
                )

    def _run(self, ids: Tensor, positions: Tensor | None) -> Tensor:  # [1, T], [T] -> [T, hidden]
        """`positions` None: those that the module counts."""
        device = ops.torch_device
        position_ids = None if positions is None else positions.to(device)[None]
        out = self._body(input_ids=ids.to(device), position_ids=position_ids, use_cache=False, return_dict=True)
        return out.last_hidden_state[0]

    def forward(self, batch: ForwardBatch) -> Tensor:  # [T, hidden], or [n, hidden] of `batch.logits_rows`
        """Compute the batch's tokens, up to the final norm, and store their keys and values."""
        if batch.embeds is not None:
            raise ValueError("given embeddings are not supported by --model-impl transformers")
        self.context.batch = batch
        try:
            states = self._run(batch.input_ids[None], batch.positions)
        finally:
            self.context.batch = None
        return states if batch.logits_rows is None else states.index_select(0, batch.logits_rows.tokens)

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab] float32
        """What the module makes of hidden states after its body: the head, and all it does to logits."""
        self._stub.states = hidden[None]
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.module(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        return logits.float().contiguous()

    def blank(self) -> TransformersModel:
        blank = TransformersModel(self._hf, self.options, self._head_options, max_model_len=self._max_model_len)
        blank.adopt(self._shapes)
        for name, buffer in self.buffers.items():
            blank.buffers[name].copy_(buffer)
        blank.context.calls = dict(self.context.calls)
        return blank

    def kv_specs(self) -> tuple[KVSpec, ...]:
        dtype = dtype_name(self.dtype)
        calls = (self.context.calls[layer] for layer in sorted(self.context.calls))
        return tuple(KVSpec(call.kv_heads, call.dim, dtype, call.window) for call in calls)

    def kv_scales(self) -> list[tuple[float, float]]:
        """1, since there is no float8 cache."""
        return [(1.0, 1.0)] * len(self.context.calls)

    def parameters_by_name(self) -> dict[str, Parameter]:
        """Every tensor a checkpoint must have, under the name that the module has for it."""
        return dict(self._parameters)

    def named_linears(self) -> dict[str, Linear]:
        """The projections, by the module's names."""
        return dict(self._linears)

    def row_bytes(self) -> int:
        widest = max(linear.outputs for linear in self._linears.values())
        return 4 * (self.spec.vocab + 16 * (self.hidden + widest))


class _States(BaseModelOutputWithPast):
    """The last hidden state, and None for all else that a module may look for."""

    def __getattr__(self, name: str) -> None:
        return None


class _Body(nn.Module):
    """Takes the place of the module's body while logits are made: it answers what the body has computed."""

    states: Tensor

    def __getattr__(self, name: str) -> Any:
        return self  # some modules reach for a part of their body

    def forward(self, *args: Any, **kwargs: Any) -> _States:
        return _States(last_hidden_state=self.states)


def paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' attention interface; the module was given its model's context."""
    context: Context = vars(module)["paged_context"]
    return attend(context, module, query, key, value, attention_mask, options.pop("scaling", None), options), None


AttentionInterface.register(INTERFACE, paged)


def _norm_spec(norm: nn.LayerNorm) -> NormSpec:
    return NormSpec(norm.eps, kind="layer", bias=norm.bias is not None)


def _load_two(first: Parameter, second: Parameter) -> Parameter:

    def load(tensor: Tensor) -> None:
        first.load(tensor)
        second.load(tensor)

    return Parameter(first.shape, load, first.dtype)


def _module_parameter(module: nn.Module, name: str) -> Parameter:
    """Where a parameter that stays in the module comes from."""
    parameter: nn.Parameter = getattr(module, name)

    def load(tensor: Tensor) -> None:
        held: nn.Parameter = getattr(module, name)  # a module that has moved may have another one
        held.data = owned_copy(tensor, tuple(held.shape), held.dtype)

    return Parameter(tuple(parameter.shape), load, parameter.dtype)


def _of_buffer(buffer: Tensor) -> Parameter:
    """A buffer that a checkpoint has."""

    def load(tensor: Tensor) -> None:
        buffer.copy_(tensor)

    return Parameter(tuple(buffer.shape), load, buffer.dtype)
