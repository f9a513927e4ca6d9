"""TRL's GRPO trainer on-policy to the bit: rollouts from a tokserve server, logprobs by the server's arithmetic.

    trainer = ExactGRPOTrainer(model="DIR", reward_funcs=..., args=GRPOConfig(...), train_dataset=..., server_url=URL)
    trainer.train()

Written for TRL 1.16, whose trainers score through a "fused LM head" that is replaced here, and sample through an object
in `vllm_generation`, whose place a tokserve server takes.  All else is TRL's, its metrics too:
`sampling/sampling_logp_difference/max` is 0.0 at every on-policy step.

The pieces that need no exact model (`use_tokserve`, `RolloutFunction`, `HTTPWeightTransfer`, `TokserveVLLMClient`) are
those of `tokserve.rl.trl`, which needs nothing of tokserve but its client.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import types
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from tokserve.rl import Rollout, TokserveClient
from tokserve.rl.pools import authorization, sync_pool
from tokserve.rl.step_seeds import StepSeeds
from tokserve.rl.trl import HTTPWeightTransfer, RolloutFunction, TokserveVLLMClient, use_tokserve
from tokserve.rl.trl_settings import check_settings, sampling_of
from tokserve.train import selective_logprobs
from tokserve.train.compilation import uncompiled
from tokserve.train.exact_model import exact
from tokserve.train.layers import backward, projections

__all__ = [
    "ExactGRPOTrainer",
    "HTTPWeightTransfer",
    "RolloutFunction",
    "TokserveGeneration",
    "TokserveVLLMClient",
    "add_exact_lm_head",
    "server_options",
    "use_tokserve",
]
ADAPTER = "policy"  # what the server calls a trained adapter
PIECE = 256  # tokens whose logits are in memory at a time
Result = TypeVar("Result")


def add_exact_lm_head(model: Any, temperature: float, *, entropy_gradient: bool = False) -> None:
    """Give an `exact` model the call `model(..., labels=..., fused_lm_head=True)` that TRL's trainers score through.

    Its log_probs [B, L - 1] are the server's of mode "temperature", zero where the label is -100.  It also returns the
    entropy, without a gradient unless `entropy_gradient`, and the loss.
    """

    @uncompiled
    @functools.wraps(type(model).forward)  # `generate` checks its arguments against the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return type(self).forward(self, *args, **kwargs, **({} if labels is None else {"labels": labels}))
        count, shifted = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        hidden = self.model(*args, **kwargs).last_hidden_state
        if shifted is None:
            hidden, shifted = hidden[:, :-1], labels[:, 1:]
        mask = shifted != -100
        logprobs, entropy = _scored(self.lm_head, hidden[mask], shifted[mask], temperature, entropy_gradient)
        logprobs, entropy = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (logprobs, entropy))
        loss = -logprobs.sum() / (mask.sum().clamp(min=1) if count is None else count)
        return FusedCausalLMOutput(loss=loss, log_probs=logprobs, entropy=entropy, label_mask=mask)

    model.forward = types.MethodType(forward, model)


def _scored(
    head: Any, hidden: Tensor, ids: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs [n] of ids [n] after hidden states [n, H], and the entropy [n] of each distribution."""
    parts = []
    for piece in backward.pieces(len(ids), PIECE):
        logits = head(hidden[piece])
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            all_logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        parts.append((selective_logprobs(logits, ids[piece], temperature), entropy))
    empty = hidden.float().sum(-1)  # of no tokens, but of the graph
    return (torch.cat([part[0] for part in parts] or [empty]), torch.cat([part[1] for part in parts] or [empty]))


class TokserveGeneration:
    """Where TRL looks for its client of vLLM: rollouts from a tokserve server, and weights or an adapter to it."""

    def __init__(self, trainer: Any, url: str, *, api_key: str | None = None) -> None:
        self._trainer, self._url, self._api_key = trainer, url, api_key
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client: TokserveClient | None = None
        self._base_is_there = False  # what an adapter adds to was pushed
        self._seeds = StepSeeds()

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    async def _connected(self) -> TokserveClient:
        if self._client is None:
            self._client = TokserveClient(self._url, api_key=self._api_key)
        return self._client

    def sync_weights(self) -> None:
        """Push the model's weights as the version that is the number of the step; of peft's, the base once, and then
        the adapter each time."""
        accelerator = self._trainer.accelerator
        if accelerator.is_main_process:
            self._run(self._push(accelerator.unwrap_model(self._trainer.model)))
        accelerator.wait_for_everyone()

    async def _push(self, model: Any) -> None:
        client, adapted = await self._connected(), hasattr(model, "get_base_model")
        causal = model.get_base_model() if adapted else model
        if not (adapted and self._base_is_there):
            served = causal._served
            weights = projections.collect(causal, served.modules.names, "", served.device).masters
            named = [(name, weights[name]) for name in served.modules.names]
            await client.update_weights(named, version=str(self._trainer.state.global_step))
        if adapted:
            self._base_is_there = True
            await client.push_adapter(model, ADAPTER)

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> Any:
        """TRL's (prompt ids, completion ids, logprobs, their ids), a row for each of `prompts`, which repeat."""
        if images is not None and any(image is not None for image in images):
            raise ValueError("images are not supported")
        accelerator = self._trainer.accelerator
        gathered = gather_object(prompts)
        rows: list[Any] = [None]
        if accelerator.is_main_process:
            rows = [self._run(self._rollouts(gathered[::num_generations], num_generations))]
        broadcast_object_list(rows, from_process=0)
        first = accelerator.process_index * len(prompts)
        slices = rows[0][first : first + len(prompts)]
        ids = [row[0] for row in slices]
        logprobs = [[[value] for value in row[1]] for row in slices]
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]

    async def _rollouts(self, prompts: list[list[int]], n: int) -> list[tuple[list[int], list[float]]]:
        client, trainer = await self._connected(), self._trainer
        sampling = sampling_of(trainer)
        seeds = self._seeds.draw(
            len(prompts),
            run_seed=int(trainer.args.seed),
            step=int(trainer.state.global_step),
            training=trainer.model.training,
        )
        model = ADAPTER if self._base_is_there else None
        rollouts: list[Rollout] = await client.generate(
            prompts, n=n, seeds=None if "seed" in sampling else seeds, model=model, **sampling
        )
        return [(rollout.token_ids.tolist(), rollout.logprobs.tolist()) for rollout in rollouts]


def server_options(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The options of `exact` that a running server has.  Raises ValueError for a server that no model here equals."""
    with sync_pool(url, authorization(api_key)) as client:
        config = client.get("/server_info", params={"config_format": "json"}).raise_for_status().json()["config"]
        arithmetic = client.get("/inference/v1/state").raise_for_status().json()["arithmetic"]
    model = config["model"]
    if model["quantization"] not in (None, "none") or config["cache"]["kv_cache_dtype"] != "auto":
        raise ValueError("the server quantizes weights or its KV cache: logprobs cannot be equal")
    options = {"dtype": model["dtype"], "head_dtype": model["head_dtype"], "max_model_len": model["max_model_len"]}
    return options | ({"cpu_arithmetic": arithmetic} if model["dtype"] == "bfloat16" and arithmetic else {})


class ExactGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer` with an exact model, and rollouts from the tokserve server at `server_url`.

    The model is made `exact`, a reference model too, with the server's dtype and arithmetic unless `exact_options` say
    otherwise; keep its weights in float32, or the updates of an optimizer are rounded away.  Weights are pushed before
    the rollouts of each step, those of a peft model as an adapter (the server needs `--enable-lora`).  `use_vllm`
    must be off: this class stands for it.  Raises ValueError.
    """

    def __init__(
        self,
        *args: Any,
        server_url: str,
        server_api_key: str | None = None,
        exact_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self  # TRL has no types
        if trainer.use_vllm or trainer.rollout_func is not None:
            raise ValueError("use_vllm and rollout_func must be left out: rollouts come from server_url")
        check_settings(trainer.args)
        options = server_options(server_url, server_api_key) | (exact_options or {})
        for model in (self.model, self.ref_model):
            if model is not None:
                exact(model, **options)
                causal = model.get_base_model() if hasattr(model, "get_base_model") else model
                add_exact_lm_head(causal, self.temperature, entropy_gradient=self._entropy_bonus_enabled)
        self.use_vllm, self._last_loaded_step = True, -1
        self.vllm_generation = TokserveGeneration(self, server_url, api_key=server_api_key)
