"""E4: whatever an agent does, the ids of a turn extend those of its parent, or the reason is said."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tokenizers import Tokenizer as Backend

from tests.server.byte_tokenizer import byte_tokenizer
from tests.sessions.simulation import FaithfulSimulation, Simulation, deepest, without_images
from tests.text.checkpoints import CHATML, KINDS
from tests.text.tool_templates import CODER, DEEPSEEK, HERMES, LLAMA, MISTRAL, MISTRAL_IDS, OPENED, THINKER
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.sessions.planning import IMAGES
from tokserve.features.sessions.store import FIRST
from tokserve.protocol.prompt import unpack_ids
from tokserve.text.tokenizer import Tokenizer

# as Qwen 3's: reasoning of turns before the last question is dropped
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.index0 > ns.last and (m.reasoning_content or loop.last) %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if tools %}{% endif %}"
)
# as Gemma's: other names of roles, a system message within the first question
GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}<s>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}{{ m.content | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>model\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, False),
    "hermes": (HERMES, True),
    "thinker": (THINKER, True),
    "opened": (OPENED, True),
    "coder": (CODER, True),
    "mistral": (MISTRAL, True),
    "mistral_ids": (MISTRAL_IDS, True),
    "llama": (LLAMA, True),
    "deepseek": (DEEPSEEK, True),
    "forgets": (FORGETS, True),
    "gemma": (GEMMA, False),
}
SAME = [  # templates that write earlier turns as they were sampled, and tokenizers that have their special tokens
    ("chatml", "byte_level"),
    ("hermes", "byte_level"),
    ("coder", "byte_level"),
    ("gemma", "llama2"),
    ("gemma", "gemma"),
    ("gemma", "metaspace"),
]
TOKENIZERS = {name: Tokenizer(Backend.from_str(make())) for name, make in KINDS.items()} | {"bytes": byte_tokenizer()}
ENDS = ("<|im_end|>", "</s>", "<eos>")
FAST, SLOW = 60, 10_000
TURNS = 12


def simulations(count: int) -> list[tuple[str, str, int]]:
    """Names of a template and a tokenizer, and a seed, for so many conversations."""
    pairs = [
        (template, tokenizer)
        for template in TEMPLATES
        for tokenizer in ("byte_level", "llama2", "gemma", "metaspace", "bytes")
    ]
    return [(*pairs[seed % len(pairs)], seed) for seed in range(count)]


def simulate(template: str, tokenizer: str, seed: int) -> Simulation:
    source, shows_tools = TEMPLATES[template]
    known = TOKENIZERS[tokenizer]
    eos = next(token for text in ENDS if (token := known.id_of(text)) is not None)
    simulation = Simulation(ChatTemplate(known, source), eos, seed, shows_tools)
    simulation.run(TURNS)
    return simulation


def check(template: str, tokenizer: str, seed: int) -> Counter[str]:
    """Check a conversation; returns how often its requests continued a turn, and why they did not."""
    reasons: Counter[str] = Counter()
    simulation = simulate(template, tokenizer, seed)
    session = simulation.store.get("", "s")
    for request in simulation.requests:
        turn = request.turn
        parents = deepest(simulation, request)
        ids = unpack_ids(session.ids(turn))
        if turn.prompt.parent is None:
            assert turn.prompt.because
            reasons[re.sub(r"\d+", "N", turn.prompt.because)] += 1
            assert parents == {None} or turn.prompt.because == IMAGES, turn.prompt.because
            rendered = simulation.template.render(without_images(request.messages), **simulation.options)
            assert ids[: len(rendered)] == rendered
            continue
        assert turn.prompt.parent in parents
        reasons["continued"] += 1
        before = unpack_ids(session.ids(session.turns[turn.prompt.parent]))
        assert ids[: len(before)] == before
        assert turn.num_ids == len(ids)
        new = [one for one in request.messages[session.turns[turn.prompt.parent].num_messages :]]
        text = simulation.template.tokenizer.decode(unpack_ids(turn.prompt.new_ids), False)
        for message in new:
            if isinstance(message["content"], str) and tokenizer in ("byte_level", "bytes"):
                assert message["content"].strip() in text
    return reasons


def test_conversations_are_chains() -> None:
    reasons: Counter[str] = Counter()
    for template, tokenizer, seed in simulations(FAST):
        reasons += check(template, tokenizer, seed)
    assert reasons["continued"] > 0.65 * reasons.total()
    assert reasons.keys() <= {"continued", FIRST, IMAGES, "message N differs", "no message is an answer of the session"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_ten_thousand_conversations_are_chains(part: int) -> None:
    for template, tokenizer, seed in simulations(SLOW)[part::8]:
        check(template, tokenizer, seed)


@pytest.mark.parametrize(("template", "tokenizer"), SAME)
def test_what_is_appended_is_what_a_rendering_of_the_whole_has(template: str, tokenizer: str) -> None:
    """A model that writes as its template does, and an agent that repeats its answers as they were."""
    known, (source, shows_tools) = TOKENIZERS[tokenizer], TEMPLATES[template]
    eos = next(token for text in ENDS if text in source and (token := known.id_of(text)) is not None)
    simulation = FaithfulSimulation(ChatTemplate(known, source), eos, 7, shows_tools)
    simulation.run(8)
    for request in simulation.requests:
        ids = unpack_ids(simulation.store.get("", "s").ids(request.turn))
        rendered = simulation.template.render(request.messages, **simulation.options)
        assert ids[: len(rendered)] == rendered
    assert [request.turn.prompt.because for request in simulation.requests] == [FIRST] + [None] * 7
