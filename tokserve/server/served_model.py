"""The model that a server serves, as requests name it: its names, its adapters, and what its replies carry."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import msgspec

from tokserve import __version__
from tokserve.base.errors import NotFound
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.generation_config import RECOMMENDED, generation_defaults, output_cap
from tokserve.config import Config
from tokserve.protocol.column_table import asked_columns
from tokserve.protocol.columns import LOGPROBS
from tokserve.protocol.params import SamplingParams
from tokserve.server.http.body import encode_json

SHOWN = 20  # adapters that an error lists


class ServedModel:
    """`names`: of the model, `name` the first.  `defaults`: sampling parameters of text routes that the checkpoint
    recommends.  `output_cap`: its limit of `max_tokens`, or None."""

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self._llm = llm
        self._config = config
        self.names = config.server.served_model_name or [config.model.model]
        self.name = self.names[0]
        # other names of the same model that clients send: its directory, and names without their first part
        self._aliases = {config.model.model, *(name.rstrip("/").rpartition("/")[2] for name in self.names)}
        self.output_cap = output_cap(config.model)
        self.defaults: dict[str, Any] = {}
        if not config.server.tokens_only:
            recommended = generation_defaults(config.model)
            self.defaults = {name: getattr(recommended, name) for name in RECOMMENDED}

    def check(self, name: str | None) -> None:
        """Raise `NotFound` unless `name` is absent or empty, one this server answers to, or that of an adapter."""
        if name and not self._knows(name):
            served = ", ".join([*self.names, *(adapter.name for adapter in self._llm.status.adapters[:SHOWN])])
            raise NotFound(
                f"the model {name[:200]!r} does not exist; this server serves {served}",
                field="model",
                code="model_not_found",
            )

    async def find(self, name: str | None) -> None:
        """Like `check`, but asks the engine about an unknown name first: another front end may just have loaded
        the adapter."""
        if name and self._config.lora.enable_lora and not self._knows(name):
            await self._llm.refresh(self._config.server.liveness_timeout)
        self.check(name)

    def adapter(self, model: str | None) -> str:
        """The adapter that a request with this `model` is for, "" if it is for the model itself.  An adapter may have
        the model's name, which is also that of requests that name none."""
        name = model or self.name
        if self._is_adapter(name) or not self._is_models(name):
            return name
        return ""

    def answers_as(self, model: str | None) -> str:
        """The name that the reply to a request with this `model` carries."""
        return self.adapter(model) or self.name

    def columns_of(self, params: SamplingParams) -> tuple[str, ...]:
        """The columns, besides logprobs, that the replies to a request with these parameters have."""
        return tuple([name for name in asked_columns(self.with_masks(params)) if name != LOGPROBS])

    def with_masks(self, params: SamplingParams) -> SamplingParams:
        """The parameters, which ask for sampling masks if they leave that to the server and it returns them."""
        if params.return_sampling_mask is None and self._config.model.return_sampling_mask:
            return msgspec.structs.replace(params, return_sampling_mask=True)
        return params

    @property
    def fingerprint(self) -> str:
        """A digest of what tokens depend on besides the request: the program, the model's options, the bound ops and
        their arithmetic, and the weights that serve now."""
        status = self._llm.status
        parts = [self._options, status.weight_version, status.epoch]
        return f"tokserve-{__version__}-{hashlib.sha256(encode_json(parts)).hexdigest()[:8]}"

    @cached_property
    def _options(self) -> str:
        facts = self._llm.ready.facts
        options = [self._config.model, self._config.cache.kv_cache_dtype, facts.get("ops"), facts.get("arithmetic")]
        if self._config.parallel.num_ranks > 1:  # ranks add what each has computed
            options += [facts["tensor_parallel_size"], facts["pipeline_parallel_size"]]
        return encode_json(options).decode()

    def _knows(self, name: str) -> bool:
        return self._is_models(name) or self._is_adapter(name)

    def _is_models(self, name: str) -> bool:
        return name in self.names or name in self._aliases

    def _is_adapter(self, name: str) -> bool:
        return any(adapter.name == name for adapter in self._llm.status.adapters)
