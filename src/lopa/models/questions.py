"""The questions of the built-in model, told from other text.

It was trained on word problems and on small functions, each ending with a line break, and on no
other text. What was said before a question it cannot read either.
"""

from __future__ import annotations

from typing import NamedTuple

from lopa.errors import PromptError

WORD_PROBLEM = (
    "Leo has 18 books. Kate has twice as many books as Leo. She gives half of her books to her "
    "school. How many books does she have in the end?"
)
FUNCTION = (
    "Define sum_even(numbers) so that it returns the sum of the even numbers in numbers.\n"
    "assert sum_even([1, 2, 4]) == 6"
)
ABOUT = "word problems of a few steps and small Python functions with an assert as an example"
_ASKS = ("how many", "how much", "what is", "what was")
_ORDERS = ("Write", "Define", "Create", "Implement", "The function")
_ASSERT = "assert "


class Question(NamedTuple):
    """A question that a text begins with."""

    text: str
    rest: str  # of the text: white space, or how the answer begins

    @property
    def is_whole(self) -> bool:
        return not self.rest.strip()


def question(text: str) -> Question | None:
    """The question that a text begins with; None: with none that the built-in model can read."""
    text = text.lstrip()
    return _function(text) if text.startswith(_ORDERS) else _word_problem(text)


def complete(text: str) -> str:
    """A question with its line break; any other text as it is."""
    found = question(text)
    return f"{found.text}\n" if found is not None and found.is_whole else text


def check(text: str) -> None:
    """PromptError for what is no question, and for more than one."""
    found = question(text)
    if found is None:
        raise PromptError(
            f"the built-in model solves {ABOUT}, and nothing else: ask like “{WORD_PROBLEM}” or "
            f"“{FUNCTION}”"
        )
    if any(question(part) is not None for part in found.rest.split("\n\n")):
        raise PromptError("the built-in model reads one question at a time: ask the last one alone")


def _word_problem(text: str) -> Question | None:
    """Numbers, and then what they come to."""
    head, mark, rest = text.partition("?")
    said = head.lower()
    asked = max(said.rfind(words) for words in _ASKS)
    if not mark or asked < 0 or not any(char.isdigit() for char in said[:asked]):
        return None
    return Question(head + mark, rest)


def _function(text: str) -> Question | None:
    """What it returns, and at least one assert; its line ends the question."""
    start = text.find(_ASSERT)
    if start < 0 or "(" not in text[:start] or not text[start - 1].isspace():
        return None
    while True:
        end = text.find("\n", start)
        if end < 0:
            return Question(text.rstrip(), "")
        if not text.startswith(_ASSERT, end + 1):
            return Question(text[:end].rstrip(), text[end:])
        start = end + 1
