"""Small chat templates that write tool calls as the models of the field do, by the name of the format."""

from __future__ import annotations

# An example of a call in the prompt, as Qwen's has it, must not be taken for one.
_SYSTEM = (
    "{% if tools %}<|im_start|>system\n"
    'Call them as <tool_call>{"name": <function-name>, "arguments": {}}</tool_call>\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = (
    _SYSTEM + "{% for m in messages %}" + _TURN + "{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}" + _GENERATION
)
# As Qwen 3: a turn shows its thoughts, and the prompt can have them closed.
THINKER = (
    HERMES.replace(
        "\n{{ m.content or '' }}",
        "\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
        "{{ m.content or '' }}",
    )
    + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
# As R1: the prompt opens them.
OPENED = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"
CODER = (
    _SYSTEM + "{% for m in messages %}" + _TURN + "{% for c in m.tool_calls or [] %}"
    "\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}" + _GENERATION
)
MISTRAL = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_ARGS = MISTRAL.replace(
    MISTRAL[MISTRAL.index("[TOOL_CALLS]") : MISTRAL.index("</s>")],
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)
MISTRAL_IDS = MISTRAL_ARGS.replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]")
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    '{% else %}{% if tools and loop.first %}Respond with {"name": function name, "parameters": dictionary}. '
    "{{ tools | tojson }}{% endif %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEEPSEEK = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.tool_calls %}<｜Assistant｜></think>{{ m.content }}"  # noqa: RUF001
    "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"  # noqa: RUF001
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"  # noqa: RUF001
    "{% else %}<｜Assistant｜>{{ m.content }}{% endif %}{% endfor %}"  # noqa: RUF001
    "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"  # noqa: RUF001
)
# format -> a template that shows it
SHOWS = [
    ("hermes", HERMES),
    ("hermes", THINKER),
    ("hermes", OPENED),
    ("qwen3_coder", CODER),
    ("mistral", MISTRAL),
    ("mistral", MISTRAL_ARGS),
    ("mistral", MISTRAL_IDS),
    ("llama3_json", LLAMA),
    ("deepseek_v31", DEEPSEEK),
]
# templates that show none that is known
UNKNOWN = {
    "no tools": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "no calls": "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "another": "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }}){{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "no arguments": HERMES.replace("{{ c.function.arguments | tojson }}", "{}"),
    "other names": HERMES.replace("{{ c.function.name }}", "f_{{ c.function.name }}"),
    "refuses": "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content }}{% endfor %}",
}
