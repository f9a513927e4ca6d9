"""How a request starts: it is named, checked, sent to the engine, and refused before a response begins."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.datastructures import State
from starlette.requests import Request

from tokserve.base import log
from tokserve.base.errors import Overloaded, RequestError, invalid
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.generation_config import capped
from tokserve.client.inputs import POOLS, GenerateRequest, bare_id, token_prompt
from tokserve.client.request_state import RequestState
from tokserve.config import Config
from tokserve.protocol.columns import ReplyLimits
from tokserve.protocol.kv_transfer import transfer_params
from tokserve.protocol.messages import Ready
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.prompt import TokenPrompt
from tokserve.server.affinity import SESSION_HEADER, session_rank
from tokserve.server.generation import Generation, OutputStream
from tokserve.server.http import declared
from tokserve.server.http.body import RENDERED, given_rank, given_request_id
from tokserve.server.http.body_reader import BodyReader
from tokserve.server.http.client_names import ClientNames
from tokserve.server.http.disconnect import CancelOnDisconnect
from tokserve.server.http.workers import off_loop
from tokserve.server.observer import Observer
from tokserve.server.preparation import Preparation
from tokserve.server.replies import reply_size
from tokserve.server.served_model import ServedModel

GIVEN_ID = "tokserve.request_id"  # in the scope, once the body has been read: the client's own id, or None
PREPARATION = "tokserve.preparation"  # in the scope, from the same time: the request's `Preparation`
OBSERVED = "tokserve.observed"  # in the scope, once `start` has observers of the request
CHOICE_BYTES = 256  # of memory, about
_IN_GENERATED = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")  # a place in a grammar of the server's
_PARAM_NAMES = frozenset(SamplingParams.__struct_fields__)

Prompts = Sequence[Sequence[int] | bytes | TokenPrompt]
Reserve = Callable[[Sequence[Any]], Callable[[], None]]  # memory for the features of prompts; returns what releases it


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
            index_in_field = field[len(head) :] if field[len(head) :].startswith("[") else ""
            error.rename_field(self.others[head] + index_in_field)
            error.message = _IN_GENERATED.sub("", error.message)
        elif head == "token_ids":
            error.rename_field(self.prompt if index is None else f"{self.prompt}[{index}]")
        elif head in _PARAM_NAMES:
            error.rename_field(self.prefix + field)
        return error


class RequestStarter:
    """The one way from a body to the engine.

    A route makes a `GenerateRequest` of its body (`request_of`) and token ids of its prompts; `start` checks them,
    sends them and waits until the engine accepts them.  `observe`: the observers of a request.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: Config,
        model: ServedModel,
        bodies: BodyReader,
        clients: ClientNames,
        state: State,
        *,
        observe: Callable[[Request], list[Observer]],
        reserve: Sequence[Reserve],
        keep_alive: float,
    ) -> None:
        self._llm = llm
        self._config = config
        self._model = model
        self._bodies = bodies
        self._clients = clients
        self._state = state
        self._observe = observe
        self._reserve = reserve
        self._keep_alive = keep_alive
        self._draft_report = config.speculation.per_request_spec_decode_metrics
        plan = config.speculation.resolved()
        self._most_drafts = 0 if plan.method == "none" else plan.num_drafts

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
            request.scope[PREPARATION] = Preparation(self._llm, request_id, body.group_id, is_sent=is_sent)
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
        options = declared.options(body, self._model.adapter(body.model))
        rank = given_rank(request, options.data_parallel_rank)
        if rank is None and (session_id := request.headers.get(SESSION_HEADER)):
            rank = session_rank(self._llm, session_id)
        if rank != options.data_parallel_rank:
            options = msgspec.structs.replace(options, data_parallel_rank=rank)
        if options.spec_decode_metrics is None and self._draft_report != "none":
            options = msgspec.structs.replace(options, spec_decode_metrics=self._draft_report)
        if hasattr(body, "kv_transfer_params") and body.kv_transfer_params is not None:
            if self._config.kv.kv_transfer_config is None:
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
        if self._config.model.runner == "pooling":
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
        params = capped(generate.task, self._model.output_cap) if isinstance(generate.task, SamplingParams) else None
        if params is not None:
            self.check_generates()
            generate = msgspec.structs.replace(generate, task=params)
            tasks = [capped(task, self._model.output_cap) for task in tasks]
        if search is not None and self._model.output_cap is not None:
            search.limit(self._model.output_cap)
        request.scope[OBSERVED] = True
        generation = Generation(generate.request_id, 1 if params is None else params.n, self._observe(request))
        generation.is_stream, generation.keep_alive = generate.options.stream, self._keep_alive
        generation.rename = fields.rename
        generation.draft_report = generate.options.spec_decode_metrics or "none"
        generation.most_drafts = self._most_drafts
        generation.reports_times = self._config.replies.enable_per_request_metrics
        if generate.options.draft_token_ids is not None:
            generation.prediction_len = len(generate.options.draft_token_ids)
        if generate.text:
            generation.fingerprint = self._model.fingerprint
        generation.started()
        accepted = False
        try:
            if self._state.draining:
                raise Overloaded("the server is shutting down", retry_after=5, code="draining")
            states = await self._prepare(request, generate, prompts, fields, tasks)
            self._reserve_features(generation, prompts)
            if params is not None:
                self._check_reply(generate, tasks or [params], states, fields, entry_bytes)
            if request.scope.get(GIVEN_ID) is not None:
                await self._llm.until_unused(generate.request_id, sum(len(state.choices) for state in states))
            generation.streams = self._submit(request, generate, prompts, states, fields, search)
            self._bodies.release(request)
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

    async def check(
        self, request: Request, generate: GenerateRequest, prompts: Prompts, fields: FieldPaths
    ) -> list[list[int]]:
        """Refuse what `start` would refuse, without starting.  Returns the forbidden token sequences."""
        states = await self._prepare(request, generate, prompts, fields)
        task = states[-1].engine_requests[0].task if states else None
        return task.bad_token_sequences if isinstance(task, SamplingParams) else []

    def _submit(
        self,
        request: Request,
        generate: GenerateRequest,
        prompts: Prompts,
        states: Sequence[RequestState],
        fields: FieldPaths,
        search: Search | None,
    ) -> Sequence[OutputStream]:
        client, preparation = self._clients.name(request.scope), request.scope[PREPARATION]
        if search is None:
            announcement = preparation.take()
            try:
                return self._llm.submit(states, client, announcement)
            finally:
                if announcement is not None:
                    announcement.end()
        try:
            search.check(self._llm.ready, self._config.model.max_logprobs)
        except RequestError as error:
            raise fields.rename(error) from None
        vocab = self._llm.ready.vocab_size
        tokens = [token_prompt(ids, vocab) for ids in prompts]
        return search.begin(self._llm, generate, tokens, client, preparation.take())

    def _reserve_features(self, generation: Generation, prompts: Prompts) -> None:
        """Reserve memory for the features of its prompts until it ends.  Raises Overloaded."""
        features = [feature for prompt in prompts if isinstance(prompt, TokenPrompt) for feature in prompt.features]
        if features:
            for reserve in self._reserve:
                generation.on_close = reserve(features)

    def _check_reply(
        self,
        generate: GenerateRequest,
        tasks: Sequence[SamplingParams],
        states: Sequence[RequestState],
        fields: FieldPaths,
        entry_bytes: int,
    ) -> None:
        """`tasks`: one for all prompts, or one per prompt."""
        ready = self._llm.ready
        limits = ReplyLimits(ready.max_model_len, ready.vocab_size, self._config.model.max_sampling_mask, ready.facts)
        sizes: Counter[str] = Counter()
        for index, params in enumerate(tasks):
            prompts = states if len(tasks) == 1 else states[index : index + 1]
            sizes += reply_size.reply_sizes(
                [state.prompt_len for state in prompts],
                self._model.with_masks(params),
                limits,
                stream=generate.options.stream,
                score_each=generate.score_each,
                entry_bytes=entry_bytes,
            )
        try:
            reply_size.check_reply_size(sizes, self._config.limits.max_reply_bytes)
        except RequestError as error:
            raise fields.rename(error) from None

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
                    prompt = ids if isinstance(ids, TokenPrompt) else token_prompt(ids, self._llm.ready.vocab_size)
                    task = tasks[index] if tasks else params
                    one = msgspec.structs.replace(generate, prompt=prompt, task=task, first_choice=index * n)
                    states.append(self._llm.prepare(one))
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
