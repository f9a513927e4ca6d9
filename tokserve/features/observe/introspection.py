"""Read-only routes: health, readiness, models, version, metrics, load, configuration, OpenAPI."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import fastapi
import msgspec
import pydantic
from starlette.requests import Request
from starlette.responses import Response

import tokserve
from tokserve import checkpoint
from tokserve.base.errors import EngineDead, invalid
from tokserve.config import option_values
from tokserve.features.observe import metrics
from tokserve.features.observe.observers import metrics_of
from tokserve.protocol.params import VLLM_LOGPROBS_MODES
from tokserve.server.http import body
from tokserve.server.serving import Serving

FRESH_SECONDS = 0.5  # if a step takes longer than this, the engine's last known state is shown
LOGPROBS_MODE_NAMES = {mode: name for name, mode in VLLM_LOGPROBS_MODES.items()}
ENGINE_FIELDS = ("max_model_len", "vocab_size", "num_blocks", "block_size", "eos_token_ids")


class ModelCard(msgspec.Struct):
    """A model or adapter in OpenAI's form."""

    id: str
    created: int
    root: str
    max_model_len: int
    parent: str | None = None
    owned_by: str = "tokserve"
    object: str = "model"


class ModelList(msgspec.Struct):
    """All models and adapters of the server."""

    data: list[ModelCard]
    object: str = "list"


# conditions under which the server does not serve; /ready reports the first that holds, or else the engine's state
CONDITIONS: tuple[tuple[str, Callable[[Serving], bool]], ...] = (
    ("dead", lambda serving: serving.llm.dead is not None),
    ("restarting", lambda serving: serving.llm.down is not None),
    ("hung", lambda serving: serving.llm.hung),
    ("draining", lambda serving: bool(serving.state.draining)),
    ("quarantined", lambda serving: serving.llm.status.quarantine is not None),
)


class Readiness(msgspec.Struct):
    """ready, updating (weights are being transferred while the current ones serve), or why requests are not served."""

    status: str


async def readiness(serving: Serving, request: Request) -> Response:
    """GET /ready: 200 while new requests are served, else 503 with the reason"""
    state = serving.llm.status.state
    status = next((name for name, holds in CONDITIONS if holds(serving)), "ready" if state == "running" else state)
    response = body.reply(request, Readiness(status))
    response.status_code = 200 if status in ("ready", "updating") else 503
    return response


async def health(serving: Serving, request: Request) -> Response:
    """GET /health: 200 while the engine is alive and not hung; `?deep=1` asks the engine itself"""
    check_alive(serving)
    if request.query_params.get("deep", "0").lower() not in ("0", "false", ""):
        await serving.probe("check", serving.config.server.liveness_timeout)  # checks the accounting of KV blocks
    return body.reply(request, {})


def check_alive(serving: Serving) -> None:
    """Raise `EngineDead` if there is no engine, or if it is hung."""
    llm = serving.llm
    if llm.down is not None:
        raise llm.down.again()
    _ = llm.ready  # raises until the engine has started
    if llm.hung:
        raise EngineDead(f"the engine has not finished a step for {llm.silence:.0f} s", code="engine_hung")


async def version(serving: Serving, request: Request) -> Response:
    """GET /version: the version of this server"""
    return body.reply(request, {"version": tokserve.__version__})


async def models(serving: Serving, request: Request) -> Response:
    """GET /v1/models: the names of the model, then the adapters"""
    if serving.config.lora.enable_lora:
        await serving.llm.refresh(FRESH_SECONDS)
    names = dict.fromkeys([*serving.model.names, *(adapter.name for adapter in serving.llm.status.adapters)])
    return body.reply(request, ModelList([_model(serving, name) for name in names]))


async def model(serving: Serving, request: Request) -> Response:
    """GET /v1/models/{id}: a model or an adapter"""
    name: str = request.path_params["id"]
    await serving.model.find(name)
    return body.reply(request, _model(serving, name))


def _model(serving: Serving, name: str) -> ModelCard:
    created, length = serving.api_process.created, serving.llm.ready.max_model_len
    owner = "sglang" if serving.config.server.sglang_api else "tokserve"  # routers choose their dialect by it
    base = checkpoint.given_name(serving.config.model.model)
    path = next((adapter.path for adapter in serving.llm.status.adapters if adapter.name == name), None)
    if path is None and name in serving.model.names:
        return ModelCard(name, created, base, length, owned_by=owner)
    parent = base if name == serving.model.name else serving.model.name
    return ModelCard(name, created, path or name, length, parent=parent, owned_by=owner)


async def prometheus_metrics(serving: Serving, request: Request) -> Response:
    """GET /metrics: Prometheus metrics"""
    await serving.llm.refresh(FRESH_SECONDS)
    return Response(metrics_of(serving).render(await serving.measures()), media_type=metrics.CONTENT_TYPE)


async def configuration(serving: Serving, request: Request) -> Response:
    """GET /server_info: the resolved configuration without its secrets, and the facts of the start"""
    return body.reply(request, description(serving, request))


def description(serving: Serving, request: Request) -> dict[str, Any]:
    """What /server_info replies; `?config_format=json|text` adds vLLM's `vllm_config`."""
    config_format = request.query_params.get("config_format")
    if config_format not in (None, "json", "text"):
        raise invalid("config_format", "must be json or text")
    config, status = _without_secrets(serving.config), serving.llm.status
    vllm_config = {} if config_format is None else {"vllm_config": _as_vllm(serving, config, config_format)}
    return {
        "config": config,
        **vllm_config,
        "api_server": serving.api_process.index,
        "facts": serving.llm.ready.facts,
        "image_token_id": None if serving.llm.images is None else serving.llm.images.kind.token_id,
        "adapters": {adapter.name: adapter.generation for adapter in status.adapters},
        "engine": {name: getattr(serving.llm.ready, name) for name in ENGINE_FIELDS}
        | {"weight_version": status.weight_version, "epoch": status.epoch},
        "versions": {
            "tokserve": tokserve.__version__,
            "python": platform.python_version(),
            "fastapi": fastapi.__version__,
            "msgspec": msgspec.__version__,
            "pydantic": pydantic.VERSION,
        },
    }


def _as_vllm(serving: Serving, config: dict[str, Any], config_format: str) -> Any:
    """The configuration under the names of vLLM's `VllmConfig`, which its clients read."""
    ranks = {"world_size": serving.config.parallel.num_ranks}
    mode, lora = config["model"]["logprobs_mode"], serving.config.lora
    adapters = {"max_loras": lora.max_loras, "max_lora_rank": lora.max_lora_rank} if lora.enable_lora else None
    named = {
        "model_config": config["model"]
        | {"dtype": f"torch.{config['model']['dtype']}", "logprobs_mode": LOGPROBS_MODE_NAMES.get(mode, mode)},
        "lora_config": adapters,
        "cache_config": config["cache"] | {"num_gpu_blocks": serving.llm.ready.num_blocks},
        "scheduler_config": config["scheduler"],
        "parallel_config": config["parallel"] | ranks,
        "weight_transfer_config": config["weights"]["weight_transfer_config"],
    }
    return named if config_format == "json" else str(named)


def _without_secrets(config: Any) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for group, name, value in option_values(config):
        groups.setdefault(group, {})[name] = msgspec.to_builtins(value)
    for name in ("api_key", "admin_api_key"):
        groups["server"][name] = len(groups["server"][name] or [])
    return groups


async def openapi_schema(serving: Serving, request: Request) -> Response:
    """GET /openapi.json: this API as OpenAPI 3.1"""
    prefix = serving.config.server.root_path.strip("/")
    servers = {"servers": [{"url": f"/{prefix}"}]} if prefix else {}
    return body.reply(request, request.app.openapi() | servers)
