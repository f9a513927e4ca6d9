"""What routers, health checks and trainers read of an SGLang server: health, model, configuration, load."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import tokserve
from tokserve import checkpoint
from tokserve.base.errors import EngineDead, Overloaded, RequestError, StartError, Unavailable
from tokserve.client.async_llm import GenerateRequest
from tokserve.client.inputs import token_prompt
from tokserve.dialects.sglang.replies import json
from tokserve.dialects.sglang.state import SglangState
from tokserve.features.observe import introspection
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.server.http import workers
from tokserve.server.serving import SERVING, Serving

HEALTH_SECONDS = 20.0
LOOK_SECONDS = 0.5  # between two looks at whether the engine makes tokens


async def health_generate(serving: Serving, request: Request) -> Response:
    """GET /health_generate: 200, without a body, when a token has been generated, or a vector made; else 503"""
    introspection.check_alive(serving)
    state = serving.llm.status.state
    if state not in SERVING:
        raise Unavailable(f"no token can be generated: the engine is {state}", code=state)
    sglang = serving.state_of(SglangState)
    if (probe := sglang.probe) is None or probe.done():
        probe = sglang.probe = asyncio.create_task(_probe(serving))  # one for all who ask meanwhile
        probe.add_done_callback(_retrieve)
    await asyncio.shield(probe)
    return Response(status_code=200)


async def _probe(serving: Serving) -> None:
    """Wait for a token of a request of its own, or of any other: a busy engine is healthy however long its queue is."""
    before = serving.llm.stats.output_tokens
    generating = asyncio.create_task(_generate_token(serving))
    generating.add_done_callback(_retrieve)
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            while serving.llm.stats.output_tokens <= before:
                done, _ = await asyncio.wait([generating], timeout=LOOK_SECONDS)
                if done and not isinstance(generating.exception(), Overloaded):
                    return generating.result()
                if done:  # the queue is full
                    await asyncio.sleep(LOOK_SECONDS)
                await serving.llm.refresh(LOOK_SECONDS)
    except TimeoutError:
        raise EngineDead(f"no token was generated in {HEALTH_SECONDS:g} s", code="engine_hung") from None
    finally:
        generating.cancel()


def _retrieve(task: asyncio.Task[None]) -> None:
    """Look at how a task ended, or asyncio logs its error."""
    if not task.cancelled():
        task.exception()


async def _generate_token(serving: Serving) -> None:
    ready = serving.llm.ready
    request = GenerateRequest(
        request_id=f"health-{secrets.token_hex(8)}",
        prompt=token_prompt([0], ready.vocab_size),
        task=PoolingParams() if _pools(serving) else SamplingParams(max_tokens=1, temperature=0.0),
    )
    [stream] = serving.llm.submit([serving.llm.prepare(request)])
    async with stream:
        async for delta in stream:
            if delta.finish_reason == "error":
                raise EngineDead(delta.message or "the engine could not generate a token")
            if delta.finish_reason == "abort" and not delta.token_ids:
                raise Unavailable("the request was aborted", code="aborted")


def _pools(serving: Serving) -> bool:
    return serving.config.model.runner == "pooling"


async def model(serving: Serving, request: Request) -> Response:
    """GET /model_info: a description of the model"""
    status = await serving.llm.fresh_status()
    config = await workers.run(workers.SMALL, lambda: _config(serving))
    options = serving.config.model
    return json(
        {
            "model_path": _model_path(serving),
            "served_model_name": serving.model.name,
            "tokenizer_path": (options.tokenizer or options.model) if serving.text else None,
            "is_generation": not _pools(serving),
            "preferred_sampling_params": None,
            "weight_version": status.weight_version,
            "load_format": options.load_format,
            "has_image_understanding": serving.llm.images is not None,
            "has_audio_understanding": False,
            "model_type": config.get("model_type"),
            "architectures": config.get("architectures"),
        }
    )


def _model_path(serving: Serving) -> str:
    """Where the weights that serve came from, as it was named; of pushed ones, the model of the start."""
    source = serving.llm.status.source
    if source is None:
        return checkpoint.given_name(serving.config.model.model)
    return serving.state_of(SglangState).model_paths.get(source, source)


def _config(serving: Serving) -> dict[str, Any]:
    """The model's config.json, read once."""
    sglang = serving.state_of(SglangState)
    if (known := sglang.model_config) is None:
        try:
            known = checkpoint.hf_config(checkpoint.locate(serving.config.model.model, weights=False))
        except (RequestError, OSError, StartError):  # it has been moved since the start
            known = {}
        sglang.model_config = known
    return dict(known)


async def configuration(serving: Serving, request: Request) -> Response:
    """GET /server_info: this server's facts; those that trainers and routers read also have SGLang's names"""
    await serving.llm.refresh(introspection.FRESH_SECONDS)
    ready, model, server = serving.llm.ready, serving.config.model, serving.config.server
    load = _core(serving)
    return json(
        introspection.description(serving, request)
        | {
            "model_path": _model_path(serving),
            "tokenizer_path": model.tokenizer or checkpoint.given_name(model.model),
            "skip_tokenizer_init": not serving.text,
            "served_model_name": serving.model.name,
            "host": server.host,
            "port": server.port,
            "context_length": ready.max_model_len,
            "dtype": model.dtype,
            "tp_size": serving.config.parallel.tensor_parallel_size,
            "pp_size": serving.config.parallel.pipeline_parallel_size,
            "dp_size": 1,
            "ep_size": 1,
            "nnodes": serving.config.parallel.nnodes,
            "num_gpus": serving.config.parallel.num_ranks,
            "disaggregation_mode": "null",
            "encoder_only": False,
            "page_size": ready.block_size,
            "weight_version": serving.llm.status.weight_version,
            "max_total_num_tokens": ready.num_blocks * ready.block_size,
            "max_running_requests": serving.config.scheduler.rows,
            "status": "ready" if serving.llm.status.state in SERVING else serving.llm.status.state,
            "version": tokserve.__version__,
            "internal_states": [load | {"weight_version": serving.llm.status.weight_version}],
        }
    )


def _core(serving: Serving) -> dict[str, Any]:
    """The load of the one engine."""
    stats, ready = serving.llm.stats, serving.llm.ready
    total, held = ready.num_blocks * ready.block_size, stats.blocks_held * ready.block_size
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "num_used_tokens": held,
        "num_total_tokens": held,
        "max_total_num_tokens": total,
        "max_running_requests": serving.config.scheduler.rows,
        "token_usage": round(held / total, 4) if total else 0.0,
        "gen_throughput": _throughput(serving),
        "cache_hit_rate": round(stats.prefix_hits / stats.prefix_queries, 4) if stats.prefix_queries else 0.0,
    }


def _throughput(serving: Serving) -> float:
    """Output tokens per second since the last question of at least a second ago; 0 at the first."""
    now, tokens = time.monotonic(), serving.llm.stats.output_tokens
    sglang = serving.state_of(SglangState)
    since, before, rate = sglang.throughput or (now, tokens, 0.0)
    if now - since >= 1.0:
        since, before, rate = now, tokens, round(max(0, tokens - before) / (now - since), 2)
    sglang.throughput = since, before, rate
    return rate


async def loads(serving: Serving, request: Request) -> Response:
    """GET /v1/loads: load and memory of the engine; `include` is ignored"""
    await serving.llm.refresh(introspection.FRESH_SECONDS)
    core = _core(serving)
    names = ("num_running_reqs", "num_waiting_reqs", "num_total_reqs")
    return json(
        {
            "timestamp": time.time(),
            "version": tokserve.__version__,
            "accelerator": serving.config.runtime.device,
            "num_accelerators": 1,
            "dp_rank_count": 1,
            "loads": [core],
            "aggregate": {f"total_{name.removeprefix('num_')}": core[name] for name in names},
        }
    )


async def get_load(serving: Serving, request: Request) -> Response:
    """GET /get_load: the older form of /v1/loads"""
    await serving.llm.refresh(introspection.FRESH_SECONDS)
    core = _core(serving)
    return json(
        [
            {
                "dp_rank": 0,
                "num_reqs": core["num_total_reqs"],
                "num_waiting_reqs": core["num_waiting_reqs"],
                "num_tokens": core["num_total_tokens"],
            }
        ]
    )
