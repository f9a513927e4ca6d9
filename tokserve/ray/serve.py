"""A Ray Serve application: replicas of a whole server, as many as the load needs.

Each replica holds an engine and serves all of tokserve's routes; Serve's proxy passes requests, streams and disconnects
through.  A replica comes and goes with the load, so what changes a server for good (weights, adapters, pauses) is
refused unless there is exactly one; `--data-parallel-size` is for those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from tokserve.base.errors import RequestError, StartError
from tokserve.client.async_llm import AsyncLLM
from tokserve.config import Config, fields
from tokserve.config.engine_config import reserved_devices
from tokserve.config.resolve import resolve
from tokserve.server.app import build_app
from tokserve.server.http import errors, workers
from tokserve.server.http.auth import route_path
from tokserve.server.routes import endpoints

DEPLOYMENT = "tokserve"
ABORT_RESULTS = ("aborted", "finished", "not_found")  # of an id at several replicas, the first of these counts
QUEUED = 4  # requests that a replica takes, as a multiple of those that it runs at once


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application, for `serve.run(build({"model": "demo", "cpu_threads": 4}))`, or for `serve run
    tokserve.ray.serve:build model=demo cpu_threads=4` and an `import_path` in a configuration file.

    `args` are options of `tokserve serve` by their Python names, and under `deployment` those of Serve's deployment:
    `autoscaling_config`, `num_replicas`, `ray_actor_options` and others.  A replica reserves a GPU with `device`
    cuda, else `cpu_threads` CPUs.  Raises StartError.
    """
    engine_options = dict(args)
    deployment = engine_options.pop("deployment", {})
    if not isinstance(deployment, Mapping):
        raise StartError("deployment must be an object with the options of Ray Serve's deployment")
    options = {name: _typed(name, value) for name, value in engine_options.items()}
    config = Config.make(**options)  # what is wrong is said here, not by every replica
    _check(config)
    settings = _defaults(config, "num_replicas" in deployment) | dict(deployment)
    deployed = serve.deployment(serve.ingress()(Replica)).options(**settings)
    return deployed.bind(options, _most_replicas(settings) == 1)


def _check(config: Config) -> None:
    if config.parallel.data_parallel_size > 1 or config.server.api_server_count > 1:
        raise StartError("a replica has one engine and one process: give num_replicas or autoscaling_config instead")


def _defaults(config: Config, fixed: bool) -> dict[str, Any]:
    """Options of the deployment that follow from those of the engine.  Raises StartError."""
    actor = reserved_devices(config.runtime)
    running = config.scheduler.on_a_gpu().rows if "num_gpus" in actor else config.scheduler.rows
    scaling = {"min_replicas": 1, "max_replicas": 1, "target_ongoing_requests": running}
    return {
        "name": DEPLOYMENT,
        "ray_actor_options": actor,
        "max_ongoing_requests": QUEUED * running,
        "graceful_shutdown_timeout_s": 600.0,  # a replica that is not needed any more ends its requests first
        "health_check_timeout_s": 30.0,
    } | ({} if fixed else {"autoscaling_config": scaling})


def _most_replicas(settings: Mapping[str, Any]) -> Any:
    scaling = settings.get("autoscaling_config")
    if scaling is None:
        return settings.get("num_replicas", 1)
    return scaling.get("max_replicas", 1) if isinstance(scaling, Mapping) else scaling.max_replicas


def _typed(name: str, value: Any) -> Any:
    """An option's value; one from a command line is a string, and JSON unless the option is one."""
    hint = next((str(hint) for _, field, hint in fields() if field == name), "")
    if not isinstance(value, str) or "str" in hint or "Literal" in hint:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # refused with the option's name


class ReplicaLLM(AsyncLLM):
    """The engine of one replica.  A request may be at another: aborts go to all of them."""

    async def abort(self, request_ids: str | Iterable[str], reason: str = "abort_user") -> dict[str, str]:
        """Abort requests, at whichever replica they are."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return await self._at_all_replicas("abort", names, reason)

    async def abort_group(self, group_id: str, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of a group."""
        return await self._at_all_replicas("abort_group", group_id, reason)

    async def abort_prefix(self, prefix: str, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests whose id begins so."""
        return await self._at_all_replicas("abort_prefix", prefix, reason)

    async def abort_all(self, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of all replicas."""
        return await self._at_all_replicas("abort_all", reason)

    async def abort_here(self, method: str, *args: Any) -> dict[str, str]:
        """The same at this replica."""
        return await getattr(AsyncLLM, method)(self, *args)

    async def _at_all_replicas(self, method: str, *args: Any) -> dict[str, str]:
        results = [await self.abort_here(method, *args)]  # this one may be stopping, and unknown to the handle
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        answers = await handle.broadcast("abort", method, *args).results_async(return_exceptions=True)
        results += [answer for answer in answers if isinstance(answer, dict)]
        return best(results)


def best(results: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The result of each id at the replica that had it."""
    merged: dict[str, str] = {}
    for result in results:
        for name, value in result.items():
            known = merged.get(name, ABORT_RESULTS[-1])
            merged[name] = min(known, value, key=ABORT_RESULTS.index)
    return merged


class Replica:
    """A replica.  `alone`: there is never another."""

    def __init__(self, options: Mapping[str, Any], alone: bool) -> None:
        self._config = resolve(Config.make(**options))
        self._alone = alone
        self._llm = ReplicaLLM.from_config(self._config)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called once by Serve, before the first request; raises StartError."""
        await self._llm.start()
        app = build_app(self._llm, self._config)
        app.add_middleware(BehindProxy, config=self._config, alone=self._alone)
        return app

    async def abort(self, method: str, *args: Any) -> dict[str, str]:
        return await self._llm.abort_here(method, *args)

    async def check_health(self) -> None:
        """Raises if Serve is to replace this replica."""
        if self._llm.dead is not None or self._llm.hung:
            raise RuntimeError("the engine is dead" if self._llm.dead else "the engine hangs")

    async def __del__(self) -> None:
        workers.stop()
        await self._llm.shutdown()


class BehindProxy:
    """Middleware that refuses what would change one replica of several, unless it is `alone`.  Serve's proxy gives
    every request a header X-Request-Id, which would contradict an id in the body: it is left out."""

    def __init__(self, app: ASGIApp, config: Config, alone: bool) -> None:
        self._app = app
        control = (endpoint.path for endpoint in endpoints(config) if endpoint.control)
        self._control = frozenset(() if alone else control)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope).rstrip("/") if scope["type"] == "http" else ""
        if path in self._control and scope["method"] == "POST":
            error = RequestError(
                f"{path} would act on one replica of several: deploy with num_replicas 1, or serve with "
                "--data-parallel-size",
                code="several_replicas",
            )
            await errors.response(error)(scope, receive, send)
            return
        if scope["type"] == "http":
            scope = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"x-request-id"]}
        await self._app(scope, receive, send)
