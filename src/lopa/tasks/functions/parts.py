"""The parts small functions are composed of: a source, a predicate, a map and a reduction.

Every part carries its English wordings, its code wordings and a reference implementation. In code
wordings `{x}` is the element and `{k}` the parameter as a Python literal; in English `{k}` is the
parameter and `{P}` or `{N}` the noun phrase so far.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lopa.tasks.rng import Rng

_WORDS = (
    "apple river stone level Anna cloud tiger noon bread Sky lamp green kayak house Moon tree "
    "radar sugar ice Paris window sun dog eye Table glass wave civic otter pen Bob music a in"
)
WORD_LIST: tuple[str, ...] = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Source:
    """Where the elements come from. `elements` is the code, `type_hint` of the argument."""

    name: str
    element: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...]
    nouns: tuple[str, ...]
    elements: tuple[str, ...]
    type_hint: str
    listing: Callable[[Any], list[Any]]
    sample: Callable[[Rng, int], Any]
    empty: Any


@dataclass(frozen=True, slots=True)
class Predicate:
    """A condition on one element. An empty `codes` means that every element is kept."""

    name: str
    element: str
    phrases: tuple[str, ...]
    words: tuple[str, ...]
    codes: tuple[str, ...]
    negations: tuple[str, ...]
    holds: Callable[[Any, Any], bool]
    parameters: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Map:
    """A change made to one element. An empty `codes` means that it is left as it is."""

    name: str
    element: str
    result: str
    phrases: tuple[str, ...]
    orders: tuple[str, ...]
    words: tuple[str, ...]
    codes: tuple[str, ...]
    apply: Callable[[Any, Any], Any]
    parameters: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the resulting values become one return value. `inputs` are the value types it takes."""

    name: str
    inputs: tuple[str, ...]
    phrases: tuple[str, ...]
    orders: tuple[str, ...]
    words: tuple[str, ...]
    apply: Callable[[list[Any], Any], Any]
    parameters: dict[str, tuple[str, ...]] | None = None
    needs_plain_elements: bool = False


def _int_list(rng: Rng, length: int) -> list[int]:
    return [rng.between(-9, 20) for _ in range(length)]


def _text(rng: Rng, length: int) -> str:
    words = [rng.pick(WORD_LIST) for _ in range(1 + length // 4)]
    if rng.chance(0.5):
        words.append(str(rng.between(1, 99)))
    return rng.pick((" ", "", " ")).join(words)


def _words(rng: Rng, length: int) -> list[str]:
    return [rng.pick(WORD_LIST) for _ in range(length)]


SOURCES: tuple[Source, ...] = (
    Source(
        "list",
        "int",
        ("numbers", "values", "nums", "data", "items"),
        ("x", "n", "num", "value", "v", "number"),
        ("numbers in {a}", "elements of {a}", "values in the list {a}"),
        ("{a}",),
        "list[int]",
        lambda value: list(value),
        _int_list,
        [],
    ),
    Source(
        "range",
        "int",
        ("n", "limit", "top", "end"),
        ("i", "x", "k", "number", "value"),
        ("numbers from 1 to {a}", "whole numbers from 1 up to {a}", "integers from 1 to {a}"),
        ("range(1, {a} + 1)",),
        "int",
        lambda value: list(range(1, value + 1)),
        lambda rng, length: rng.between(2, 4 + 2 * length),
        0,
    ),
    Source(
        "digits",
        "int",
        ("n", "number", "num", "value"),
        ("d", "digit", "x", "c"),
        ("digits of {a}", "decimal digits of {a}", "digits of the number {a}"),
        ("map(int, str({a}))", "[int(c) for c in str({a})]"),
        "int",
        lambda value: [int(c) for c in str(value)],
        lambda rng, length: rng.between(10 ** (length - 2), 10 ** (length - 1)),
        0,
    ),
    Source(
        "chars",
        "char",
        ("text", "s", "string", "line"),
        ("c", "ch", "char", "letter"),
        ("characters in {a}", "characters of {a}", "characters of the string {a}"),
        ("{a}",),
        "str",
        lambda value: list(value),
        _text,
        "",
    ),
    Source(
        "words",
        "word",
        ("words", "names", "strings", "tokens"),
        ("w", "word", "name", "s"),
        ("strings in {a}", "words in {a}", "words in the list {a}"),
        ("{a}",),
        "list[str]",
        lambda value: list(value),
        _words,
        [],
    ),
    Source(
        "sentence",
        "word",
        ("sentence", "text", "line", "phrase"),
        ("w", "word", "part", "token"),
        ("words in {a}", "words of the sentence {a}", "words of {a}"),
        ("{a}.split()",),
        "str",
        lambda value: str(value).split(),
        lambda rng, length: " ".join(_words(rng, length)),
        "",
    ),
)


def _product(values: list[Any], k: Any) -> Any:
    result = 1
    for value in values:
        result *= value
    return result


_ANY = ("int", "str")

REDUCTIONS: tuple[Reduction, ...] = (
    Reduction(
        "list",
        _ANY,
        ("a list of {P}", "the list of {P}"),
        ("return them as a list", "return the resulting list"),
        ("list", "get", "collect"),
        lambda v, k: v,
    ),
    Reduction(
        "sum",
        ("int",),
        ("the sum of {P}", "the total of {P}"),
        ("return their sum", "add them up and return the total"),
        ("sum", "total"),
        lambda v, k: sum(v),
    ),
    Reduction(
        "product",
        ("int",),
        ("the product of {P}", "the result of multiplying together {P}"),
        ("return their product", "multiply them together"),
        ("product", "multiply"),
        _product,
    ),
    Reduction(
        "count",
        _ANY,
        ("the number of {P}", "the count of {P}"),
        ("return how many there are", "return their count"),
        ("count", "number"),
        lambda v, k: len(v),
        needs_plain_elements=True,
    ),
    Reduction(
        "largest",
        ("int",),
        ("the largest of {P}, or 0 if there are none", "the maximum of {P} (0 if there are none)"),
        ("return the largest, or 0 if there are none", "return the maximum (0 if none)"),
        ("max", "largest"),
        lambda v, k: max(v, default=0),
    ),
    Reduction(
        "smallest",
        ("int",),
        ("the smallest of {P}, or 0 if there are none", "the minimum of {P} (0 if there are none)"),
        ("return the smallest, or 0 if there are none", "return the minimum (0 if none)"),
        ("min", "smallest"),
        lambda v, k: min(v, default=0),
    ),
    Reduction(
        "first",
        _ANY,
        (
            "the first of {P}, or None if there are none",
            "the first of {P} (None if there are none)",
        ),
        ("return the first one, or None if there are none", "return the first (None if none)"),
        ("first", "head"),
        lambda v, k: v[0] if v else None,
    ),
    Reduction(
        "last",
        _ANY,
        ("the last of {P}, or None if there are none", "the last of {P} (None if there are none)"),
        ("return the last one, or None if there are none", "return the last (None if none)"),
        ("last", "tail"),
        lambda v, k: v[-1] if v else None,
    ),
    Reduction(
        "ascending",
        _ANY,
        ("a sorted list of {P}", "a list, in ascending order, of {P}"),
        ("return them sorted", "return them as a list in ascending order"),
        ("sorted", "ordered"),
        lambda v, k: sorted(v),
    ),
    Reduction(
        "descending",
        _ANY,
        ("a list sorted from high to low of {P}", "a list, in descending order, of {P}"),
        ("return them sorted from high to low", "return them as a list in descending order"),
        ("descending", "ranked"),
        lambda v, k: sorted(v, reverse=True),
    ),
    Reduction(
        "reverse",
        _ANY,
        ("a list, in reverse order, of {P}", "a reversed list of {P}"),
        ("return them as a list in reverse order", "return the list reversed"),
        ("reversed", "reverse"),
        lambda v, k: v[::-1],
    ),
    Reduction(
        "unique",
        _ANY,
        (
            "a sorted list without duplicates of {P}",
            "a sorted list of the distinct values among {P}",
        ),
        ("return the distinct values sorted", "return them sorted without duplicates"),
        ("unique", "distinct"),
        lambda v, k: sorted(set(v)),
    ),
    Reduction(
        "countunique",
        _ANY,
        ("the number of distinct values among {P}", "how many different values occur among {P}"),
        ("return how many distinct values there are", "count the different values"),
        ("count_unique", "variety"),
        lambda v, k: len(set(v)),
    ),
    Reduction(
        "text",
        _ANY,
        ("a string of {P} joined by {k}", "{P} joined into one string with {k}"),
        ("join them with {k}", "return them joined by {k}"),
        ("join", "text"),
        lambda v, k: k.join(map(str, v)),
        {"int": (",", "-", " "), "str": ("", " ", "-", "+")},
    ),
    Reduction(
        "any",
        _ANY,
        ("whether there are any of {P}", "True if any of {P} exist and else False"),
        ("return whether there are any", "return True if there are any"),
        ("any", "has"),
        lambda v, k: bool(v),
        needs_plain_elements=True,
    ),
)
