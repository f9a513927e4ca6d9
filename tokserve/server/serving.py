"""What every route needs: the engine's client, the options, and the one way to start a request.

A route makes a `GenerateRequest` of its body (`Serving.request_of`) and token ids of its prompts.  `Serving.start`
checks them, sends them and waits until the engine accepts them; the route renders the output.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.datastructures import State
from starlette.requests import Request

from tokserve import __version__
from tokserve.base import log
from tokserve.base.errors import EngineDead, NotFound, Overloaded, RequestError, invalid
from tokserve.base.rooms import contributions
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.form_defaults import FormDefaults
from tokserve.client.generation_config import (
    RECOMMENDED,
    capped,
    generation_defaults,
    log_what_is_not_followed,
    output_cap,
)
from tokserve.client.inputs import POOLS, GenerateRequest, bare_id, token_prompt
from tokserve.client.request_state import RequestState
from tokserve.config import Config
from tokserve.protocol.column_table import asked_columns
from tokserve.protocol.columns import LOGPROBS
from tokserve.protocol.kv_transfer import transfer_params
from tokserve.protocol.messages import Ready
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.prompt import TokenPrompt
from tokserve.server.affinity import SESSION_HEADER, session_rank
from tokserve.server.api_process import ApiProcess
from tokserve.server.generation import Generation, OutputStream
from tokserve.server.http import declared
from tokserve.server.http.body import RENDERED, encode_json, given_rank, given_request_id
from tokserve.server.http.body_reader import BodyReader
from tokserve.server.http.client_names import ClientNames
from tokserve.server.http.disconnect import CancelOnDisconnect
from tokserve.server.http.workers import off_loop
from tokserve.server.observer import Measure, Observer, ServerObserver
from tokserve.server.preparation import Preparation
from tokserve.server.replies import reply_size
from tokserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SERVING = ("running", "updating")  # states of the engine in which tokens are made
GIVEN_ID = "tokserve.request_id"  # in the scope, once the body has been read: the client's own id, or None
PREPARATION = "tokserve.preparation"  # in the scope, from the same time: the request's `Preparation`
OBSERVED = "tokserve.observed"  # in the scope, once `start` has observers of the request
CHOICE_BYTES = 256  # of memory, about
SHOWN = 20  # adapters that an error lists
_IN_GENERATED = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")  # a place in a grammar of the server's
_PARAM_NAMES = frozenset(SamplingParams.__struct_fields__)


Prompts = Sequence[Sequence[int] | bytes | TokenPrompt]
Trace = Callable[[Mapping[str, str]], Observer]  # an observer of the request with these headers


T = TypeVar("T")


class Search(Protocol):
    """A search for outputs in the place of drawing them."""

    def limit(self, max_tokens: int) -> None:
        """Look for outputs of at most this length."""

    def check(self, ready: Ready, max_logprobs: int) -> None:
        """Raise RequestError for what the engine cannot do."""

    def begin(
        self,
        llm: AsyncLLM,
        request: GenerateRequest,
        prompts: Sequence[TokenPrompt],
        client: str,
        announcement: RequestAnnouncement | None,
    ) -> Sequence[OutputStream]:
        """Begin; the results of each prompt."""


class FieldPaths(msgspec.Struct, frozen=True):
    """The paths of fields in a route's body, for errors.  `prefix`: the path of the sampling parameters; `others`: of
    fields with another name."""

    prompt: str
    prefix: str = ""
    others: Mapping[str, str] = {}

    def rename(self, error: RequestError, index: int | None = None) -> RequestError:
        """The error with the field as the client wrote it; `index`: of the prompt among several."""
        field = error.field
        if field is None:
            return error
        head = re.split(r"[.[]", field, maxsplit=1)[0]
        if head in self.others:
            error.rename_field(self.others[head])
            error.message = _IN_GENERATED.sub("", error.message)
        elif head == "token_ids":
            error.rename_field(self.prompt if index is None else f"{self.prompt}[{index}]")
        elif head in _PARAM_NAMES:
            error.rename_field(self.prefix + field)
        return error


class Serving:
    """The state shared by the routes of one app."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: Config,
        state: State,
        *,
        keep_alive: float = 15.0,
        api_process: ApiProcess | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.llm = llm
        self.config = config
        self.state = state
        self.keep_alive = keep_alive
        self._trace = trace
        self._states: dict[type, Any] = {}  # of rooms
        self.names = config.server.served_model_name or [config.model.model]
        self.name = self.names[0]
        # other names of the same model that clients send: its directory, and names without their first part
        self._aliases = {config.model.model, *(name.rstrip("/").rpartition("/")[2] for name in self.names)}
        self.bodies = BodyReader(config.limits, config.server.max_body_mb << 20)
        self.text = not config.server.tokens_only
        self.form_defaults = FormDefaults.of(config.server)
        self.draft_report = config.speculation.per_request_spec_decode_metrics
        plan = config.speculation.resolved()
        self.most_drafts = 0 if plan.method == "none" else plan.num_drafts
        self._output_cap = output_cap(config.model)
        self.defaults: dict[str, Any] = {}
        if self.text:
            recommended = generation_defaults(config.model)
            self.defaults = {name: getattr(recommended, name) for name in RECOMMENDED}
            if api_process is None or api_process.index == 0:
                log_what_is_not_followed(config.model)
        self.api_process = api_process or ApiProcess(0, int(time.time()), None)
        self._clients = ClientNames(config.server)
        self._reserve = [reserve for _, reserve in contributions("reserve")]
        self._observed_by: list[ServerObserver] = [self.state_of(kind) for _, kind in contributions("observers")]

    def state_of(self, kind: Callable[[Serving], T]) -> T:
        """What a room keeps for this server: an object of the class, made of this at the first call."""
        assert isinstance(kind, type)
        if kind not in self._states:
            self._states[kind] = kind(self)
        state: T = self._states[kind]
        return state

    def client_name(self, request: Request) -> str:
        """Who sends the request: those of one name take turns with those of others."""
        return self._clients.name(request.scope)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; there is none on a tokens-only server."""
        if self.llm.tokenizer is None:
            raise RequestError("this server has no tokenizer (--tokens-only): send token ids", code="tokens_only")
        return self.llm.tokenizer

    def check_text(self, text: str, field: str, min_bytes: int = 0) -> None:
        """Raise `RequestError` for a text that is too long for the context, without tokenizing it.  Texts of up to
        `min_bytes` bytes pass always."""
        self.tokenizer.check_fits(text, self.llm.ready.max_model_len, field, min_bytes)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `RequestError` for an id that is in neither the model's vocabulary nor the tokenizer's."""
        limit = max(self.llm.ready.vocab_size, self.tokenizer.vocab_size)
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            index = next(i for i, token in enumerate(ids) if not 0 <= token < limit)
            raise RequestError(f"{field}[{index}] must be a token id from 0 to {limit - 1}", field=f"{field}[{index}]")

    @property
    def fingerprint(self) -> str:
        """A digest of what tokens depend on besides the request: the program, the model's options, the bound ops and
        their arithmetic, and the weights that serve now."""
        status = self.llm.status
        parts = [self._options, status.weight_version, status.epoch]
        return f"tokserve-{__version__}-{hashlib.sha256(encode_json(parts)).hexdigest()[:8]}"

    @cached_property
    def _options(self) -> str:
        facts = self.llm.ready.facts
        options = [self.config.model, self.config.cache.kv_cache_dtype, facts.get("ops"), facts.get("arithmetic")]
        if self.config.parallel.num_ranks > 1:  # ranks add what each has computed
            options += [facts["tensor_parallel_size"], facts["pipeline_parallel_size"]]
        return encode_json(options).decode()

    async def probe(self, command: str, seconds: float) -> None:
        """Call a command of the engine that takes no arguments.  Raises EngineDead if it does not answer in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.llm.call(command)
        except TimeoutError:
            raise EngineDead(f"the engine has not answered for {seconds:g} s", code="engine_hung") from None

    def check_model(self, name: str | None) -> None:
        """Raise `NotFound` unless `name` is absent or empty, one this server answers to, or that of an adapter."""
        if name and not self._knows(name):
            served = ", ".join([*self.names, *(adapter.name for adapter in self.llm.status.adapters[:SHOWN])])
            raise NotFound(
                f"the model {name[:200]!r} does not exist; this server serves {served}",
                field="model",
                code="model_not_found",
            )

    async def find_model(self, name: str | None) -> None:
        """Like `check_model`, but asks the engine about an unknown name first: another front end may just have loaded
        the adapter."""
        if name and self.config.lora.enable_lora and not self._knows(name):
            await self.llm.refresh(self.config.server.liveness_timeout)
        self.check_model(name)

    def _knows(self, name: str) -> bool:
        return self._is_models(name) or self._is_adapter(name)

    def _is_models(self, name: str) -> bool:
        return name in self.names or name in self._aliases

    def _is_adapter(self, name: str) -> bool:
        return any(adapter.name == name for adapter in self.llm.status.adapters)

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
        task = msgspec.structs.replace(params, return_sampling_mask=self.has_masks(params))
        return tuple([name for name in asked_columns(task) if name != LOGPROBS])

    def has_masks(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters returns sampling masks."""
        if params.return_sampling_mask is None:
            return self.config.model.return_sampling_mask
        return params.return_sampling_mask

    def name_request(self, request: Request, body: Any, *, is_sent: bool = True) -> str:
        """The request's id: the client's, or a new one.  From here on, aborts find the request, unless `is_sent` is
        False: it never goes to the engine."""
        if PREPARATION not in request.scope:
            client_id = given_request_id(request, body.request_id, header_wins=not is_sent)
            request_id = client_id or secrets.token_hex(16)
            if request_id.startswith(RENDERED):  # made by render: it may be sent many times at once
                request_id, client_id = f"{request_id}-{secrets.token_hex(8)}", None
            request.scope[GIVEN_ID] = client_id
            log.request_id.set(bare_id(request_id))  # in this request's task: what it logs from here on carries the id
            request.scope[PREPARATION] = Preparation(self.llm, request_id, body.group_id, is_sent=is_sent)
        preparation: Preparation = request.scope[PREPARATION]
        return preparation.request_id

    def request_of(
        self,
        request: Request,
        body: Any,
        params: SamplingParams | PoolingParams,
        *,
        text: bool = True,
        score_each: bool = False,
    ) -> GenerateRequest:
        """What the body of any generating route asks for, without the prompts: `start` puts them in."""
        request_id = self.name_request(request, body)
        options = declared.options(body, self.adapter(body.model))
        rank = given_rank(request, options.data_parallel_rank)
        if rank is None and (session_id := request.headers.get(SESSION_HEADER)):
            rank = session_rank(self.llm, session_id)
        if rank != options.data_parallel_rank:
            options = msgspec.structs.replace(options, data_parallel_rank=rank)
        if options.spec_decode_metrics is None and self.draft_report != "none":
            options = msgspec.structs.replace(options, spec_decode_metrics=self.draft_report)
        if hasattr(body, "kv_transfer_params") and body.kv_transfer_params is not None:
            if self.config.kv.kv_transfer_config is None:
                raise invalid("kv_transfer_params", "is not supported without --kv-transfer-config", code="unsupported")
            transfer = transfer_params(body.kv_transfer_params)
            options = msgspec.structs.replace(options, kv_transfer_params=transfer)
        return GenerateRequest(
            request_id=request_id,
            prompt=TokenPrompt(b""),
            task=params,
            options=options,
            text=text,
            score_each=score_each,
        )

    def check_generates(self) -> None:
        if self.config.model.runner == "pooling":
            raise RequestError(POOLS, field="model", code="unsupported")

    async def start(
        self, request: Request, generate: GenerateRequest, prompts: Prompts, fields: FieldPaths, *,
        entry_bytes: int = reply_size.OBJECT_BYTES, tasks: Sequence[SamplingParams] = (),
        search: Search | None = None,
    ) -> Generation:  # fmt: skip
        """Send the prompts to the engine and wait until it accepts them.  `entry_bytes`: of a logprob in the reply.
        `tasks`: one per prompt, with the same n, instead of the request's for all.  `search`: for its outputs.

        Everything that can be refused is refused here, before a response begins.  Raises `ClientDisconnected` if the
        client leaves.
        """
        params = capped(generate.task, self._output_cap) if isinstance(generate.task, SamplingParams) else None
        if params is not None:
            self.check_generates()
            generate = msgspec.structs.replace(generate, task=params)
            tasks = [capped(task, self._output_cap) for task in tasks]
        if search is not None and self._output_cap is not None:
            search.limit(self._output_cap)
        request.scope[OBSERVED] = True
        generation = Generation(generate.request_id, 1 if params is None else params.n, self._observers(request))
        generation.is_stream, generation.keep_alive = generate.options.stream, self.keep_alive
        generation.rename = fields.rename
        generation.draft_report = generate.options.spec_decode_metrics or "none"
        generation.most_drafts = self.most_drafts
        generation.reports_times = self.config.replies.enable_per_request_metrics
        if generate.options.draft_token_ids is not None:
            generation.prediction_len = len(generate.options.draft_token_ids)
        if generate.text:
            generation.fingerprint = self.fingerprint
        generation.started()
        accepted = False
        try:
            if self.state.draining:
                raise Overloaded("the server is shutting down", retry_after=5, code="draining")
            states = await self._prepare(request, generate, prompts, fields, tasks)
            self._reserve_features(generation, prompts)
            if params is not None:
                self._check_reply(generate, tasks or [params], states, fields, entry_bytes)
            if request.scope.get(GIVEN_ID) is not None:
                await self.llm.until_unused(generate.request_id, sum(len(state.choices) for state in states))
            generation.streams = self._submit(request, generate, prompts, states, fields, search)
            self.bodies.release(request)
            async with CancelOnDisconnect(request.receive):
                try:
                    await generation.streams[0].accepted()
                except RequestError as error:
                    raise fields.rename(error) from None
            accepted = True
        except RequestError as error:
            generation.refused(error)
            raise
        finally:
            if not accepted:
                await generation.close()
        generation.accepted(params)
        return generation

    def _submit(
        self,
        request: Request,
        generate: GenerateRequest,
        prompts: Prompts,
        states: Sequence[RequestState],
        fields: FieldPaths,
        search: Search | None,
    ) -> Sequence[OutputStream]:
        client, preparation = self.client_name(request), request.scope[PREPARATION]
        if search is None:
            announcement = preparation.take()
            try:
                return self.llm.submit(states, client, announcement)
            finally:
                if announcement is not None:
                    announcement.end()
        try:
            search.check(self.llm.ready, self.config.model.max_logprobs)
        except RequestError as error:
            raise fields.rename(error) from None
        vocab = self.llm.ready.vocab_size
        tokens = [token_prompt(ids, vocab) for ids in prompts]
        return search.begin(self.llm, generate, tokens, client, preparation.take())

    def _reserve_features(self, generation: Generation, prompts: Prompts) -> None:
        """Reserve memory for the features of its prompts until it ends.  Raises Overloaded."""
        features = [feature for prompt in prompts if isinstance(prompt, TokenPrompt) for feature in prompt.features]
        if features:
            for reserve in self._reserve:
                generation.on_close = reserve(self, features)

    def _check_reply(
        self,
        generate: GenerateRequest,
        tasks: Sequence[SamplingParams],
        states: Sequence[RequestState],
        fields: FieldPaths,
        entry_bytes: int,
    ) -> None:
        """`tasks`: one for all prompts, or one per prompt."""
        ready = self.llm.ready
        size = 0
        for index, params in enumerate(tasks):
            prompts = states if len(tasks) == 1 else states[index : index + 1]
            size += reply_size.reply_bytes(
                [state.prompt_len for state in prompts],
                params,
                ready.max_model_len,
                ready.vocab_size,
                stream=generate.options.stream,
                score_each=generate.score_each,
                entry_bytes=entry_bytes,
                max_mask=self.config.model.max_sampling_mask if self.has_masks(params) else 0,
                routed_bytes=ready.facts.get("routed_bytes", 0),
            )
        try:
            reply_size.check(size, self.config.limits.max_reply_bytes, tasks[-1])
        except RequestError as error:
            raise fields.rename(error) from None

    def _observers(self, request: Request) -> list[Observer]:
        observers = [observer for server in self._observed_by for observer in server.observe(request)]
        if self._trace is not None:
            observers.append(self._trace(request.headers))
        return observers

    def observe_lag(self, late: float) -> None:
        """The event loop woke a sleeper `late` seconds after its time."""
        for server in self._observed_by:
            server.lag(late)

    async def measures(self) -> list[Measure]:
        """What rooms export as metrics now."""
        return [measure for server in self._observed_by for measure in await server.measures()]

    def log_refusal(self, request: Request, error: RequestError) -> None:
        """Report a request that was refused before `start`, such as one whose body cannot be read."""
        if OBSERVED not in request.scope:
            for server in self._observed_by:
                server.unread(error)

    async def check(
        self, request: Request, generate: GenerateRequest, prompts: Prompts, fields: FieldPaths
    ) -> list[list[int]]:
        """Refuse what `start` would refuse, without starting.  Returns the forbidden token sequences."""
        states = await self._prepare(request, generate, prompts, fields)
        task = states[-1].engine_requests[0].task if states else None
        return task.bad_token_sequences if isinstance(task, SamplingParams) else []

    async def _prepare(
        self,
        request: Request,
        generate: GenerateRequest,
        prompts: Prompts,
        fields: FieldPaths,
        tasks: Sequence[SamplingParams] = (),
    ) -> list[RequestState]:
        """Check the prompts; errors name fields as the client wrote them."""
        params = generate.task
        n = params.n if isinstance(params, SamplingParams) else 1

        def prepare() -> list[RequestState]:
            states: list[RequestState] = []
            try:
                for index, ids in enumerate(prompts):
                    prompt = ids if isinstance(ids, TokenPrompt) else token_prompt(ids, self.llm.ready.vocab_size)
                    task = tasks[index] if tasks else params
                    one = msgspec.structs.replace(generate, prompt=prompt, task=task, first_choice=index * n)
                    states.append(self.llm.prepare(one))
            except RequestError as error:
                raise fields.rename(error, len(states) if len(prompts) > 1 else None) from None
            return states

        return await off_loop(request, _size(prompts, params), prepare)


def _size(prompts: Prompts, params: SamplingParams | PoolingParams) -> int:
    """About how many bytes have to be checked and made for a request."""
    ids = sum(len(prompt.ids) if isinstance(prompt, TokenPrompt) else 4 * len(prompt) for prompt in prompts)
    if not isinstance(params, SamplingParams):
        return ids
    listed = sum(map(len, params.bad_words)) + sum(map(len, params.stop_strings()))
    return ids + CHOICE_BYTES * params.n * len(prompts) + 8 * listed
