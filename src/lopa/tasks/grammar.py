"""A small grammar notation: text with alternatives in brackets, expanded by a writer's habits.

`"[Now|Then] {who} has"` expands to one alternative per bracket. Which phrase of a list a writer
takes, and which alternative, is the same all through a text, but for a rare exception: who has read
its first lines can foretell how the others are put.
Brackets do not nest; an empty alternative is allowed. Fields in braces are filled in afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lopa.tasks.rng import Rng

T = TypeVar("T")
Phrase = tuple[str | tuple[str, ...], ...]

EXCEPTIONS = 0.02
"""How often a writer leaves a habit."""


@dataclass(frozen=True, slots=True)
class Habit:
    """A place in every list of options: the last option where the list is shorter."""

    place: int

    def of(self, options: Sequence[T]) -> T:
        """The option that this habit takes."""
        return options[min(self.place, len(options) - 1)]


@dataclass(frozen=True, slots=True)
class Habits:
    """How a writer chooses among whole phrases and among the alternatives in them."""

    phrase: Habit
    bracket: Habit


def pick_habits(rng: Rng) -> Habits:
    """The habits of one text: earlier phrases are likelier, the first alternatives much so."""
    return Habits(Habit(rng.skewed(range(4))), Habit(rng.leaning(range(3))))


def phrase(text: str) -> Phrase:
    """Parse the notation once, so that expanding is cheap."""
    parts: list[str | tuple[str, ...]] = []
    for piece in text.split("["):
        inside, bracket, after = piece.partition("]")
        if bracket:
            parts.append(tuple(inside.split("|")))
            if after:
                parts.append(after)
        elif piece:
            parts.append(piece)
    return tuple(parts)


def phrases(*texts: str) -> tuple[Phrase, ...]:
    """Several phrases, likelier ones first."""
    return tuple(phrase(text) for text in texts)


def expand(
    rng: Rng, habits: Habits, options: tuple[Phrase, ...], fields: Mapping[str, object]
) -> str:
    """One phrase with its alternatives as the habits have them, fields filled in, spaces tidy."""
    if rng.chance(EXCEPTIONS):
        habits = pick_habits(rng)
    alternative = habits.bracket.of
    chosen = habits.phrase.of(options)
    text = "".join([part if type(part) is str else alternative(part) for part in chosen])
    return " ".join(text.format_map(fields).split())
