"""Small chat templates that write tool calls and reasoning as the served families do."""

from __future__ import annotations

from tests.text.family_outputs import ALL_BEGIN, ALL_END, BEGIN, DSML, END, SEPARATOR


def chat(calls: str, prompt: str = "", turn: str = "", tools: str = "{{ tools | tojson }}") -> str:
    """A template whose assistant's turns have `turn`, content and `calls`; `prompt` ends the generation prompt."""
    return (
        f"{{% if tools %}}[tools]{tools}\n{{% endif %}}"
        "{% for m in messages %}[{{ m.role }}]"
        f"{{% if m.role == 'assistant' %}}{turn}{{% endif %}}{{{{ m.content or '' }}}}"
        f"{{% if m.tool_calls %}}{calls}{{% endif %}}[end]\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}[assistant]{prompt}{{% endif %}}"
    )


def every_call(call: str, between: str = "") -> str:
    """What shows every call of a message."""
    gap = f"{{{{ '' if loop.first else '{between}' }}}}" if between else ""
    return f"{{% for c in m.tool_calls %}}{gap}{call}{{% endfor %}}"


def pairs(pair: str) -> str:
    """What shows every argument of a call."""
    return f"{{% for k, v in c.function.arguments.items() %}}{pair}{{% endfor %}}"


NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
TEXT = "{{ v if v is string else v | tojson }}"
OBJECT = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}"
PARAMETERS = OBJECT.replace("arguments", "parameters", 1)
PYTHON = NAME + "(" + pairs("{{ '' if loop.first else ', ' }}{{ k }}={{ v | tojson }}") + ")"
FENCE = NAME + "\n```json\n" + ARGUMENTS + "\n```"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
QUOTED = "{{ '' if loop.first else ',' }}{{ k }}:{% if v is string %}QUOTE{{ v }}QUOTE{% else %}{{ v }}{% endif %}"
BLOCK = "\n<parameter={{ k }}>" + TEXT + "</parameter>"
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools or messages[0].role in ['system', 'developer'] %}<|start|>developer<|message|>"
    "{% if messages[0].role in ['system', 'developer'] %}{{ messages[0].content }}{% endif %}"
    "{% for t in tools or [] %}type {{ t.function.name }} = {{ t.function.parameters | tojson }};{% endfor %}"
    "<|end|>{% endif %}"
    "{% set last = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% set c = m.tool_calls[0] %}{% set last.name = c.function.name %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
KIMI = chat(
    "<|tool_calls_section_begin|>"
    + every_call("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    turn="<think>{{ m.reasoning_content or '' }}</think>",
)
# tool parser, reasoning parser, a template that shows both
SHOWS: list[tuple[str, str | None, str]] = [
    ("openai", "openai_gptoss", GPT_OSS),
    ("kimi_k2", "qwen3", KIMI),
    (
        "glm45",
        "qwen3",
        chat(
            every_call(
                "\n<tool_call>"
                + NAME
                + pairs("\n<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>")
                + "\n</tool_call>"
            ),
            turn="\n<think>{{ m.reasoning_content or '' }}</think>\n",
        ),
    ),
    (
        "minimax_m2",
        "minimax_m2",
        chat(
            "\n<minimax:tool_call>"
            + every_call(
                '\n<invoke name="'
                + NAME
                + '">'
                + pairs('\n<parameter name="{{ k }}">' + TEXT + "</parameter>")
                + "\n</invoke>"
            )
            + "\n</minimax:tool_call>",
            prompt="<think>\n",
            turn=THINK,
        ),
    ),
    (
        "deepseek_v32",
        "qwen3",
        chat(
            f"\n\n<{DSML}function_calls>"
            + every_call(
                f'\n<{DSML}invoke name="{NAME}">'
                + pairs(
                    f"\n<{DSML}parameter name=\"{{{{ k }}}}\" string=\"{{{{ 'true' if v is string else 'false' }}}}\">"
                    f"{TEXT}</{DSML}parameter>"
                )
                + f"\n</{DSML}invoke>"
            )
            + f"\n</{DSML}function_calls>",
            prompt="<think>",
            turn="{{ m.reasoning_content or '' }}</think>",
        ),
    ),
    (
        "deepseek_v3",
        "deepseek_r1",
        chat(
            ALL_BEGIN + every_call(f"{BEGIN}function{SEPARATOR}{FENCE}{END}", "\\n") + ALL_END,
            turn="{% set content = m.content.split('</think>')[-1] %}<｜tool▁outputs▁begin｜>",  # noqa: RUF001
        ),
    ),
    (
        "granite",
        "granite",
        chat(
            "<|tool_call|>[" + every_call(OBJECT, ", ") + "]",
            tools="Here is my thought process: Here is my response: {{ tools }}",
        ),
    ),
    ("phi4_mini_json", None, chat("<|tool_call|>[" + every_call(OBJECT, ", ") + "]<|/tool_call|>")),
    ("nemotron_json", "qwen3", chat("<TOOLCALL>[" + every_call(OBJECT, ", ") + "]</TOOLCALL>", turn=THINK)),
    (
        "hunyuan_a13b",
        "hunyuan_a13b",
        chat("<tool_calls>[" + every_call(OBJECT, ", ") + "]</tool_calls>", turn=THINK + "<answer>"),
    ),
    ("hunyuan", None, chat("<tool_calls>" + every_call(f"<tool_call>{FENCE}</tool_call>") + "</tool_calls>")),
    (
        "cohere_command3",
        "cohere_command3",
        chat(
            "<|START_ACTION|>["
            + every_call('{"tool_call_id": "0", "tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}", ",")
            + "]<|END_ACTION|>",
            turn="{% if m.tool_calls %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}",
        ),
    ),
    ("gigachat3", None, chat(every_call("<|function_call|>" + OBJECT))),
    ("internlm", None, chat(every_call("<|action_start|><|plugin|>\n" + PARAMETERS + "<|action_end|>\n"))),
    (
        "functiongemma",
        None,
        chat(
            every_call(
                "<start_function_call>call:"
                + NAME
                + "{{ '{' }}"
                + pairs(QUOTED.replace("QUOTE", "<escape>"))
                + "}<end_function_call>"
            )
        ),
    ),
    (
        "gemma4",
        "gemma4",
        chat(
            every_call(
                "<|tool_call>call:" + NAME + "{{ '{' }}" + pairs(QUOTED.replace("QUOTE", '<|"|>')) + "}<tool_call|>"
            ),
            prompt="{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}",
        ),
    ),
    ("lfm2", "qwen3", chat("<|tool_call_start|>[" + every_call(PYTHON, ", ") + "]<|tool_call_end|>", turn=THINK)),
    (
        "minicpm",
        None,
        chat("<|tool_call_start|>\n```python\n" + every_call(PYTHON, "\\n") + "\n```\n<|tool_call_end|>\n"),
    ),
    ("olmo3", None, chat("<function_calls>" + every_call(PYTHON, "\\n") + "</function_calls>")),
    (
        "seed_oss",
        "seed_oss",
        chat(
            every_call(
                "\n<seed:tool_call>\n<function=" + NAME + ">" + pairs(BLOCK) + "\n</function>\n</seed:tool_call>"
            ),
            turn="{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}",
        ),
    ),
    (
        "hermes",
        "ernie45",
        chat(every_call("<tool_call>\n" + OBJECT + "\n</tool_call>", "\\n"), turn=THINK + "<response>"),
    ),
    ("glm4", None, chat(every_call(NAME + "\n" + ARGUMENTS))),
    ("llama4_pythonic", None, chat("<|python_start|><|python_end|>" + every_call(PARAMETERS))),
    ("llama4_pythonic", None, chat("[" + every_call(PYTHON, ", ") + "]")),
    (
        "hermes",
        "minicpm",
        chat(every_call("<tool_call>\n" + OBJECT + "\n</tool_call>"), turn="<|thought_start|><|thought_end|>"),
    ),
]
# templates that show tools and say how to call them, and no calls of earlier turns
TELLS = {
    "phi4_mini_json": chat("", tools="<|tool|>{{ tools | tojson }}<|/tool|>"),
    "granite": chat("", tools="Answer with <|tool_call|> and a list. {{ tools | tojson }}"),
    "kimi_k2": chat("", tools="<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}"),
    "internlm": chat("", tools="name=<|plugin|>{{ tools | tojson }}"),
    "olmo3": chat("", tools="<function_calls></function_calls> {{ tools | tojson }}"),
    "lfm2": chat("", tools="List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>"),
}
