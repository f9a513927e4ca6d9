"""The names of parsers of tool calls and reasoning, and other servers' names of the same."""

from __future__ import annotations

from tokserve.base.errors import StartError

TOOL_PARSERS = (
    "auto",
    "hermes",
    "seed_oss",
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "deepseek_v32",
    "mistral",
    "deepseek_v31",
    "deepseek_v3",
    "kimi_k2",
    "openai",
    "gigachat3",
    "phi4_mini_json",
    "granite",
    "nemotron_json",
    "hunyuan_a13b",
    "hunyuan",
    "cohere_command3",
    "internlm",
    "functiongemma",
    "gemma4",
    "lfm2",
    "minicpm",
    "olmo3",
    "glm4",
    "llama3_json",
    "llama4_pythonic",
    "pythonic",
)
REASONING_PARSERS = (
    "auto",
    "none",
    "openai_gptoss",
    "seed_oss",
    "cohere_command3",
    "minicpm",
    "gemma4",
    "mistral",
    "granite",
    "minimax_m2",
    "hunyuan_a13b",
    "ernie45",
    "deepseek_r1",
    "qwen3",
)
TOOL_SYNONYMS = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "ernie45": "hermes",
    "exaone4": "hermes",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt-oss": "openai",
    "granite4": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama4_pythonic",
    "minimax": "minimax_m2",
    "minimax-m2": "minimax_m2",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
}
REASONING_SYNONYMS = {
    "": "none",
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "qwen3",
    "deepseek_v3": "qwen3",
    "glm45": "qwen3",
    "gpt-oss": "openai_gptoss",
    "kimi_k2": "qwen3",
    "minimax": "minimax_m2",
    "nemotron_v3": "qwen3",
    "olmo3": "qwen3",
}


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise StartError for a parser that there is not."""
    options = (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    )
    for option, name, names in options:
        if name not in names:
            raise StartError(f"option {option}: must be one of {', '.join(names)}, got {name!r}")
