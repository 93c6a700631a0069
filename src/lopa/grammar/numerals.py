"""Numbers between two bounds, in decimal.

A number has no exponent, no leading zeros and no minus sign before zero. Its digits are limited, so
that whatever reads it as a float tells it from a bound that it must not reach.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

from lopa.grammar import charset
from lopa.grammar.automaton import Nfa

WHOLE_DIGITS = 15  # of a number without a bound: every float holds them
FRACTION_DIGITS = 9
_MOST_DIGITS = 30  # of a bound


def digits_to_tell(bound: Fraction) -> int:
    """Digits behind the point with which no other number is the same float as `bound`."""
    step = math.ulp(float(bound))
    found = FRACTION_DIGITS
    while found and 10**-found < 2 * step:
        found -= 1
    return found


def fits(bound: Fraction) -> bool:
    return bool(abs(bound) < 10**_MOST_DIGITS)


def of_number(value: int | float) -> Fraction:
    """A bound as it is written, which for 0.1 is not the float's own value.

    Where floats are far apart it is that value: whole numbers are compared with it as they are.
    """
    if isinstance(value, float) and abs(value) < 2**53:
        return Fraction(Decimal(repr(value)))
    return Fraction(value)


def between(nfa: Nfa, source: int, low: Fraction | None, high: Fraction | None, digits: int) -> int:
    """A number from `low` to `high`, both included, with up to `digits` behind the point."""
    unit = 10**digits
    limit = 10 ** (WHOLE_DIGITS + digits) - 1  # in units
    least = -limit if low is None else math.ceil(low * unit)
    most = limit if high is None else math.floor(high * unit)
    if low is not None and high is None:
        most = max(limit, 10 * least)
    if high is not None and low is None:
        least = min(-limit, 10 * most)
    target = nfa.state()
    if most >= 0:
        _magnitudes(nfa, source, max(least, 0), most, digits, target)
    if least < 0:
        minus = nfa.text(source, "-")
        _magnitudes(nfa, minus, max(-most, 1), -least, digits, target)
    return target


def _magnitudes(nfa: Nfa, source: int, least: int, most: int, digits: int, target: int) -> None:
    """From `least` to `most` units of the last digit, neither of them below 0."""
    for whole in range(1, max(1, len(str(most)) - digits) + 1):
        # Of all with so many digits before the point:
        first = 0 if whole == 1 else 10 ** (whole - 1 + digits)
        low, high = max(least, first), min(most, 10 ** (whole + digits) - 1)
        if low <= high:
            bounds = (str(bound).zfill(whole + digits) for bound in (low, high))
            _same_length(nfa, source, *bounds, whole=whole, target=target)


def _same_length(nfa: Nfa, source: int, low: str, high: str, *, whole: int, target: int) -> None:
    # A state is told by what it has in common with each bound so far: all of it, or it is apart.
    states = {(True, True): source}
    for place, (below, above) in enumerate(zip(low, high, strict=True)):
        following: dict[tuple[bool, bool], int] = {}
        for (is_low, is_high), state in states.items():
            if place == whole:
                state = nfa.text(state, ".")
            first, last = int(below) if is_low else 0, int(above) if is_high else 9
            for digit in range(first, last + 1):
                key = is_low and digit == int(below), is_high and digit == int(above)
                if key not in following:
                    following[key] = nfa.state()
                nfa.char(state, charset.of(str(digit)), following[key])
        states = following
        if place + 1 >= whole:
            for (is_low, _), state in states.items():
                if not is_low or not low[place + 1 :].strip("0"):
                    nfa.skip(state, target)


def multiples(nfa: Nfa, source: int, of: int) -> int:
    """A whole number, with or without a minus sign, that `of` divides."""
    target = nfa.state()
    remainders = [nfa.state() for _ in range(of)]
    signed = nfa.char(source, charset.of("-"))
    for start in (source, signed):
        for digit in range(0 if start == source else 1, 10):
            if digit == 0:
                nfa.char(start, charset.of("0"), target)
            else:
                nfa.char(start, charset.of(str(digit)), remainders[digit % of])
    for remainder, state in enumerate(remainders):
        for digit in range(10):
            nfa.char(state, charset.of(str(digit)), remainders[(10 * remainder + digit) % of])
    nfa.skip(remainders[0], target)
    return target
