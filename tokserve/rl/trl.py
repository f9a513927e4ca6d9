"""Pieces that let TRL's trainers use a tokserve server: neither vLLM nor CUDA is needed, and weights go over HTTP.

- `use_tokserve()`: TRL's server mode (`use_vllm=True, vllm_mode="server"`) talks to tokserve, in every trainer that has
  it.  TRL gathers the weights, so FSDP and DeepSpeed are as with vLLM.
- `RolloutFunction(url)`: for `GRPOTrainer(rollout_func=...)`, TRL's public hook; changes nothing of TRL.
- `HTTPWeightTransfer(url)`: for `AsyncGRPOTrainer(weight_transfer=...)`.

All ask for the logprobs that TRL's losses need, whatever the server's default is.  Written for TRL 1.16.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.generation import vllm_client, vllm_generation

from . import Rollout, TokserveClient
from .deltas import file_pieces
from .errors import ServerError
from .pools import authorization, is_this_machine, sync_pool
from .step_seeds import StepSeeds
from .trl_run import TrainerRun, follow_trainers
from .trl_settings import LOGPROBS_MODE, check_settings, sampling_of
from .trl_walks import add_buffers
from .weight_pairs import Weights, copied_parts, reading

MODES_OF_TRL = ("temperature", "processed", "processed_logprobs")
CHECK_FOR_VLLM = (  # modules of TRL that ask whether vLLM is installed before they use its server
    "trl.generation.vllm_client",
    "trl.generation.vllm_generation",
    "trl.trainer.distillation_trainer",
    "trl.experimental.async_grpo.async_rollout_worker",
    "trl.experimental.gold.gold_trainer",
    "trl.experimental.iw_opd.iw_opd_trainer",
)
CONCURRENT = 256  # prompts that are in flight at once
ADAPTER = "policy"  # what the server calls a trained adapter
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class WeightUpdates:
    """Weight updates of a server from code without an event loop, a part at a time.  Methods raise RuntimeError with
    the server's message, and httpx.TransportError."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._http = sync_pool(url, authorization(api_key))
        self._take_over = True  # of what a trainer that has gone left open

    @contextmanager
    def update(self, *, recompute_kv: bool = False) -> Iterator[str]:
        """An update around the block, committed at its end and rolled back if it raises; yields its id, for `send`."""
        opened = self._post("/start_weight_update", json={"take_over": True} if self._take_over else {})
        self._take_over = False
        update_id: str = opened["update_id"]
        committed = False
        try:
            yield update_id
            self._post("/finish_weight_update", json={"update_id": update_id, "recompute_kv": recompute_kv})
            committed = True
        finally:
            if not committed:
                self._abort(update_id)

    def _abort(self, update_id: str) -> None:
        try:
            self._http.post("/abort_weight_update", json={"update_id": update_id})  # 409 where it has failed already
        except httpx.TransportError as error:
            log.warning("the weight update could not be aborted (its lease will end it): %s", error)

    def send(self, weights: Weights, update_id: str) -> None:
        """Send tensors, or those of a module; each is copied before the next one is asked for, as TRL then takes
        adapters out again, or frees what it has gathered."""
        headers = {"Content-Type": "application/octet-stream"}
        with reading(weights) as pairs:
            for part in copied_parts(pairs):
                self._post(
                    "/update_weights", params={"update_id": update_id}, content=file_pieces(part), headers=headers
                )

    def _post(self, path: str, **kwargs: Any) -> Any:
        reply = self._http.post(path, **kwargs)
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"{path}: {reply.status_code}: {reply.text}")
        return reply.json()

    def logprobs_mode(self) -> str:
        """The kind of logprobs that the server returns where a request names none."""
        reply = self._http.get("/server_info").raise_for_status().json()
        return reply["config"]["model"]["logprobs_mode"]

    def close(self) -> None:
        self._http.close()


def use_tokserve(*, api_key: str | None = None) -> None:
    """Let TRL's trainers that are made from now on use a tokserve server where they would use vLLM's.

    Call it after the trainer's class was imported, and give the configuration `use_vllm=True, vllm_mode="server"` and
    `vllm_server_base_url`.  `api_key`: an admin key, where the server has one.
    """

    for name in CHECK_FOR_VLLM:
        if name in sys.modules:
            vars(sys.modules[name])["is_vllm_available"] = lambda *_, **__: True
    follow_trainers()
    keyed = type("TokserveVLLMClient", (TokserveVLLMClient,), {"_api_key": api_key})
    vars(vllm_generation)["VLLMClient"] = keyed
    add_buffers()


class TokserveVLLMClient(vllm_client.VLLMClient):  # type: ignore[misc]
    """TRL's client of a vLLM server, for a tokserve server: weights go over HTTP, and no process group is formed.  An
    update is a transaction: if it fails, the server keeps its old weights, and the error is raised.

    Each prompt is a request with a seed of its own, so rollouts are the same in the next run with the trainer's `seed`.
    One in `generation_kwargs` is every prompt's.
    """

    _api_key: str | None = None
    _updates: WeightUpdates | None = None
    _update_id: str | None = None  # of the update that is open

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._run = TrainerRun.latest  # None: no trainer makes it
        super().__init__(*args, **kwargs)

    # TRL's constructor calls it first of all, when there is a session
    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server serves, as TRL's client does; no proxy is used for this machine.  Raises requests'
        ConnectionError after `total_timeout` seconds."""
        self.session.headers.update(authorization(self._api_key))
        self.session.trust_env = not is_this_machine(self.host)
        retries = self.session.get_adapter(self.base_url).max_retries
        self.session.mount(self.base_url, vllm_client.HTTPAdapter(max_retries=retries, pool_maxsize=CONCURRENT))
        end = time.monotonic() + total_timeout
        with sync_pool(self.base_url, {}) as http:
            while (failure := _health(http)) is not None:
                if time.monotonic() >= end:
                    raise vllm_client.ConnectionError(
                        f"the server at {self.base_url} is not ready after {total_timeout:g} s: {failure}"
                    )
                time.sleep(retry_interval)

    def vllm_config(self) -> Any:
        """vLLM's configuration as the server reports it, with the kind of logprobs that `generate` asks for."""
        config = self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]
        return config | {"model_config": config["model_config"] | {"logprobs_mode": "processed_logprobs"}}

    get_server_info = vllm_config  # TRL's name

    def generate(
        self,
        prompts: Any,
        features: Any = None,
        *args: Any,
        generation_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as TRL's client does, with logprobs of the distribution at the temperature."""
        generate = super().generate

        def one(index: int, extra: dict[str, Any]) -> dict[str, Any]:
            feature = None if features is None else [features[index]]
            return generate([prompts[index]], feature, *args, generation_kwargs=extra, **kwargs)

        return self._each(one, len(prompts), generation_kwargs or {})

    def chat(self, messages: Any, *args: Any, generation_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Chat as TRL's client does, with logprobs of the distribution at the temperature."""
        chat = super().chat

        def one(index: int, extra: dict[str, Any]) -> dict[str, Any]:
            return chat([messages[index]], *args, generation_kwargs=extra, **kwargs)

        return self._each(one, len(messages), generation_kwargs or {})

    def _each(
        self, one: Callable[[int, dict[str, Any]], dict[str, Any]], count: int, requested: dict[str, Any]
    ) -> dict[str, Any]:
        """The joined replies of `one(index, generation_kwargs)` for each prompt, of which many are in flight."""
        extra = {"logprobs_mode": LOGPROBS_MODE} | requested
        seeds = None if self._run is None or "seed" in extra else self._run.seeds(count)
        options = [extra] * count if seeds is None else [extra | {"seed": seed} for seed in seeds]
        with ThreadPoolExecutor(max(min(count, CONCURRENT), 1)) as threads:
            replies = list(threads.map(one, range(count), options))
        return {name: _joined([reply[name] for reply in replies]) for name in replies[0]}

    def init_communicator(self, device: Any = 0) -> None:
        """Get ready for weight updates; `device` may be a CPU."""
        self._updates = WeightUpdates(self.base_url, api_key=self._api_key)

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Calls of `update_named_param` within the block are one update."""
        with self._connected().update() as self._update_id:
            try:
                yield
            finally:
                self._update_id = None

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], named_params: Weights) -> None:
        """Send tensors: as an update, or as a part of the one that is open."""
        if self._update_id is not None:
            self._connected().send(named_params, self._update_id)
            return
        with self._connected().update() as update_id:
            self._connected().send(named_params, update_id)

    def update_model_params(self, model: torch.nn.Module) -> None:
        """Send all tensors of a model; an adapter of peft is merged."""
        self.update_named_params([], model)

    def _connected(self) -> WeightUpdates:
        if self._updates is None:
            raise RuntimeError("weights can be sent after init_communicator")
        return self._updates

    def reset_prefix_cache(self) -> None:
        """Does nothing: KV of other weights is never found."""

    def close_communicator(self) -> None:
        """Close the connections of weight updates."""
        if self._updates is not None:
            self._updates.close()
            self._updates = None


def _joined(lists: list[list[Any] | None]) -> list[Any] | None:
    """The rows of all prompts; None if there are none, as of logprobs that were not requested."""
    return None if lists[0] is None else [row for rows in lists for row in rows or ()]


def _health(http: httpx.Client) -> str | None:
    """What is wrong with the server, None if it serves."""
    try:
        status = http.get("/health").status_code
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    return None if status == httpx.codes.OK else f"it answered {status}"


class HTTPWeightTransfer:
    """Sends each policy as one update over HTTP, for `AsyncGRPOTrainer(weight_transfer=HTTPWeightTransfer(url))`.

    Generation goes on while tensors come, and is never paused: the server takes all weights at one step boundary, and
    requests in flight go on with them.  `recompute_kv`: on KV of theirs.  If an update fails, the server keeps its old
    weights, and the error is raised.
    """

    def __init__(self, url: str, *, api_key: str | None = None, recompute_kv: bool = False) -> None:
        self._updates = WeightUpdates(url, api_key=api_key)
        self._recompute_kv = recompute_kv

    def init_weight_transfer(self) -> None:
        """Warn if the server's replies to TRL's rollout worker, which names no kind of logprob, have the wrong one."""
        mode = self._updates.logprobs_mode()
        if mode not in MODES_OF_TRL:
            log.warning("the server's logprobs are of mode %s, wrong at a temperature but 1: start it with --rl", mode)

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Send the pairs of (name, tensor), and have the server take them."""
        with self._updates.update(recompute_kv=self._recompute_kv) as update_id:
            self._updates.send(iterator, update_id)

    def pause(self) -> None:
        """Does nothing: an update needs no pause."""

    def resume(self) -> None:
        """Does nothing: there was no pause."""

    def destroy(self) -> None:
        self._updates.close()


class RolloutFunction:
    """Pushes the weights of each step and generates with them, for `GRPOTrainer(rollout_func=RolloutFunction(url))`.

    Sampling parameters are the trainer's; `sampling` adds to them or replaces them.  Seeds come from the trainer's
    `seed`, its step and the number of the call, so runs are repeatable.  A setting of TRL about generation that the
    server's rollouts cannot have is a ValueError, which names it.  Each process of a distributed run
    generates for its own prompts.  The model has to be whole on the main process: DDP and peft work, and for sharded
    models there is `use_tokserve`.  TRL reports the difference of logprobs in its server mode only.

    A server with `--enable-lora` gets the base of a peft model once and then its adapter, which is called `ADAPTER`
    there; an adapter that it refuses is merged, as it is for other servers.
    """

    def __init__(self, url: str, *, api_key: str | None = None, **sampling: Any) -> None:
        self._url, self._api_key, self._sampling = url, api_key, sampling
        self._updates = WeightUpdates(url, api_key=api_key)
        self._pushed_step: int | None = None
        self._model: str | None = None  # what requests name
        self._merges: bool | None = None  # None: that is not known yet
        self._base_is_there = False  # what an adapter adds to was pushed
        self._seeds = StepSeeds()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """{"prompt_ids", "completion_ids", "logprobs"}, a row for each of `prompts`, which repeat."""
        accelerator = trainer.accelerator
        check_settings(trainer.args, vllm=trainer.use_vllm)
        if self._pushed_step != trainer.state.global_step:
            names: list[str | None] = [None]
            if accelerator.is_main_process:
                names = [self._push(accelerator.unwrap_model(trainer.model))]
            broadcast_object_list(names)
            self._model, self._pushed_step = names[0], trainer.state.global_step
        ids = prompt_ids(prompts, trainer)
        rollouts = _run(self._generate(ids, trainer))
        return {
            "prompt_ids": ids,
            "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
            "logprobs": [rollout.logprobs.tolist() for rollout in rollouts],
        }

    def _push(self, model: Any) -> str | None:
        """Send a model, or its adapter; returns the name that requests need for it."""
        if self._merges is None:
            self._merges = not (hasattr(model, "peft_config") and _run(self._serves_adapters()))
        if not self._merges:
            try:
                if not self._base_is_there:
                    with model.disable_adapter():
                        self._send(model)
                    self._base_is_there = True
                _run(self._push_adapter(model))
                return ADAPTER
            except (ServerError, TypeError) as error:
                if isinstance(error, ServerError) and error.status >= httpx.codes.INTERNAL_SERVER_ERROR:
                    raise
                log.warning("the adapter is merged from now on, because it cannot be pushed: %s", error)
                self._merges = True
        self._send(model)
        return None

    def _send(self, model: Any) -> None:
        with self._updates.update() as update_id:
            self._updates.send(model, update_id)

    async def _serves_adapters(self) -> bool:
        async with TokserveClient(self._url, api_key=self._api_key) as client:
            return bool((await client.config())["lora"]["enable_lora"])

    async def _push_adapter(self, model: Any) -> None:
        async with TokserveClient(self._url, api_key=self._api_key) as client:
            await client.push_adapter(model, ADAPTER)

    async def _generate(self, ids: list[list[int]], trainer: Any) -> list[Rollout]:
        """A rollout for each row; equal rows that follow one another are choices of one request."""
        sampling = sampling_of(trainer) | self._sampling
        groups = [(row, len(list(same))) for row, same in itertools.groupby(ids)]
        seeds = self._seeds.draw(
            len(groups),
            run_seed=int(trainer.args.seed),
            step=int(trainer.state.global_step),
            training=trainer.model.training,
            process=trainer.accelerator.process_index,
        )
        async with TokserveClient(self._url, api_key=self._api_key) as client:
            calls = [
                client.generate([row], n=n, seeds=None if "seed" in sampling else [seed], model=self._model, **sampling)
                for (row, n), seed in zip(groups, seeds, strict=True)
            ]
            return list(itertools.chain.from_iterable(await asyncio.gather(*calls)))


def _run(call: Coroutine[Any, Any, Result]) -> Result:
    """What `call` returns; the caller's thread may have an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


def prompt_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """The token ids of prompts, texts or conversations, as the trainer would make them."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    return tokenizer.apply_chat_template(
        conversation=prompts,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )["input_ids"]
