"""A beam search that runs by itself, and its results as streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from tokserve.base.errors import RequestError
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.inputs import GenerateRequest
from tokserve.client.outputs import ChoiceOutput
from tokserve.features.beams.beam_search import BeamRun, BeamSearchParams
from tokserve.protocol.messages import Ready
from tokserve.protocol.prompt import TokenPrompt, unpack_ids
from tokserve.text.detokenizer import Detokenizer


class BeamStream:
    """The results of one prompt of a run, read as a `Stream` is: all of them at the end."""

    def __init__(self, search: BeamTask, index: int) -> None:
        prompt = search.run.prompts[index]
        self.seed, self.num_choices = 0, search.run.params.beam_width
        self.prompt_len = len(prompt.ids) // 4
        self.prompt_ids = unpack_ids(prompt.ids)
        self.placeholders = [(feature.start, feature.length) for feature in prompt.features]
        self._search, self._index = search, index
        self._taken = False

    async def accepted(self) -> None:
        """Wait until the engine accepts the first step.  Raises the errors of a refusal."""
        await self._search.accepted()

    def take(self) -> Iterator[ChoiceOutput]:
        """The results, once.  Raises what ended the search."""
        if self._search.done and not self._taken:
            self._taken = True
            yield from self._search.outputs(self._index)

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` when there is something to take."""
        self._search.listeners[self._index] = listener

    def stall(self, stalled: bool) -> None:
        """Does nothing: all output comes at the end."""

    async def aclose(self) -> None:
        self._search.cancel()


class BeamTask:
    """A run in a task of its own, and its streams, one per prompt."""

    def __init__(
        self,
        llm: AsyncLLM,
        request: GenerateRequest,
        prompts: Sequence[TokenPrompt],
        params: BeamSearchParams,
        client: str,
        announcement: RequestAnnouncement | None = None,
    ) -> None:
        self.run = BeamRun(llm, request, prompts, params, client, announcement)
        self.listeners: list[Callable[[], None] | None] = [None] * len(prompts)
        self.streams = [BeamStream(self, index) for index in range(len(prompts))]
        self._llm, self._announcement = llm, announcement
        self._admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._admission.add_done_callback(lambda admission: admission.cancelled() or admission.exception())  # retrieved
        self._task = asyncio.ensure_future(self._search())
        self._task.add_done_callback(self._end)

    @property
    def done(self) -> bool:
        """Whether there are results, or an error."""
        return self._task.done()

    async def accepted(self) -> None:
        """Wait until the engine accepts the first step.  Raises the errors of a refusal."""
        await asyncio.shield(self._admission)

    def outputs(self, index: int) -> list[ChoiceOutput]:
        """The results of a prompt.  Raises what ended the search."""
        return self._task.result()[index]

    def cancel(self) -> None:
        """Abort the step that is under way."""
        self._task.cancel()

    async def _search(self) -> list[list[ChoiceOutput]]:
        """The results of each prompt."""
        await self.run.run(self._accept, lambda: None)
        indices = range(len(self.streams))
        return await asyncio.to_thread(lambda: [self.run.outputs(index, self._detokenizer) for index in indices])

    def _accept(self) -> None:
        if not self._admission.done():
            self._admission.set_result(None)

    def _end(self, task: asyncio.Task[list[list[ChoiceOutput]]]) -> None:
        if self._announcement is not None:  # the run has not begun, if it was cancelled at once
            self._announcement.end()
        error = None if task.cancelled() else task.exception()
        if not self._admission.done():
            if error is None:
                self._admission.cancel()
            else:
                self._admission.set_exception(error)
        for listener in self.listeners:
            if listener is not None:
                listener()

    def _detokenizer(self) -> Detokenizer:
        tokenizer, params = self._llm.tokenizer, self.run.params
        if tokenizer is None:
            raise RequestError("this server has no tokenizer (--tokens-only): send token ids", code="tokens_only")
        return Detokenizer(tokenizer, skip_special=params.skip_special_tokens)


class BeamRequest:
    """A beam search as a `server.serving.Search`."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.params = params

    def limit(self, max_tokens: int) -> None:
        """Look for outputs of at most this length."""
        self.params.max_tokens = min(self.params.max_tokens, max_tokens)

    def check(self, ready: Ready, max_logprobs: int) -> None:
        """Raise RequestError for what the engine cannot do."""
        self.params.validate(ready, max_logprobs)

    def begin(
        self,
        llm: AsyncLLM,
        request: GenerateRequest,
        prompts: Sequence[TokenPrompt],
        client: str,
        announcement: RequestAnnouncement | None,
    ) -> Sequence[BeamStream]:
        """Begin the search in a task of its own; the results of each prompt."""
        return BeamTask(llm, request, prompts, self.params, client, announcement).streams


def search_of(params: BeamSearchParams | None) -> BeamRequest | None:
    """The search that a request asks for, if it does."""
    return None if params is None else BeamRequest(params)
