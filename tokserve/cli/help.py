"""The help of `tokserve serve`: the common options, one group, a search, or all."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

COMMON = (
    "host",
    "port",
    "api_key",
    "served_model_name",
    "tokens_only",
    "dtype",
    "quantization",
    "max_model_len",
    "kv_cache_memory_bytes",
    "max_num_seqs",
)
EPILOG = """\
--help=all     every option (also --help-all)
--help=GROUP   the options of a group: {groups}
--help=WORD    the options whose name or description has the word"""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Writes the values of an option once, behind all of its names."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
            return super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, default)}"


class Help(argparse.Action):
    """Prints the chosen part of the help and exits: 0, or 2 if no option has the word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: str | None = None
    ) -> None:
        word = "all" if option == "--help-all" else values
        text = help_text(parser, word)
        if text is None:
            parser.error(f"no option has {word!r} in its name or description; --help=all lists every option")
        print(text, end="")
        parser.exit()


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add `--help`, `--help=WORD` and `--help-all` to a parser that was made with `add_help=False`."""
    parser.formatter_class = Formatter
    nothing = argparse.SUPPRESS
    parser.add_argument(
        "-h", "--help", action=Help, nargs="?", metavar="WORD", dest=nothing, default=nothing, help="Show this help."
    )
    parser.add_argument("--help-all", action=Help, nargs=0, dest=nothing, default=nothing, help=nothing)


def help_text(parser: argparse.ArgumentParser, word: str | None) -> str | None:
    """The common options (None), all, or a group and the options with a word; None if there are none."""
    groups = [(group.title or "", _shown(group._group_actions)) for group in parser._action_groups]
    groups = [(title, actions) for title, actions in groups if actions]
    formatter = parser._get_formatter()
    if word is None:
        common = {action.dest: action for _, actions in groups for action in actions}
        groups = [*_positional(groups), ("common options", [common[name] for name in COMMON])]
    elif word != "all":
        groups = _matching(groups, word.lower())
        if not groups:
            return None
    if word in (None, "all"):
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
    for title, actions in groups:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    if word is None:
        names = (group.title or "" for group in parser._action_groups if _shown(group._group_actions))
        names = (name for name in names if name not in ("positional arguments", "options"))
        formatter.add_text(EPILOG.format(groups=_wrapped(names)))
    return formatter.format_help()


def _shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.help != argparse.SUPPRESS]


def _positional(groups: list[tuple[str, list[argparse.Action]]]) -> list[tuple[str, list[argparse.Action]]]:
    return [group for group in groups if not group[1][0].option_strings]


def _matching(groups: list[tuple[str, list[argparse.Action]]], word: str) -> list[tuple[str, list[argparse.Action]]]:
    """The group of that name, and of others the options whose name or description has the word."""

    def named(action: argparse.Action) -> bool:
        return any(word.replace("_", "-").lstrip("-") in flag.lstrip("-") for flag in action.option_strings)

    def described(action: argparse.Action) -> bool:
        return word in (action.help or "").lower()

    chosen = [
        (title, [one for one in actions if title == word or named(one) or described(one)]) for title, actions in groups
    ]
    return [(title, actions) for title, actions in chosen if actions]


def _wrapped(names: Iterable[str]) -> str:
    """Names separated by commas, in lines that stand below the first."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) > 48:
            lines.append("")
        lines[-1] += f"{name}, "
    return ("\n" + " " * 15).join(line.rstrip() for line in lines).rstrip(",")
