"""Conversations to token ids, by the checkpoint's Jinja chat template.

Templates are written for transformers; the environment offers only what they use (it is a sandbox: a template may come
with a request).  Messages are plain dictionaries.  Every error names a field of the request, or is a StartError.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokserve.base.errors import RequestError, StartError, invalid
from tokserve.features.chat.missing_ids import missing_id
from tokserve.features.chat.output_format import ToolFormat
from tokserve.features.chat.templates import histories
from tokserve.features.chat.templates.histories import REASONING_NAMES, Message, joined
from tokserve.features.chat.templates.jinja import FAULTS, compiled, render, render_marked, variables_of
from tokserve.features.chat.templates.special_text import HiddenTexts, SpecialTexts, Treatment
from tokserve.features.chat.templates.template_probes import (
    THOUGHT,
    before_answer,
    samples_of,
    shows_calls,
    takes_later_system,
    takes_objects,
    takes_parts,
    takes_several_calls,
    takes_text_with_thought,
    takes_thoughts,
    without_content,
)
from tokserve.features.chat.templates.written_calls import is_written, with_written_calls
from tokserve.features.images.parts import CHAT_KINDS, ImageSlots, UnreadImage, chat_part
from tokserve.text.tokenizer import Tokenizer

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}  # kind of a part, and the name of its text
STRINGS = ("name", "tool_call_id", "refusal", *REASONING_NAMES)  # fields of a message; others are the template's affair
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
NO_TOOLS = (
    "tools: this model's chat template does not show tools to the model: start the server with --chat-template FILE, a "
    'template that does; a call that tool_choice forces ("required" or a named function) needs no such template'
)
THOUGHT_MARKERS = ("<think>", "</think>", "[THINK]", "[/THINK]")  # that templates look for in an assistant's content
TEMPLATES_KEPT = 4  # templates of requests whose special tokens are known
IMAGE = {"type": "image"}  # a part, as templates expect it
IMAGE_ROLES = ("user", "assistant", "tool")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
DEVELOPER = re.compile(r"""["']developer["']""")  # in templates that have this role


class ChatTemplate:
    """Renders conversations with the tokenizer's template, or with `override`: a template file or a template.

    `defaults`: variables of the template where a conversation's `kwargs` do not set them.  `special_tokens`: what texts
    of a conversation become that spell special tokens (`special_text`): those tokens, text, or an error.
    Raises StartError for an override that cannot be read and for templates that do not compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        override: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        *,
        special_tokens: Treatment = "allow",
    ) -> None:
        self.tokenizer = tokenizer
        self._treatment = special_tokens
        self.call_format: ToolFormat | None = None  # of calls that the template does not show
        self._special_texts: dict[str | None, SpecialTexts] = {}  # by template of a request
        try:
            self._defaults = _checked_kwargs(defaults)
        except RequestError as error:
            raise StartError(f"option default_{error}") from None
        template = tokenizer.chat_template if override is None else _read_template(override)
        self._templates = {"default": template} if isinstance(template, str) else template or {}
        for name, source in self._templates.items():
            try:
                compiled(source)
            except FAULTS as error:
                which = "" if name == "default" else f" {name!r}"
                if override is not None:
                    raise StartError(f"option chat_template: it is not a valid Jinja template: {error}") from error
                raise StartError(
                    f"the chat template{which} of {tokenizer.source} is not a valid Jinja template: {error}; start the "
                    "server with another (--chat-template FILE)"
                ) from error
        if special_tokens == "text":
            _ = self._special(None).encoder  # now and not in a request

    @property
    def sources(self) -> str | dict[str, str] | None:
        """The template, several by name, or None."""
        return self._templates["default"] if list(self._templates) == ["default"] else dict(self._templates) or None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_special_tokens: bool = False,
        context: int | None = None,
        min_bytes: int = 0,
        **options: Any,
    ) -> list[int]:
        """Token ids of the conversation; `options` are those of `text`.

        `add_special_tokens`: add the tokenizer's to those of the template.  `context`: refuse a text of over
        `min_bytes` that cannot fit into so many tokens, before it is tokenized.
        """
        marked, hidden = self._render(messages, **options)
        rendered = marked if hidden is None else hidden.restored(marked)
        if context is not None:
            self.tokenizer.check_fits(rendered, context, "messages", min_bytes)
        try:
            ids = None if hidden is None else hidden.encode(marked, add_special_tokens=add_special_tokens)
            if ids is None:
                ids = self.tokenizer.encode(rendered, add_special_tokens=add_special_tokens)
            return ids
        except RequestError as error:
            error.field = "messages"
            raise

    def ids_behind(
        self, messages: Sequence[Message], mark: str, closing: str = "", *, anchor: str = "", **options: Any
    ) -> list[int] | None:
        """Token ids of what the template writes behind the last `mark`, a text of the messages, and `closing` after it.

        They are those that follow `anchor`, the text of a special token.  None if the template does not write the mark,
        or something else than `closing` behind it.  `options` are those of `text`.
        """
        marked, hidden = self._render(messages, **options)
        _, written, behind = marked.rpartition(mark)
        if not written or not behind.startswith(closing):
            return None
        behind = anchor + behind[len(closing) :]
        ids = None if hidden is None else hidden.encode(behind, add_special_tokens=False)
        if ids is None:
            rendered = behind if hidden is None else hidden.restored(behind)
            ids = self.tokenizer.encode(rendered, add_special_tokens=False)
        return ids[1:] if anchor else ids

    def takes_role_later(self, role: str) -> bool:
        """Whether the server's template writes a message of the system or a developer in its place between others."""
        if role == "developer" and not DEVELOPER.search(self._source(None, False)):
            return False
        return role not in ("system", "developer") or self.takes_later_system

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        """The conversation as text.  Raises RequestError naming `messages...`, `tools`, `chat_template` ...

        Options: `add_generation_prompt` None: unless `continue_final_message`.  `template` replaces the checkpoint's,
        or names one of several.  `kwargs` are further variables of the template, and `tools` and `documents` what it
        may show.  `must_show_tools` False: accept a template that does not show `tools`.  `images`: takes the images of
        the messages; None: they are refused.

        For a template without the role `developer`, its messages and those of the system become one at the start, and
        so do system messages in places where the template takes none; for one that does not iterate over parts of a
        content, they are joined by newlines, and one that cannot render the arguments of calls as objects gets them as
        text.  A message without content gets an empty one, unless the template treats an
        assistant's missing content differently.
        """
        rendered, hidden = self._render(messages, **options)
        return rendered if hidden is None else hidden.restored(rendered)

    def generation_spans(self, messages: Sequence[Message], **options: Any) -> list[tuple[int, int]] | None:
        """Where the parts lie in the conversation's text that the template marks as the assistant's, with
        `{% generation %}`; None: it marks none.  `options` are those of `text`."""
        spans: list[list[tuple[int, int]]] = []
        rendered, hidden = self._render(messages, spans=spans, **options)
        if not spans:
            return None
        if hidden is not None and hidden.restored(rendered) != rendered:
            raise invalid("messages", "must not spell special tokens where the assistant's part is marked")
        return spans[0]

    def _render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        must_show_tools: bool = True,
        images: ImageSlots | None = None,
        spans: list[list[tuple[int, int]]] | None = None,
    ) -> tuple[str, HiddenTexts | None]:
        """The conversation as text, and what is hidden in it.  `spans`: takes those of `generation_spans`."""
        continue_final_message = histories.is_continued(messages) or continue_final_message
        if add_generation_prompt and continue_final_message:
            raise invalid("continue_final_message", "and add_generation_prompt exclude each other")
        chat = [plain_message(i, one, images) for i, one in enumerate(histories.with_tool_calls(messages))]
        if not chat:
            raise invalid("messages", "must not be empty")
        if continue_final_message and chat[-1].get("content") is None:
            field = f"messages[{len(chat) - 1}].content"
            raise RequestError("continue_final_message needs a final message with content", field=field)
        given = {"tools": _objects("tools", tools), "documents": _objects("documents", documents)}
        more = _checked_kwargs(kwargs)
        source = self._source(template, given["tools"] is not None)
        hidden = self._hidden(source, template)
        if hidden is not None:
            chat, more = hidden.hide_messages(chat), hidden.hide("chat_template_kwargs", more)
            given = {name: hidden.hide(name, value) for name, value in given.items()}
        variables = self.tokenizer.special_tokens | self._defaults | more | given
        variables["add_generation_prompt"] = (
            not continue_final_message if add_generation_prompt is None else add_generation_prompt
        )
        _check_roles(chat, source)
        chat = self._with_system_in_place(chat, source)
        if self.call_format is not None and not shows_calls(source, self._special_tokens):
            chat = [with_written_calls(message, self.call_format) for message in chat]
        if not takes_several_calls(source, self._special_tokens):
            chat = histories.one_call_a_turn(chat)
        self._fit_messages(chat, source)
        mark = f"END{secrets.token_hex(16)} " if continue_final_message else ""
        if mark:
            marked = _marked_content(chat, mark)
        field = "messages" if template is None else "chat_template"
        try:
            rendered = _rendered(source, variables | {"messages": chat}, field, spans)
        except RequestError:
            if path := missing_id(messages, chat, lambda filled: _renders(source, variables | {"messages": filled})):
                raise invalid(path, "is required: the chat template needs it") from None
            raise
        if images is not None:
            images.check(rendered)
        if must_show_tools and given["tools"] is not None and "tools" not in variables_of(source):
            raise RequestError(NO_TOOLS, field="tools")
        if mark:
            rendered = _cut_at(rendered, mark, marked)
        return rendered if images is None else images.expanded(rendered), hidden

    def _hidden(self, source: str, template: str | None) -> HiddenTexts | None:
        """What will be hidden of a conversation for this template; None: nothing.  `template`: as in `text`."""
        if self._treatment == "allow":
            return None
        key = None if template is None or self.knows(template) else source
        return HiddenTexts(self._special(key), self._treatment)

    def _special(self, template: str | None) -> SpecialTexts:
        """The special tokens of conversations for a request's template, or (None) for the server's."""
        if template not in self._special_texts:
            if len(self._special_texts) > TEMPLATES_KEPT:
                self._special_texts.clear()
            sources = self._templates.values() if template is None else (template,)
            samples = samples_of(sources, self._special_tokens)
            self._special_texts[template] = SpecialTexts(self.tokenizer, [*sources, *samples], THOUGHT_MARKERS)
        return self._special_texts[template]

    def _with_system_in_place(self, chat: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
        """Developer and system messages where the template takes them, or as one system message at the start."""
        roles = ("system", "developer")
        if not DEVELOPER.search(source) and any(message["role"] == "developer" for message in chat):
            return histories.merged_at_start(chat, roles)
        if histories.has_later(chat, "system") and not takes_later_system(source, self._special_tokens):
            return histories.merged_at_start(chat, roles[:1])
        return chat

    @property
    def takes_later_system(self) -> bool:
        """Whether the template takes system messages between other turns; a server without a template takes none."""
        return bool(self._templates) and takes_later_system(self._source(None, False), self._special_tokens)

    def write_calls_as(self, form: ToolFormat) -> None:
        """Have calls of earlier turns written in the model's format where a template shows none."""
        self.call_format = form if is_written(form) else None

    def takes_several_calls(self, options: Mapping[str, Any]) -> bool:
        """Whether the template shows several calls of a message.  `options` are those of `text`."""
        source = self._source(options.get("template"), bool(options.get("tools")))
        return takes_several_calls(source, self._special_tokens)

    def before_answer(self, template: str | None = None, with_tools: bool = False) -> str | None:
        """What the template writes between a question and its answer; None: unknown.  `template` as in `text`."""
        if template is None and not self._templates:
            return None
        try:
            return before_answer(self._source(template, with_tools), self._special_tokens)
        except RequestError:
            return None

    @property
    def _special_tokens(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.tokenizer.special_tokens.items())

    def _fit_messages(self, chat: list[dict[str, Any]], source: str) -> None:
        """Contents that are absent or lists, reasoning and the arguments of calls, as the template takes them."""
        special = self._special_tokens
        for message in chat:
            calls = message.get("tool_calls")
            if calls and not takes_objects(source, special):
                message["tool_calls"] = [histories.with_text(call) for call in calls]
            if calls and not takes_text_with_thought(source, special):
                histories.move_text_to_thought(message)
            if "content" not in message:
                assistant = message["role"] == "assistant"
                message |= without_content(source, bool(calls), special) if assistant else {"content": ""}
            content, thought = message.get("content"), message.get("reasoning_content")
            if thought and message["role"] == "assistant" and takes_thoughts(source, special):
                message["content"] = [{"type": THOUGHT, THOUGHT: thought}, *_in_parts(content)]
            elif isinstance(content, list) and IMAGE not in content:
                in_parts = takes_parts(source, message["role"], special)
                message["content"] = content if in_parts else joined(content)

    def knows(self, template: str) -> bool:
        return template in self._templates

    def reads(self, variable: str, template: str | None = None, with_tools: bool = False) -> bool:
        """Whether the template, that of conversations with tools or of others, uses a variable; `template` as in
        `text`, and must compile."""
        return variable in variables_of(self._source(template, with_tools))

    def _source(self, template: str | None, with_tools: bool) -> str:
        if template is not None:
            return self._templates.get(template, template)
        if not self._templates:
            raise RequestError(
                "this model has no chat template: send prompts or token ids, or start with --chat-template",
                field="messages",
            )
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"this model has several chat templates and no default; choose one of {sorted(self._templates)}",
                field="chat_template",
            )
        return self._templates[name]


def _rendered(source: str, variables: dict[str, Any], field: str, spans: list[list[tuple[int, int]]] | None) -> str:
    """The template's text.  `spans`: takes those of its parts that are marked, if any are."""
    marked = None if spans is None else render_marked(source, variables, field)
    if spans is None or marked is None:
        return render(source, variables, field)
    spans.append(marked[1])
    return marked[0]


def _renders(source: str, variables: dict[str, Any]) -> bool:
    try:
        render(source, variables, "messages")
    except RequestError:
        return False
    return True


def _read_template(override: str) -> str:
    """The template: `override`, or the contents of the file of this name."""
    if "{" in override or "\n" in override:
        return override
    try:
        return Path(override).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartError(f"option chat_template: {override!r} cannot be read: {error}") from error


def _in_parts(content: str | list[dict[str, str]] | None) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def plain_message(index: int, message: Message, images: ImageSlots | None = None) -> dict[str, Any]:
    """A copy as templates expect it: text or parts of text, images without URLs, no nulls (a null content is absent),
    tool arguments as objects, reasoning under the names that templates read."""
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise invalid(field, "must be an object")
    if not isinstance(message.get("role"), str):
        raise invalid(f"{field}.role", "must be a string")
    plain = histories.without_empty(message)
    content = plain.get("content", "")
    if isinstance(content, list):
        _without_thoughts(f"{field}.content", plain)
        parts = [_plain_part(path, part, message["role"], images) for path, part in plain["content"]]
        plain["content"] = parts or ""
    elif not isinstance(content, str):
        raise invalid(f"{field}.content", "must be a string or a list of parts")
    histories.check_strings(field, plain, STRINGS)
    if "tool_calls" in plain:
        path, calls = f"{field}.tool_calls", plain["tool_calls"]
        if not isinstance(calls, list):
            raise invalid(path, "must be a list")
        plain["tool_calls"] = [histories.tool_call(f"{path}[{index}]", call) for index, call in enumerate(calls)]
    if images is not None:
        images.check_text(field, plain)
    reasoning = next((plain[name] for name in REASONING_NAMES if name in plain), None)
    if reasoning is None:
        return plain
    return plain | {"thinking": plain.get("thinking", reasoning), "reasoning_content": reasoning}


def _without_thoughts(field: str, plain: dict[str, Any]) -> None:
    """Number the parts of a message's content by their paths; thoughts of an assistant become the reasoning."""
    parts, thoughts = [], []
    for index, part in enumerate(plain["content"]):
        path = f"{field}[{index}]"
        if plain["role"] == "assistant" and isinstance(part, Mapping) and part.get("type") == THOUGHT:
            thoughts.append(_thought(f"{path}.{THOUGHT}", part.get(THOUGHT)))
        else:
            parts.append((path, part))
    plain["content"] = parts
    if thoughts and not any(name in plain for name in REASONING_NAMES):
        plain["reasoning"] = "\n".join(thoughts)


def _thought(field: str, thought: Any) -> str:
    """The text of a thought, which may be in parts."""
    if isinstance(thought, list):
        return "".join(part_text(f"{field}[{index}]", part) for index, part in enumerate(thought))
    if not isinstance(thought, str):
        raise invalid(field, "must be a string or a list of parts")
    return thought


def _plain_part(field: str, part: Any, role: str, images: ImageSlots | None) -> dict[str, str]:
    """A part of a content: its text, or an image, which `images` takes."""
    if isinstance(part, Mapping) and part.get("type") in CHAT_KINDS:
        part = UnreadImage(field, part, chat_part)
    if not isinstance(part, UnreadImage):
        kinds = TEXT_PARTS if images is None else (*TEXT_PARTS, *CHAT_KINDS)
        return {"type": "text", "text": part_text(field, part, kinds)}
    if images is None:
        raise part.refusal()
    if role not in IMAGE_ROLES:
        raise invalid(
            f"{part.field}.type", f"is {part.part['type']!r}: images belong in messages of the user or a tool"
        )
    images.images.append(part.image())
    return dict(IMAGE)


def _check_roles(chat: list[dict[str, Any]], source: str) -> None:
    """Refuse a role that is neither OpenAI's nor one that the template names: a template would show it as it is, and no
    model was trained with it."""
    for index, role in enumerate(message["role"] for message in chat):
        if role not in ROLES and not (role and re.search(rf"""["']{re.escape(role)}["']""", source)):
            known = ", ".join(ROLES)
            raise invalid(f"messages[{index}].role", f"must be one of {known}, or of the chat template's")


def part_text(field: str, part: Any, kinds: Iterable[str] = TEXT_PARTS) -> str:
    """The text of a part of a content.  Raises RequestError naming `field` or a path in it.  `kinds`: the types of
    parts that may be there, for the error of another one."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise invalid(field, "must be an object")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        code = "unsupported" if isinstance(kind, str) else None
        raise invalid(f"{field}.type", f"must be one of {', '.join(kinds)}, got {kind!r}", code=code)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise invalid(f"{field}.{TEXT_PARTS[kind]}", "must be a string")
    return text


def _checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in RESERVED_VARIABLES:
        if kwargs and name in kwargs:
            raise RequestError(
                f"chat_template_kwargs must not hold {name!r}: it is a field of the request",
                field=f"chat_template_kwargs.{name}",
            )
    return dict(kwargs or {})


def _objects(field: str, values: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    for i, value in enumerate(values or ()):
        if not isinstance(value, dict):
            raise invalid(f"{field}[{i}]", "must be an object")
    return list(values) if values else None


def _marked_content(chat: list[dict[str, Any]], mark: str) -> str:
    """Put `mark` after the final message's content; returns the content without it."""
    content = chat[-1]["content"]
    if isinstance(content, str):
        chat[-1]["content"] = content + mark
        return content
    if content[-1] == IMAGE:
        field = f"messages[{len(chat) - 1}].content[{len(content) - 1}]"
        raise RequestError(f"{field} must be text: continue_final_message continues it", field=field)
    text = str(content[-1]["text"])
    content[-1]["text"] = text + mark
    return text


def _cut_at(rendered: str, mark: str, content: str) -> str:
    """`rendered` up to the mark.  If the mark has lost its trailing space, the template strips the content."""
    at = rendered.rfind(mark.strip())
    if at < 0 or content.strip() not in rendered:
        raise RequestError(
            "continue_final_message: the chat template does not print the final message's content as it is",
            field="continue_final_message",
        )
    return rendered[:at] if rendered.startswith(mark, at) else rendered[:at].rstrip()
