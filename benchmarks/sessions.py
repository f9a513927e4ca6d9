"""What a turn of a session costs the front end, by the length of the conversation; compared with rendering it anew.

    .venv/bin/python benchmarks/sessions.py [--tokens 32768] [--turns 20]

Times are of the processor, of one process, so that other work on the machine does not count: from the messages of a
request to the ids of its prompt.  With a session these are the digests of the messages, the search for the turn that
they continue, and the rendering of what is new; without one, the rendering and tokenization of the whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tokserve.checkpoint import DEMO_DIR
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.templates.suffix import Suffixes
from tokserve.features.sessions.canonical import PromptContext, chain
from tokserve.features.sessions.planning import NewIds, new_ids
from tokserve.features.sessions.store import SessionStore
from tokserve.features.sessions.turns import Match, TurnAnswer, TurnPrompt
from tokserve.protocol.prompt import pack_ids
from tokserve.text.tokenizer import Tokenizer

WORDS = "the fox said that it would look at every file in the folder before it changed one of them "
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = PromptContext("", b"tools", b"template")
REPEATS = 15


def median_ms(work: Callable[[], Any]) -> float:
    """Milliseconds of the processor, the median of some runs."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def plan(store: SessionStore, messages: list[dict[str, Any]], suffixes: Suffixes) -> tuple[Match, NewIds, list[bytes]]:
    """What the server does with the messages of a request: the turn that they continue, and what is new."""
    digests = chain(messages)
    match = store.match("", "s", CONTEXT, digests, 0.0)
    return match, new_ids(match, messages, suffixes, {}), digests


def answer(index: int, text: str, ids: list[int]) -> tuple[dict[str, Any], TurnAnswer]:
    """A call with some text before it, and the turn's answer."""
    function = {"name": "look", "arguments": json.dumps({"path": "a.py", "line": index})}
    call = {"id": f"call{index:05}", "type": "function", "function": function}
    message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": [call]}
    sampled = TurnAnswer(
        token_ids=pack_ids(ids),
        token_logprobs=bytes(4 * len(ids)),
        mode="raw",
        finish_reason="stop",
        stop_detail="stop_string",
        seed=0,
        weight_versions=[],
        prompt_weight_versions=[],
        message=message,
        request_id="r",
    )
    return message, sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the conversation at its end")
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(DEMO_DIR)
    template = ChatTemplate(tokenizer, TEMPLATE)
    suffixes = Suffixes(template, [0])
    store = SessionStore(max_sessions=8, max_bytes=1 << 30, ttl=1e9)
    per_turn = args.tokens // args.turns - 200
    words = len(tokenizer.encode(WORDS, add_special_tokens=False))
    text = WORDS * (per_turn // words)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    ids = tokenizer.encode(text, add_special_tokens=False)
    print("| turn | tokens of the prompt | anew, ms | in a session, ms | new tokens |\n|---|---|---|---|---|")
    for index in range(args.turns):
        match, added, digests = plan(store, messages, suffixes)
        new = pack_ids(template.render(messages)) if added.ids is None else added.ids
        count = (len(match.ids) + len(new)) // 4
        if index in (0, args.turns // 2, args.turns - 1):
            anew = median_ms(partial(template.render, messages))
            kept = median_ms(partial(plan, store, messages, suffixes)) + (anew if added.ids is None else 0.0)
            print(f"| {index + 1} | {count} | {anew:.2f} | {kept:.2f} | {len(new) // 4} |")
        prompt = TurnPrompt(
            context=CONTEXT,
            parent=match.turn_id,
            because=added.because,
            new_ids=new,
            chain=digests[match.num_messages :],
            messages=b"[]",
        )
        message, sampled = answer(index, text, ids)
        store.add("", "s", match.number, prompt, sampled, 0.0)
        messages = [*messages, message, {"role": "tool", "tool_call_id": f"call{index:05}", "content": text[:200]}]


if __name__ == "__main__":
    main()
