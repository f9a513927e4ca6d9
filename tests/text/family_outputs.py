# ruff: noqa: RUF001
"""Outputs as the served families write them, with what they are parsed into."""

from __future__ import annotations

from typing import Any, NamedTuple

Pieces = list[tuple[str, str]]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}},
    "required": ["city"],
}
FUNCTIONS: dict[str, Any] = {"get_weather": WEATHER, "now": {}}
DSML = "｜DSML｜"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


class Output(NamedTuple):
    """An output of a family, its parsers, and what it consists of."""

    family: str
    tools: str | None
    thinking: str | None
    text: str
    pieces: Pieces


def weather(arguments: str = '{"city": "Oslo", "days": 3}') -> Pieces:
    return [("call", "get_weather"), ("arguments", arguments)]


NOW: Pieces = [("call", "now"), ("arguments", "{}")]
OUTPUTS = [
    Output(
        "gpt-oss",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Two steps.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 3}<|call|>',
        [("reasoning", "Two steps."), ("content", "Let me see."), *weather()],
    ),
    Output(
        "gpt-oss, recipient first",
        "openai",
        "openai_gptoss",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo", "days": 3}',
        weather(),
    ),
    Output(
        "gpt-oss, answer",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is <tool_call> 5.",
        [("reasoning", "Easy."), ("content", "It is <tool_call> 5.")],
    ),
    Output(
        "gpt-oss, another tool",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        [("reasoning", "1+1")],
    ),
    Output(
        "gpt-oss, no arguments that can be read",
        "openai",
        "openai_gptoss",
        "<|channel|>commentary to=functions.now code<|message|>now()<|call|>",
        [("content", "<|channel|>commentary to=functions.now code<|message|>now()")],
    ),
    Output(
        "gpt-oss, a turn that is continued",
        "openai",
        "openai_gptoss",
        " and to=5 more",
        [("content", " and to=5 more")],
    ),
    Output(
        "GLM-4.5",
        "glm45",
        "qwen3",
        "\n<think>Oslo, three days.</think>\nI will look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        "\n<tool_call>now\n</tool_call>",
        [("reasoning", "Oslo, three days."), ("content", "I will look."), *weather(), *NOW],
    ),
    Output(
        "GLM-4.7",
        "glm45",
        "qwen3",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Os\nlo </arg_value>\n is one</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        [*weather('{"city": "Os\\nlo </arg_value>\\n is one"}'), *NOW],
    ),
    Output(
        "DeepSeek V3 and R1",
        "deepseek_v3",
        "deepseek_r1",
        f"<think>\nHm.\n</think>\n\n{ALL_BEGIN}{BEGIN}function{SEPARATOR}get_weather\n```json\n"
        f'{{"city": "Oslo", "days": 3}}\n```{END}\n{BEGIN}function{SEPARATOR}now\n```json\n{{}}\n```{END}{ALL_END}',
        [("reasoning", "Hm."), *weather(), *NOW],
    ),
    Output(
        "DeepSeek V3.1",
        "deepseek_v31",
        "qwen3",
        f'Sure.{ALL_BEGIN}{BEGIN}get_weather{SEPARATOR}{{"city": "Oslo", "days": 3}}{END}'
        f"{BEGIN}now{SEPARATOR}{{}}{END}{ALL_END}",
        [("content", "Sure."), *weather(), *NOW],
    ),
    Output(
        "DeepSeek V3.2",
        "deepseek_v32",
        "qwen3",
        f'<think>Hm.</think>Sure.\n\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">5 < 6</{DSML}parameter>\n'
        f'<{DSML}parameter name="units" string="false">["C", null]</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>',
        [("reasoning", "Hm."), ("content", "Sure."), *weather('{"city": "5 < 6", "units": ["C", null]}'), *NOW],
    ),
    Output(
        "Kimi K2",
        "kimi_k2",
        "qwen3",
        "<think>Hm.</think>One moment.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [("reasoning", "Hm."), ("content", "One moment."), *weather(), *NOW],
    ),
    Output(
        "MiniMax M2",
        "minimax_m2",
        "minimax_m2",
        '<think>Hm.</think>\n\nOk.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Oslo\n</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [("reasoning", "Hm."), ("content", "Ok."), *weather('{"city": "Oslo\\n", "days": 3}'), *NOW],
    ),
    Output(
        "Llama 3", "llama3_json", None, '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}', weather()
    ),
    Output(
        "Llama 3.2",
        "pythonic",
        None,
        '[get_weather(city="Oslo", days=3), now()]',
        [*weather(), *NOW],
    ),
    Output(
        "Llama 4",
        "llama4_pythonic",
        None,
        "<|python_start|>[get_weather(city='Oslo', units=[\"C\", None, {'x': -1.5}])]<|python_end|>",
        weather('{"city": "Oslo", "units": ["C", null, {"x": -1.5}]}'),
    ),
    Output(
        "Llama 4, JSON",
        "llama4_pythonic",
        None,
        '<|python_start|><|python_end|>{"name": "now", "parameters": {}}',
        NOW,
    ),
    Output("Llama 4, code", "llama4_pythonic", None, "print([now()])", [("content", "print([now()])")]),
    Output(
        "Granite 3.2",
        "granite",
        "granite",
        'Here is my thought process: Hm. Here is my response: <|tool_call|>[{"name": "get_weather", "arguments": '
        '{"city": "Oslo", "days": 3}}, {"name": "now", "arguments": {}}]',
        [("reasoning", "Hm."), *weather(), *NOW],
    ),
    Output(
        "Granite 3.3, ERNIE 4.5",
        "hermes",
        "ernie45",
        "<think>\nHm.\n</think>\n\n<response>\nIt has a </response> tag.\n</response>\n",
        [("reasoning", "Hm."), ("content", "It has a </response> tag.")],
    ),
    Output(
        "Phi 4 mini",
        "phi4_mini_json",
        "qwen3",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]<|/tool_call|>',
        weather(),
    ),
    Output(
        "Nemotron",
        "nemotron_json",
        "qwen3",
        "<think>\nHm.\n</think>\n\n"
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]</TOOLCALL>',
        [("reasoning", "Hm."), *weather()],
    ),
    Output(
        "Hunyuan A13B",
        "hunyuan_a13b",
        "hunyuan_a13b",
        "<think>\nHm.\n</think>\n<answer>\nLook:\n"
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]</tool_calls>\n</answer>',
        [("reasoning", "Hm."), ("content", "Look:"), *weather()],
    ),
    Output(
        "HunYuan 1",
        "hunyuan",
        "hunyuan_a13b",
        '<tool_calls><tool_call>get_weather\n```json\n{"city": "Oslo", "days": 3}\n```</tool_call>'
        "<tool_call>now\n```json\n{}\n```</tool_call></tool_calls>",
        [*weather(), *NOW],
    ),
    Output(
        "Command R7B",
        "cohere_command3",
        "cohere_command3",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo", "days": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        [("reasoning", "Hm."), *weather(), *NOW],
    ),
    Output(
        "Command R7B, answer",
        "cohere_command3",
        "cohere_command3",
        "<|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        [("content", "It rains.")],
    ),
    Output(
        "GigaChat 3.1",
        "gigachat3",
        None,
        'Sure.<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}',
        [("content", "Sure."), *weather()],
    ),
    Output(
        "InternLM",
        "internlm",
        None,
        'I will search.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}'
        "<|action_end|>\n",
        [("content", "I will search."), *weather()],
    ),
    Output(
        "FunctionGemma",
        "functiongemma",
        None,
        "<start_function_call>call:get_weather{city:<escape>Os{lo}, :<escape>,days:3,units:[<escape>C<escape>,true,"
        "{a:<escape>b<escape>}]}<end_function_call><start_function_call>call:now{}<end_function_call>",
        [*weather('{"city": "Os{lo}, :", "days": 3, "units": ["C", true, {"a": "b"}]}'), *NOW],
    ),
    Output(
        "Gemma 4",
        "gemma4",
        "gemma4",
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
        [("reasoning", "Hm."), *weather()],
    ),
    Output(
        "LFM2",
        "lfm2",
        "qwen3",
        "<|tool_call_start|>[get_weather(city='Oslo', days=3), now()]<|tool_call_end|>One moment.",
        [*weather(), *NOW, ("content", "One moment.")],
    ),
    Output(
        "MiniCPM 3",
        "minicpm",
        "minicpm",
        "<|thought_start|>\nHm.\n<|thought_end|>\n<|tool_call_start|>\n```python\n"
        'get_weather(city="Oslo", days=3)\nnow()\n```\n<|tool_call_end|>\nDone.',
        [("reasoning", "Hm."), *weather(), *NOW, ("content", "Done.")],
    ),
    Output(
        "OLMo 3",
        "olmo3",
        "qwen3",
        '<function_calls>get_weather(city="Oslo", days=3)\nnow()</function_calls>',
        [*weather(), *NOW],
    ),
    Output("GLM-4", "glm4", "qwen3", 'get_weather\n{"city": "Oslo", "days": 3}', weather()),
    Output("GLM-4, text", "glm4", "qwen3", " get_weather shows it.", [("content", " get_weather shows it.")]),
    Output(
        "Seed-OSS",
        "seed_oss",
        "seed_oss",
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        [("reasoning", "Hm."), *weather()],
    ),
    Output(
        "Qwen 3.5",
        "qwen3_coder",
        "qwen3",
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("reasoning", "Hm."), *weather()],
    ),
    Output(
        "Qwen 3, Granite 4, SmolLM 3, EXAONE 4",
        "hermes",
        "qwen3",
        "<think>\nHm.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        [("reasoning", "Hm."), *weather()],
    ),
    Output(
        "Mistral",
        "mistral",
        "mistral",
        '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        [("reasoning", "Hm."), *weather(), *NOW],
    ),
]
