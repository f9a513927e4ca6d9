"""A checkpoint as a module whose logprobs are the server's, with gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tokserve import checkpoint
from tokserve.base.errors import StartError
from tokserve.models import dummy, load, weights
from tokserve.models.decoder import Decoder
from tokserve.models.formats import FLOATS
from tokserve.models.provenance import EMBEDDING, HEAD
from tokserve.train import adapters, scoring
from tokserve.train.adapters import TrainedAdapter
from tokserve.train.binding import Binding
from tokserve.train.compilation import uncompiled
from tokserve.train.layers.modules import DecoderModules
from tokserve.train.requests import Masks, Params, checked
from tokserve.train.support import trainable_spec

MAX_TOKENS = 4096  # of a batch that goes through the model at once
ACTIVATIONS = 5 << 27  # elements that are kept for the backward pass of a call by default


class ColumnsOfTurn(Protocol):
    """The tokens of a turn, and the ids from which each was drawn, if these are known."""

    @property
    def token_ids(self) -> Any:
        """int32 [tokens]."""

    @property
    def sampling_mask(self) -> Any:
        """A list by token, or None."""


class TurnOfTree(Protocol):
    """A turn of a session: a prompt, and what was sampled."""

    @property
    def prompt_ids(self) -> Any:
        """The whole prompt, int32 [prompt]."""

    @property
    def tokens(self) -> ColumnsOfTurn:
        """What was sampled."""


class PolicyModel(nn.Module):
    """A decoder with float32 master weights under their Hugging Face names, a tied one once.

    The forward pass is the server's: masters are rounded to the model's dtype and packed as a server packs them when it
    is given these weights, and the same ops run on them.  Gradients arrive at the masters.

    Memory beside masters, their gradients and the packed copy: for the backward pass up to `activation_bytes` in a
    call (default: 1.25 GiB in 16 bits, 2.5 in float32), and one hidden state per token and layer where that does not
    suffice (the layer is computed again then); the work of one layer for `max_tokens` tokens, or for the longest
    sequence; pieces of 256 MiB of logits.

    `ordered_gradients`: sequences go through the model one by one, and each adds its gradient to the masters' `grad` in
    the order of the call, so that the sum has the same bits however the sequences are cut into calls, each followed by
    its own `backward`.  Slower; of one process, without hooks of DDP or FSDP.

    `max_tokens`: tokens that go through the model together.
    """

    def __init__(
        self,
        decoder: Decoder,
        masters: dict[str, Tensor],
        config: dict[str, Any],
        binding: Binding,
        *,
        max_tokens: int = MAX_TOKENS,
        activation_bytes: int | None = None,
        ordered_gradients: bool = False,
    ) -> None:
        super().__init__()
        self._modules_of_decoder = DecoderModules(decoder, binding)
        for name, master in masters.items():
            trained = name not in self._modules_of_decoder.constants
            _register(self, name, nn.Parameter(master, requires_grad=trained))
        self.config = config
        self.max_tokens = max_tokens
        self.activation_bytes = ACTIVATIONS * decoder.dtype.itemsize if activation_bytes is None else activation_bytes
        self.ordered_gradients = ordered_gradients
        self._binding = binding
        self._stale = True
        self._adapter: TrainedAdapter | None = None
        self._names = tuple(masters)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        dtype: str = "bfloat16",
        *,
        device: str = "cpu",
        head_dtype: str = "auto",
        load_format: str = "auto",
        seed: int = 0,
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_tokens: int = MAX_TOKENS,
        activation_bytes: int | None = None,
        ordered_gradients: bool = False,
        cpu_arithmetic: str = "auto",
        cpu_kernels: str | None = None,
        ops: dict[str, str] | None = None,
    ) -> PolicyModel:
        """Load a checkpoint directory, "demo" or a hub name.  Raises StartError.

        `dtype`, `head_dtype`, `cpu_arithmetic` and so on are the server's options and must have the server's values.
        `device`: "cpu", or "cuda" for the process's current GPU, where masters are kept as well.
        `load_format` "dummy" draws weights from `seed`, as the server does.
        """
        if quantization not in (None, "none"):
            raise StartError(f"quantization {quantization!r} cannot be trained; a policy keeps its weights in {dtype}")
        binding = Binding(dtype, ops, cpu_arithmetic, cpu_kernels, device)
        source = checkpoint.locate(str(directory), weights=load_format != "dummy")
        config = checkpoint.hf_config(source)
        trainable_spec(config)
        decoder = load.load_decoder(
            source,
            config,
            dtype=dtype,
            head_dtype=head_dtype,
            load_format=load_format,
            seed=seed,
            max_model_len=max_model_len,
            quantization="none",
        )
        if load_format == "dummy":
            drawn = dummy.tensors(decoder.parameters_by_name(), seed)
        else:
            drawn = _masters(source, decoder)
        masters = {name: master.to(binding.device) for name, master in drawn}
        return cls(
            decoder,
            masters,
            config,
            binding,
            max_tokens=max_tokens,
            activation_bytes=activation_bytes,
            ordered_gradients=ordered_gradients,
        )

    @property
    def cpu_arithmetic(self) -> str | None:
        return self._binding.arithmetic

    def weights_changed(self) -> None:
        """Round and pack all masters again at the next call."""
        self._stale = True

    def add_adapter(
        self, targets: Sequence[str], *, rank: int = 16, alpha: float = 32.0, use_rslora: bool = False, seed: int = 0
    ) -> None:
        """Train a new LoRA adapter on projections (`q_proj`, ...) instead of the masters, which are frozen.  The policy
        is then what a server computes that serves the adapter which `save_adapter` writes."""
        sizes = self._modules_of_decoder.sizes()
        self._adapt(adapters.drawn(sizes, targets, rank, alpha, use_rslora=use_rslora, seed=seed))

    def load_adapter(self, directory: str | Path) -> None:
        """Likewise an adapter from a PEFT directory.  Raises RequestError."""
        modules = self._modules_of_decoder
        self._adapt(adapters.read_adapter(Path(directory), modules.sizes(), modules.renames))

    def _adapt(self, adapter: TrainedAdapter) -> None:
        if self._adapter is not None:
            raise ValueError("the policy has an adapter already")
        self.requires_grad_(False)
        device = self.get_parameter(EMBEDDING).device
        for name, factor in adapter.factors.items():
            _register(self, name, nn.Parameter(factor.to(device)))
        self._modules_of_decoder.adapt(adapter.scales, adapter.rank)
        self._adapter = adapter

    def save_adapter(self, directory: str | Path) -> None:
        """Write the adapter as a PEFT directory, which `load_lora_adapter` of a server takes.  Raises ValueError."""
        if self._adapter is None:
            raise ValueError("the policy has no adapter")
        adapters.write_adapter(Path(directory), self._adapter, dict(self.named_parameters()))

    def adapter_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The adapter_config.json and the tensors of the adapter, as `push_adapter` takes them.  Raises ValueError."""
        if self._adapter is None:
            raise ValueError("the policy has no adapter")
        return self._adapter.config, adapters.tensors_of(self._adapter, dict(self.named_parameters()))

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Leave the adapter out within the block: the policy that training began with, as a reference."""
        modules = self._modules_of_decoder
        before, modules.adapted = modules.adapted, False
        try:
            yield
        finally:
            modules.adapted = before

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Do what `logprobs` does, for wrappers that call the module."""
        return self.logprobs(*args, **kwargs)

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        temperature: float | Sequence[float] = 1.0,
        logprobs_mode: str = "raw",
        sampling_masks: Sequence[Masks | None] | None = None,
        share_prefixes: bool = True,
        sampling_params: Params | None = None,
    ) -> list[Tensor]:
        """Logprobs float32 [len(sequence) - start] of each sequence's tokens from its `start` (at least 1) on.

        They are the server's to the bit, whatever the other sequences, their order and `share_prefixes`, which
        computes a prefix that several sequences have in common once.  `temperature`: one for all or one a sequence; it
        counts in the modes "temperature" and "processed".  `sampling_masks`, for "processed": by sequence what the
        token route returns as `sampling_mask`, a list with the ids that each scored token was drawn from (None: the
        whole vocabulary), or its columns.  `sampling_params`: likewise by sequence what its request had (or None), of
        which bias and penalties count; its prompt ends at `start`.  Raises ValueError.
        """
        modules = self._modules_of_decoder
        requests = checked(
            sequences,
            starts,
            temperature,
            logprobs_mode,
            sampling_masks,
            sampling_params,
            vocab=modules.vocab,
            positions=modules.num_positions,
        )
        return scoring.rows(
            modules,
            self._synced(),
            requests,
            mode=logprobs_mode,
            share=share_prefixes,
            max_tokens=self.max_tokens,
            activation_bytes=self.activation_bytes,
            ordered=self.ordered_gradients,
        )

    def tree_logprobs(
        self, turns: Sequence[TurnOfTree], temperature: float = 1.0, logprobs_mode: str = "raw"
    ) -> list[Tensor]:
        """Logprobs float32 [tokens] of what was sampled in each turn of a session's tree (`SessionTree.turns` of
        tokserve.rl), each prompt and answer computed once, however many turns continue it.

        They are bitwise the turns' own where the weights are those that sampled them.  `temperature` and
        `logprobs_mode` as of `logprobs`; masks of turns count in the mode "processed".  Raises ValueError.
        """
        sequences = [np.concatenate([turn.prompt_ids, turn.tokens.token_ids]).tolist() for turn in turns]
        starts = [len(turn.prompt_ids) for turn in turns]
        masks = [turn.tokens.sampling_mask for turn in turns]
        return self.logprobs(sequences, starts, temperature, logprobs_mode, masks)

    def _synced(self) -> dict[str, Tensor]:
        masters: dict[str, Tensor] = dict(self.named_parameters())
        device = masters[EMBEDDING].device
        if device.type != self._binding.device.type:
            raise ValueError(f"the policy's weights are on {device}, but it was loaded for {self._binding.device}")
        rebound = self._binding.activate()
        # FSDP gathers parameters into tensors whose versions it holds, so that a change does not show
        sharded = any(base.__name__ == "FSDPModule" for base in type(self).__mro__)
        self._modules_of_decoder.sync(masters, everything=rebound or sharded or self._stale)
        self._stale = False
        return masters

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and the float32 masters as a Hugging Face checkpoint."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        config = self.config | {"dtype": "float32"}
        config.pop("torch_dtype", None)
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: self.get_parameter(name).detach().contiguous() for name in self._names}
        save_file(tensors, target / weights.SINGLE, metadata={"format": "pt"})


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter where its dotted name says, in modules made for that."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(last, parameter)


def _masters(directory: Path, decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 values) of the checkpoint's tensors that the decoder has.  Raises StartError."""
    entries = weights.with_model_names(weights.catalogue(directory), decoder.spec.renames)
    stacked = decoder.stacked_parameters()
    for name in weights.layout(entries, decoder.parameters_by_name(), stacked):
        entry = entries.get(name) or (entries.get(HEAD) if name == EMBEDDING else None)  # a tied model may have either
        if entry is None or entry.is_stored or entry.dtype not in FLOATS.values():
            what = "stored in parts" if entry is None else entry.source.kind if entry.source else entry.dtype
            raise StartError(f"{name} is {what}: a quantized checkpoint cannot be trained")
        master = torch.empty(entry.shape, dtype=torch.float32).copy_(weights.read_tensor(entry))
        if name in stacked:
            yield from ((part, view.clone()) for part, view in stacked[name].parts(master).items())
        else:
            yield name, master
