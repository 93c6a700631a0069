"""Regexes as automata: the same texts match as with `re`, and what cannot be kept to is refused."""

from __future__ import annotations

import re
import warnings
from random import Random

import pytest
from made_up_regexes import LETTERS, made_up_regex, near
from walks import walk

from lopa.errors import ConfigError
from lopa.grammar import charset, regex
from lopa.grammar.utf8 import to_bytes


@pytest.mark.parametrize("start", range(0, 240, 40))
def test_they_match_what_re_matches(start: int) -> None:
    for seed in range(start, start + 40):
        pattern = made_up_regex(seed)
        dfa = regex.fullmatch(pattern)
        in_bytes = to_bytes(dfa)
        rng = Random(seed)
        texts = ["".join(rng.choices(LETTERS, k=rng.randrange(6))) for _ in range(40)]
        if not dfa.is_empty:
            walked = [walk(dfa, rng, 8) for _ in range(20)]  # `re` takes ages to refuse long ones
            for text in walked:
                assert re.fullmatch(pattern, text), (pattern, text)
            texts += [near(text, rng) for text in walked]
        for text in texts:
            wanted = re.fullmatch(pattern, text) is not None
            assert dfa.accepts(text) == wanted, (pattern, text)
            assert in_bytes.accepts(text.encode()) == wanted, (pattern, text)


@pytest.mark.parametrize(
    "pattern", [r"\w", r"\d", r"(?a)\s", ".", "(?i)[k-s]", "(?i)[À-Ỳ]", "(?i)ſ|K|θ", "(?ai)[K-k]"]
)
def test_every_character_is_told(pattern: str) -> None:
    """Whole sets against `re`, and their bytes against the codec."""
    dfa = regex.fullmatch(pattern)
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    runs = re.finditer(f"(?:{pattern})+" if "(" not in pattern else pattern, every)
    wanted = charset.union((ord(run[0][0]), ord(run[0][-1])) for run in runs)
    (found,) = [chars for chars, _ in dfa.moves(0)]
    assert found == charset.intersection(wanted, charset.EVERY)
    in_bytes = to_bytes(dfa)
    for char in every[::997]:
        held = any(low <= ord(char) <= high for low, high in found)
        assert in_bytes.accepts(char.encode()) == held
    for bad in (b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80"):
        assert not in_bytes.accepts(bad)


@pytest.mark.parametrize("pattern", ["^a|b$", "a", "^$", "", "x(^a|b)c", "^(a|b)*$", r"\d\Z", "b+"])
def test_search_finds_it_anywhere(pattern: str) -> None:
    dfa = regex.search(pattern)
    for seed in range(300):
        text = "".join(Random(seed).choices("abcx1", k=seed % 5))
        assert dfa.accepts(text) == (re.search(pattern, text) is not None), text


def test_search_keeps_to_both_readings() -> None:
    """Python's and ECMA's: digits are ASCII, and what is no letter is none in any script."""
    assert not regex.search(r"^\d$").accepts("٣")
    assert not regex.search(r"^\W$").accepts("é")
    assert not regex.search(r"^[^\w]$").accepts("é")
    assert not regex.search("^a$").accepts("a\n")
    assert regex.fullmatch(r"\d").accepts("٣")


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-ahead and look-behind"),
        (r"(a)\1", "back-references"),
        (r"(a)?(?(1)b|c)", "conditional"),
        (r"\bword", "word boundaries"),
        ("(?>a*)a", "atomic"),
        ("a*+a", "possessive"),
        ("(?m)^a", "multi-line"),
        ("a$b", r"\$ in the middle"),
        ("(a", "not valid"),
        ("*", "not valid"),
        (r"\p{L}", "not valid"),
    ],
)
def test_what_is_not_regular_is_refused_by_name(pattern: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        regex.fullmatch(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){30}",
        "((a{0,100}){0,100}){0,100}",
        "a{4294967294}",
        "(a?){3000}a{3000}",
        "(" * 4000,
        "(" * 900 + "a" + ")" * 900,
        "a" * 10_001,
        r"(\w|\d|\s)*x(\w|\d){30}",
        "(.*a|.*b.*c.*d){60}",
    ],
)
def test_hostile_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"too large|too deep|at most"):
        to_bytes(regex.fullmatch(pattern))


def test_no_text_at_all() -> None:
    assert regex.fullmatch("a^b").is_empty
    assert regex.fullmatch("[^\\s\\S]").is_empty
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert regex.fullmatch("").accepts("")
