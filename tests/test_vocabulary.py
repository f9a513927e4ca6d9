"""The vocabulary of docs/glossary.md: one class per name, and no word of the old dialect in names, comments or text."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.sources import nodes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tokserve"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "demo_model" not in p.parts)
PROGRAMS = sorted(p for folder in ("tests", "benchmarks", "examples", "scripts") for p in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Retired words and what is said instead.
CLASSES = {
    "Answered": "ReplyContext",
    "Delivery": "RequestState",
    "Drawing": "PendingSample",
    "Drawn": "SampledTokens",
    "Ends": "LogitsRows",
    "Extra": "RareFields",
    "Flight": "Generation (server), InFlightStep (engine), PendingStep (runner)",
    "Follower": "GrammarState",
    "Following": "MaskWorker",
    "Holes": "DeferredParts",
    "Order": "GenerateRequest",
    "Prepared": "EngineRequest",
    "Pulse": "Heartbeat",
    "Terms": "RequestOptions",
    "Undecided": "PendingGrammars",
    "Verdict": "SubmitReply",
}
WORDS = {  # in a name of anything, as a whole word
    "judge": "check, resolve",
    "promise": "pending",
    "promises": "pending",
    "renew": "set_epoch",
    "rid": "request_id",
    "settle": "cache_full_blocks (a block), flush (text), resolve (a future)",
    "withdraw": "drop_pending",
    "looks_back": "needs_history",
    "stands_alone": "is_batch_invariant",
}
VARIABLES = {  # as the name of a variable or a parameter: it names its content
    "asked": "body, params",
    "each": "the singular of what is iterated over",
    "found": "match, result",
    "got": "value, received",
    "mine": "local, nonce, rank_cpus",
    "news": "ready, has_output",
    "ours": "local",
    "own": "what it is: source, row, length",
    "said": "what it is: message, quality",
    "theirs": "remote, peer_nonce",
    "there": "what it counts: num_slots",
    "told": "sent, parsed",
    "wanted": "num_tokens, requested",
}
VAGUE = {  # no name of a variable or a function in tests
    "apart",
    "asked",
    "came",
    "company",
    "each",
    "found",
    "given",
    "gone",
    "got",
    "had",
    "made",
    "meant",
    "mine",
    "ours",
    "own",
    "said",
    "some",
    "theirs",
    "there",
    "told",
    "want",
    "wanted",
    "whole",
}
PHRASES = {  # in comments, docstrings and messages
    "business": "owned by, decided in",
    "must not know": "(the layering test says it)",
    "nobody": "no process, no client",
    "played": "fake, simulated",
    "somebody": "a caller, a client",
    "whoever": "any caller, the caller",
}
ANY_PHRASE = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE)
PLAYED = re.compile(r"(?<![a-z])played", re.IGNORECASE)  # also in names, in tests and in docs; "displayed" is no match
RETIRED = CLASSES | WORDS | VARIABLES | PHRASES
# a docstring that begins with one of these leaves out what it speaks of: "Of the tensors.", "As a result."
NOT_A_SUBJECT = re.compile(r"(?:Of|As|By|In|From|And|Or|To|With|Without|For|At|On|Those|So|Nothing|If)\b")

# packages that still speak the old dialect
PENDING: tuple[str, ...] = ()
# class names that several of these files use
DUPLICATES = {"PoolingParams", "SamplingParams"}  # what is sent, and the same as vLLM's callers write it


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _names(syntax: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """(line, kind, name) of what a file defines: classes, functions, variables, parameters and attributes."""
    for node in syntax:
        if isinstance(node, ast.ClassDef):
            yield node.lineno, "class", node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, "function", node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, "variable", node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, "variable", node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, "attribute", node.attr


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def retired_words(source: str, syntax: Iterable[ast.AST] | None = None) -> list[str]:
    """`line: old -> new` for each retired word of a file.  `syntax`: its nodes, if they are known."""
    lines = []
    for line, kind, name in _names(ast.walk(ast.parse(source)) if syntax is None else syntax):
        bare = name.strip("_")
        if kind == "class" and bare in CLASSES:
            lines.append(f"{line}: class {name} -> {CLASSES[bare]}")
        wrapped = f"_{bare.lower()}_"
        for word, instead in WORDS.items():
            if f"_{word}_" in wrapped:
                lines.append(f"{line}: {kind} {name} -> {instead}")
        if kind == "variable" and bare in VARIABLES:
            lines.append(f"{line}: {kind} {name} -> {VARIABLES[bare]}")
    for line, text in _texts(source) if ANY_PHRASE.search(" ".join(source.split())) else ():
        for phrase in set(map(str.lower, ANY_PHRASE.findall(" ".join(text.split())))):
            lines.append(f"{line}: text {phrase!r} -> {PHRASES[phrase]}")
    return lines


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{_name(path)}:{node.lineno}")
    repeated = {name: where for name, where in places.items() if len(where) > 1 and name not in DUPLICATES}
    assert not repeated


def test_no_retired_words() -> None:
    for path in FILES:
        if not _name(path).startswith(PENDING):
            assert not retired_words(path.read_text(), nodes(path)), f"{_name(path)}: see RETIRED"


def test_a_simulated_device_is_called_fake() -> None:
    for path in (*PROGRAMS, *PAGES):
        if path not in (Path(__file__), ROOT / "docs" / "glossary.md"):
            assert not PLAYED.search(path.read_text()), path


def test_variables_of_tests_name_their_content() -> None:
    for path in PROGRAMS:
        if path.is_relative_to(ROOT / "tests"):
            assert not {name.strip("_") for _, _, name in _names(nodes(path))} & VAGUE, path


def docstrings_without_subject(syntax: Iterable[ast.AST]) -> list[str]:
    """`line: first line` of the docstrings of classes and functions that begin in the middle of a phrase."""
    defined = (node for node in syntax if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
    first_lines = ((node.lineno, (ast.get_docstring(node) or "").partition("\n")[0]) for node in defined)
    return [f"{line}: {text}" for line, text in first_lines if NOT_A_SUBJECT.match(text)]


def test_docstrings_say_what_they_speak_of() -> None:
    for path in (*FILES, *PROGRAMS):
        assert not docstrings_without_subject(nodes(path)), path
    tree = ast.parse('class A:\n    """Of tensors."""\n\n    def f(self):\n        """Offer them."""\n')
    assert docstrings_without_subject(ast.walk(tree)) == ["1: Of tensors."]


def test_the_scan_finds_every_kind_of_word() -> None:
    source = '''
class _Verdict:
    """Nobody reads it; must
    not know why."""

    def settle_block(self, asked: int) -> None:
        self.rid = found = asked  # whoever asks
'''
    output = "\n".join(retired_words(source))
    for word in ("_Verdict", "settle_block", "asked", "rid", "found", "nobody", "must not know", "whoever"):
        assert word in output, output
    assert not retired_words("settled = grid = foundation = order = 1  # in order, settled")
