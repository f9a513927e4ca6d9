"""The treatment of each field of the text routes: the table, the documentation of it, and that the routes keep to it.

`python -m tests.server.test_compat` writes the tables of docs/fields.md anew.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as SdkChat
from openai.resources.completions import Completions as SdkCompletions
from openai.resources.responses import Responses as SdkResponses

from tests.server.scripted_llm import says
from tests.server.site import Site, site
from tests.server.test_refusals import error_of
from tokserve.dialects.anthropic.bodies import MessagesBody
from tokserve.dialects.openai.schemas import (
    ChatBody,
    CompletionBody,
    OptionsModel,
    RequestBody,
    ResponsesBody,
)
from tokserve.server import compat
from tokserve.server.compat import FieldRule

DOCS = Path(__file__).parents[2] / "docs" / "fields.md"
ROUTES: dict[str, tuple[type[RequestBody], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/v1/responses": (ResponsesBody, {"input": "x"}),
    "/v1/messages": (MessagesBody, {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}),
}
INSIDE: dict[str, Any] = {"thinking": {"type": "adaptive"}}  # what an object needs besides its other fields
SDK = {"/v1/chat/completions": SdkChat, "/v1/completions": SdkCompletions, "/v1/responses": SdkResponses}
NOT_SENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
OPENAI = {
    name
    for resource in SDK.values()
    for name in inspect.signature(resource.create).parameters  # type: ignore[attr-defined]
    if name not in NOT_SENT
}


def treatment(route: str, name: str) -> FieldRule | None:
    """None: the field has an effect, or is not known."""
    body = ROUTES[route][0]
    outer = name.partition(".")[0]
    if name in compat.INNER:
        return compat.INNER[name] if outer in body.model_fields else None
    if name in compat.OTHER_NAMES:
        return FieldRule("refused", compat.OTHER_NAMES[name], "use structured_outputs")
    return None if name in body.model_fields else body.others.get(name)


def cell(route: str, name: str) -> str:
    actual = treatment(route, name)
    if actual is not None:
        return actual.treatment
    return "effect" if name in ROUTES[route][0].model_fields else "unknown"


def inner_fields(body: type[RequestBody]) -> list[str]:
    """Fields of the objects inside a body, by their path."""
    nested = []
    for name, field in body.model_fields.items():
        for kind in re.findall(r"(\w+Options)", str(field.annotation)):
            model: Any = next(subclass for subclass in OptionsModel.__subclasses__() if subclass.__name__ == kind)
            nested += [f"{name}.{inner}" for inner in model.model_fields]
    return nested


def names(*, of_openai: bool) -> list[str]:
    every = {*compat.INNER, *compat.OTHER_NAMES}
    for body, _ in ROUTES.values():
        every |= {*body.model_fields, *body.others}
    return sorted(name for name in every if (name.partition(".")[0] in OPENAI) == of_openai)


def table(*, of_openai: bool) -> str:
    lines = ["| field | chat | completions | responses | messages | |", "|---|---|---|---|---|---|"]
    for name in names(of_openai=of_openai):
        known = [actual for route in ROUTES if (actual := treatment(route, name)) is not None]
        notes = list(dict.fromkeys(actual.note for actual in known if actual.note))
        values = dict.fromkeys(json.dumps(value) for actual in known for value in actual.no_effect)
        if values:
            notes.append(f"no effect: {', '.join(f'`{value}`' for value in values)}")
        if any(actual.strict for actual in known):
            notes.append("refused with `--strict`")
        row = [f"`{name}`", *(cell(route, name) for route in ROUTES), "; ".join(notes)]
        lines.append(f"| {' | '.join(row)} |".replace("  |", " |"))
    return "\n".join(lines)


def documented(text: str) -> str:
    """The page with its tables as they should be."""
    for title, of_openai in (("OpenAI's fields", True), ("Other fields", False)):
        section = f"## {title}\n\n{table(of_openai=of_openai)}\n\n"
        text = re.sub(rf"## {title}\n\n(\|.*\n)*\n*", lambda _, section=section: section, text)  # type: ignore[misc]
    return text.rstrip() + "\n"


def test_the_documented_table_is_the_one_in_the_code() -> None:
    text = DOCS.read_text()
    assert documented(text) == text, "python -m tests.server.test_compat writes it anew"


def test_every_field_that_openais_sdk_can_send_is_in_the_table() -> None:
    for route, resource in SDK.items():
        sent = set(inspect.signature(resource.create).parameters) - NOT_SENT  # type: ignore[attr-defined]
        assert not {name for name in sent if cell(route, name) == "unknown"}, route


def test_a_field_is_declared_or_in_the_table_and_never_both() -> None:
    for body, _ in ROUTES.values():
        assert not body.others.keys() & {name for name in body.model_fields if name not in compat.TEXT}
    for body, _ in ROUTES.values():
        assert not compat.INNER.keys() & set(inner_fields(body))


ODD = {"a": 1}  # a value that is not among the values without effect of any field


def ask(s: Site, route: str, name: str, value: Any) -> Any:
    outer, _, inner = name.partition(".")
    body = {"stream": True} if outer == "stream_options" else {}
    return s.post(route, ROUTES[route][1] | body | {outer: INSIDE.get(outer, {}) | {inner: value} if inner else value})


@pytest.mark.some(1)
@pytest.mark.parametrize("route", ROUTES)
def test_the_routes_keep_to_the_table(route: str) -> None:
    lenient, strict = site(says("a")), site(says("a"), strict=True)
    for name in names(of_openai=True) + names(of_openai=False):
        actual = treatment(route, name)
        if actual is None:
            continue
        for value in (None, *actual.no_effect):  # what --strict takes, a server without it takes, too
            answer = ask(strict, route, name, value)
            assert answer.status_code == 200, (name, value, answer.text)
            assert "x-ignored-fields" not in answer.headers, (name, value)
        for server in (lenient, strict):
            answer = ask(server, route, name, ODD)
            if actual.treatment == "refused" or (server is strict and actual.strict):
                error = error_of(answer)
                assert answer.status_code == 400 and error.get("param", name) == name, (name, answer.text)
                assert name in error["message"] and (actual.note in error["message"] or actual.strict)
            else:
                assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == name, name


def test_openai_fields_without_effect_are_listed_not_refused() -> None:
    sent = {
        "verbosity": "low",
        "service_tier": "flex",
        "store": True,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    s = site(says("a"))
    answer = s.post("/v1/chat/completions", ROUTES["/v1/chat/completions"][1] | sent)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"].split(", ") == list(sent)
    answer = s.post("/v1/responses", {"input": "x", "text": {"verbosity": "low"}, "store": True})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "store, text.verbosity"


KNOWN_ELSEWHERE = {  # fields of other servers' chat and completions that this one's tables must name, by server
    "vllm": "best_of echo guided_json guided_regex guided_choice guided_grammar kv_transfer_params length_penalty "
    "logits_processors mm_processor_kwargs prompt_embeds session_id structural_tag thinking_token_budget "
    "truncate_prompt_tokens use_beam_search",
    "sglang": "custom_logit_processor ebnf json_schema lora_path no_stop_trim regex return_hidden_states "
    "session_params stop_regex",
    "llama.cpp": "cache_prompt dry_multiplier dynatemp_range grammar grammar_lazy id_slot json_schema lora mirostat "
    "n_keep n_predict n_probs reasoning_budget repeat_penalty samplers top_n_sigma typical_p "
    "xtc_probability",
    "tgi": "decoder_input_details details do_sample max_new_tokens return_full_text top_n_tokens truncate watermark",
    "mistral": "random_seed safe_prompt",
    "ollama": "format options think",
}


def test_a_field_of_another_server_is_applied_refused_or_harmless_for_a_reason() -> None:
    """Never ignored without a word, as response_format's schema, grammar and stop_regex were (serving-faults F6)."""
    for server, fields in KNOWN_ELSEWHERE.items():
        for name in fields.split():
            for route in ROUTES:
                assert cell(route, name) != "unknown", (server, name, route)
    tables = [compat.TEXT, compat.POOLING, compat.RESPONSES, compat.MESSAGES, compat.INNER]
    for rules in tables:
        assert not [name for name, rule in rules.items() if rule.treatment == "ignored" and not rule.note]


if __name__ == "__main__":
    DOCS.write_text(documented(DOCS.read_text()))
