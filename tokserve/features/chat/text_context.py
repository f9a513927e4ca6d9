"""`TextContext`: the chat template of a server, and how its model writes tool calls and reasoning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokserve.base.errors import RequestError, StartError
from tokserve.features.chat import tool_formats
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.output_format import Thinking, ToolFormat
from tokserve.features.chat.readers import plugins
from tokserve.server.serving import Serving

logger = logging.getLogger(__name__)
INNER = ("content", "tool_calls")  # lists within a message


class TextContext:
    """What the routes of conversations share; `serving.state_of(TextContext)` is a server's."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._options = serving.config.server

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, the operator's or the model's own."""
        return ChatTemplate(
            self._serving.tokenizer,
            self._options.chat_template,
            self._options.default_chat_template_kwargs,
            special_tokens=self._options.special_tokens_in_content,
        )

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether the chat template takes system messages between other turns."""
        return self.template.takes_later_system

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None: unknown, or they are not to be parsed.  Raises StartError."""
        if self._options.enable_auto_tool_choice is False:
            return None
        form = self._find_format(self.plugin_rows.tools + tool_formats.TOOL_FORMATS)
        if form is not None:
            self.template.write_calls_as(form)
        return form

    def _find_format(self, rows: Sequence[ToolFormat]) -> ToolFormat | None:
        """The format of the option, or that of the template."""
        if self._options.tool_call_parser != "auto":
            return tool_formats.named(rows, self._options.tool_call_parser, "tool_call_parser")
        recognised = tool_formats.recognize(self.template, rows)
        if recognised is not None:
            logger.info("tool calls: %s, as the chat template writes them", recognised.name)
        elif self._options.enable_auto_tool_choice:
            raise StartError(
                "enable_auto_tool_choice: the format of tool calls is not known from the model's chat template; "
                "give --tool-call-parser"
            )
        return recognised

    @cached_property
    def plugin_rows(self) -> plugins.Rows:
        """The formats of the plugin.  Raises StartError."""
        return plugins.load_plugin(self._options.tool_parser_plugin)

    @cached_property
    def thinking(self) -> Thinking | None:
        """How the model writes reasoning, if that is returned separately.  Raises StartError."""
        name = self._options.reasoning_parser
        if name == "none":
            return None
        rows = self.plugin_rows.thinking + tool_formats.THINKING
        if name != "auto":
            return tool_formats.named(rows, name, "reasoning_parser")
        recognised = tool_formats.recognize_thinking(self.template, rows)
        if recognised is not None:
            logger.info("reasoning: %s, as the chat template has it", recognised.name)
        return recognised

    def check_messages(self, messages: Sequence[Any], field: str) -> None:
        """Raise `RequestError` for more messages, parts of contents and tool calls than a chat may have."""
        limit = self._serving.config.limits.max_messages
        count = len(messages)
        if count <= limit:
            inner = (message.get(name) for message in messages if isinstance(message, dict) for name in INNER)
            count += sum(len(parts) for parts in inner if isinstance(parts, list))
        if count > limit:
            raise RequestError(
                f"{field} must have at most {limit} messages, parts and tool calls (--max-messages), got {count}",
                field=field,
            )


def check_start(serving: Serving) -> None:
    """Raise StartError for a template or parser that cannot be used, now instead of at the first request."""
    if serving.llm.tokenizer is None:
        return
    text = serving.state_of(TextContext)
    _ = text.tool_format, text.thinking
    if text.template.sources is None:
        logger.warning("the model has no chat template: chat is refused; --chat-template gives one")
