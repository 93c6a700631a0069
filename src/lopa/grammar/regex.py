"""Python's regular expressions as automata.

The standard library's own parser reads them, so syntax and meaning are Python's. What is not
regular (back-references, look-around, atomic groups) is refused by name, and so is what depends on
where it stands in a longer text (word boundaries, multi-line anchors).
"""

from __future__ import annotations

import _sre  # type: ignore[import-not-found]
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cache, lru_cache
from re import _casefix, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from lopa.errors import ConfigError
from lopa.grammar import charset
from lopa.grammar.automaton import Dfa, Nfa, begin_work, determinize
from lopa.grammar.charset import CharSet
from lopa.option_checks import MAX_REGEX

_LINE: CharSet = charset.complement(charset.of("\n"))
# What a pattern may have beside what is regular, and how it is called.
_REFUSED = {
    "ASSERT": "look-ahead and look-behind",
    "ASSERT_NOT": "look-ahead and look-behind",
    "GROUPREF": "back-references",
    "GROUPREF_EXISTS": "conditional groups",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive quantifiers",
    "AT_BOUNDARY": r"word boundaries (\b)",
    "AT_NON_BOUNDARY": r"word boundaries (\B)",
}
_LAST_CASED = 0x1FFFF  # no character behind the second plane has a case
_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


def fullmatch(pattern: str) -> Dfa:
    """The texts that `re.fullmatch` finds to match."""
    begin_work()
    return matching(pattern)


def matching(pattern: str) -> Dfa:
    """The same, as a part of something larger."""
    return _compile(pattern, anywhere=False)


def search(pattern: str) -> Dfa:
    r"""Texts in which `re.search` finds a match, and a regex of ECMA-262 does too.

    So `$` is the end and never before a last newline, \d and \w are ASCII, and \D and \W leave
    out digits and letters of every script.
    """
    return _compile(pattern, anywhere=True)


def _compile(pattern: str, anywhere: bool) -> Dfa:
    if len(pattern) > MAX_REGEX:
        raise ConfigError(f"a regex must have at most {MAX_REGEX} characters")
    try:
        tree = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ConfigError(f"the regex {_shown(pattern)} is not valid: {error}") from None
    except RecursionError:
        raise _nested() from None
    flags = tree.state.flags
    if flags & re.MULTILINE:
        raise _refused("multi-line anchors (?m)")
    nfa = Nfa()
    start = nfa.state()
    inner = nfa.state()
    nfa.skip(start, inner)
    if anywhere:
        nfa.char(inner, charset.EVERY, inner)
    try:
        end = _Builder(nfa, narrow=anywhere).sequence(inner, tree, flags, last=True)
    except RecursionError:
        raise _nested() from None
    if anywhere:
        tail = nfa.state()
        nfa.skip(end, tail)
        nfa.char(tail, charset.EVERY, tail)
        end = tail
    return determinize(nfa, start, end)


class _Builder:
    def __init__(self, nfa: Nfa, narrow: bool) -> None:
        self.nfa = nfa
        self.narrow = narrow

    def sequence(self, source: int, items: Any, flags: int, last: bool) -> int:
        """`last`: nothing can follow behind it."""
        for index, (op, value) in enumerate(items):
            source = self.item(source, op, value, flags, last and index == len(items) - 1)
        return source

    def item(self, source: int, op: Any, value: Any, flags: int, last: bool) -> int:
        name = str(op)
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            flags &= re.IGNORECASE | re.ASCII | re.DOTALL
            return self.nfa.char(source, _characters(name, _hashable(value), flags, self.narrow))
        if name == "BRANCH":
            return self.nfa.any_of(source, [self._part(option, flags, last) for option in value[1]])
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            return self.sequence(source, inner, (flags | added) & ~removed, last)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            unbounded = most is _constants.MAXREPEAT
            part = self._part(inner, flags, False)
            return self.nfa.repeat(source, part, int(least), None if unbounded else int(most))
        if name == "AT":
            return self._anchor(source, str(value), last)
        if name == "FAILURE":  # (?!)
            return self.nfa.state()
        raise _refused(_REFUSED.get(name, name.lower()))

    def _part(self, items: Any, flags: int, last: bool) -> Callable[[int], int]:
        return lambda source: self.sequence(source, items, flags, last)

    def _anchor(self, source: int, name: str, last: bool) -> int:
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            edges = self.nfa.at_start
        elif name == "AT_END_STRING" or (name == "AT_END" and last):
            edges = self.nfa.at_end
        elif name == "AT_END":
            raise _refused("$ in the middle of a pattern")
        else:
            raise _refused(_REFUSED.get(name, name.lower()))
        target = self.nfa.state()
        edges.setdefault(source, []).append(target)
        return target


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value


@cache
def _every_character() -> str:
    points = [np.arange(low, high + 1, dtype="<u4") for low, high in charset.EVERY]
    return np.concatenate(points).tobytes().decode("utf-32-le")


@cache
def _category(name: str, ascii_only: bool) -> CharSet:
    kind = name.removeprefix("CATEGORY_").removeprefix("NOT_")
    runs = re.compile(_CATEGORIES[kind] + "+", re.ASCII if ascii_only else 0)
    # A run may go across the gap where the surrogates are.
    found = charset.union((ord(m[0][0]), ord(m[0][-1])) for m in runs.finditer(_every_character()))
    found = charset.intersection(found, charset.EVERY)
    return charset.complement(found) if "NOT_" in name else found


# The same sets come again and again, in `[a-z]{100}` say.
@lru_cache(maxsize=10_000)
def _characters(name: str, value: Any, flags: int, narrow: bool) -> CharSet:
    """`narrow`: of the two readings of a category, ASCII's and Unicode's, what both allow."""
    if name == "ANY":
        return charset.EVERY if flags & re.DOTALL else _LINE
    if name == "IN":
        items, negated = value, False
    else:
        items, negated = (("LITERAL", value),), name == "NOT_LITERAL"
    ranges: list[tuple[int, int]] = []
    categories: list[tuple[int, int]] = []
    for kind, item in ((str(kind), item) for kind, item in items):
        if kind == "NEGATE":
            negated = True
        elif kind == "LITERAL":
            ranges.append((item, item))
        elif kind == "RANGE":
            ranges.append(item)
        elif kind == "CATEGORY":
            narrower = narrow and negated == ("NOT_" in str(item))
            categories += _category(str(item), narrower or bool(flags & re.ASCII))
    found = charset.union(ranges)
    if flags & re.IGNORECASE:
        found = _ignoring_case(found, bool(flags & re.ASCII))
    found = charset.union([*found, *categories])
    found = charset.intersection(found, charset.EVERY)
    return charset.complement(found) if negated else found


@cache
def _cased() -> dict[int, list[int]]:
    """Lower case → the characters that have it as theirs, where there are several."""
    found: dict[int, list[int]] = {}
    for point in range(_LAST_CASED + 1):
        lower = _sre.unicode_tolower(point)
        if lower != point:
            found.setdefault(lower, [lower]).append(point)
    return found


def _ignoring_case(chars: CharSet, ascii_only: bool) -> CharSet:
    """All that Python's (?i) takes for one of `chars`."""
    if ascii_only:
        both = [
            (low, high)
            for a, b in ((65, 90), (97, 122))
            for low, high in charset.intersection(chars, ((a, b),))
        ]
        swapped = [(low ^ 32, high ^ 32) for low, high in both]
        return charset.union([*chars, *swapped])
    cased, points = _cased(), _with_case()
    more: set[int] = set()
    for low, high in chars:
        for point in points[bisect_left(points, low) : bisect_right(points, high)]:
            lower = _sre.unicode_tolower(point)
            for same in (lower, *_casefix._EXTRA_CASES.get(lower, ())):
                more.update(cased.get(same, (same,)))
    return charset.union([*chars, *((p, p) for p in more)])


@cache
def _with_case() -> list[int]:
    """Characters that (?i) takes for others."""
    return sorted({*_casefix._EXTRA_CASES, *(p for same in _cased().values() for p in same)})


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:59] + "…")


def _nested() -> ConfigError:
    return ConfigError("the regex is nested too deep: use fewer groups inside each other")


def _refused(what: str) -> ConfigError:
    return ConfigError(f"a regex may not have {what} here: only what is regular can be kept to")
