"""Bodies of Anthropic's routes.

Fields of Anthropic's are declared here; sampling parameters and options that it does not have come from `params`, under
the names that they have on the other routes.  Blocks and tools are checked where they are read.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from tokserve.dialects.openai.schemas import NOT_OF_RESPONSES, SAMPLING, OptionsModel, RequestBody
from tokserve.server import compat
from tokserve.server.http.declared import OPTIONS, model

NOT_OF_MESSAGES = (*NOT_OF_RESPONSES, "stop", "logprob_token_ids", "logprobs_mode")
MIN_BUDGET = 1024


class ThinkingOptions(OptionsModel):
    """Whether the model thinks before it answers.  The budget is checked, and not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=MIN_BUDGET)


class JsonOutputOptions(OptionsModel):
    """The schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(OptionsModel):
    """How much the model thinks, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputOptions | None = None


class ToolChoiceOptions(OptionsModel):
    """Whether tools are called; `name` with the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensBody(RequestBody):
    """The body of /v1/messages/count_tokens: a conversation."""

    others: ClassVar[compat.FieldTable] = compat.MESSAGES

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: JsonOutputOptions | None = None  # its name before output_config
    chat_template_kwargs: dict[str, Any] | None = None


_MessagesFields: Any = model(
    "_MessagesFields", CountTokensBody, (*OPTIONS, *(f for f in SAMPLING if f.name not in NOT_OF_MESSAGES))
)


class MessagesBody(_MessagesFields):  # type: ignore[misc]
    """The body of /v1/messages: a conversation, and how to continue it."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    repetition_detection: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
