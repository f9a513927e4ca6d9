"""The five toy tasks that the demo model is trained on, as endless streams of question/answer pairs.

They live in a module of their own so that the trainer and the script that measures a running server ask
exactly the same kind of question, and differ only in the seed. Every answer can be computed, so no data set
is needed and an answer is either right or wrong.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

MIN_LETTERS = 3
MAX_LETTERS = 7
MAX_NUMBER = 99
MAX_PLANTED = 4


@dataclass(frozen=True)
class Example:
    """One question with its only right answer."""

    task: str
    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A task: how to draw its values and answer, and the ways to ask for it (the first one is canonical)."""

    name: str
    draw: Callable[[random.Random], tuple[dict[str, str], str]]
    phrasings: tuple[str, ...]

    def example(self, rng: random.Random, phrasing: int | None = None) -> Example:
        """Draw one example, asked in the phrasing of that number, or in any of them."""
        values, answer = self.draw(rng)
        template = rng.choice(self.phrasings) if phrasing is None else self.phrasings[phrasing]
        return Example(self.name, template.format(**values), answer)


def random_word(rng: random.Random) -> str:
    """Random lower-case letters; no dictionary, so that nothing can be learnt by heart."""
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(MIN_LETTERS, MAX_LETTERS)))


def _draw_add(rng: random.Random) -> tuple[dict[str, str], str]:
    a, b = rng.randint(0, MAX_NUMBER), rng.randint(0, MAX_NUMBER)
    return {"a": str(a), "b": str(b)}, str(a + b)


def _draw_subtract(rng: random.Random) -> tuple[dict[str, str], str]:
    a, b = rng.randint(0, MAX_NUMBER), rng.randint(0, MAX_NUMBER)
    return {"a": str(a), "b": str(b)}, str(a - b)


def _draw_reverse(rng: random.Random) -> tuple[dict[str, str], str]:
    word = random_word(rng)
    return {"word": word}, word[::-1]


def _draw_sort(rng: random.Random) -> tuple[dict[str, str], str]:
    word = random_word(rng)
    return {"word": word}, "".join(sorted(word))


def _draw_count(rng: random.Random) -> tuple[dict[str, str], str]:
    """Plant the letter at a random number of places: left to chance, nearly every answer would be 0."""
    letter = rng.choice(string.ascii_lowercase)
    word = list(random_word(rng))
    for place in rng.sample(range(len(word)), rng.randint(0, min(MAX_PLANTED, len(word)))):
        word[place] = letter
    return {"letter": letter, "word": "".join(word)}, str(word.count(letter))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "add",
            _draw_add,
            ("What is {a} + {b}?", "What is {a}+{b}?", "{a}+{b}", "{a} + {b}", "Add {a} and {b}."),
        ),
        Task(
            "subtract",
            _draw_subtract,
            ("What is {a} - {b}?", "What is {a}-{b}?", "{a}-{b}", "{a} - {b}", "Subtract {b} from {a}."),
        ),
        Task(
            "reverse",
            _draw_reverse,
            ("Reverse the word {word}.", "Reverse {word}", "Spell {word} backwards."),
        ),
        Task(
            "sort",
            _draw_sort,
            ("Sort the letters of {word}.", "Sort {word}", "Sort the word {word}."),
        ),
        Task(
            "count",
            _draw_count,
            (
                "How many {letter} are in {word}?",
                "How many {letter}'s in {word}?",
                "Count the {letter} in {word}.",
            ),
        ),
    )
}
