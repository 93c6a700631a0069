"""Regexes made from a seed."""

from __future__ import annotations

from random import Random

LETTERS = "ab1 é日🙂.\n_-K"
ATOMS = (
    *("a", "b", "ab", "é", "日", "1", r"\.", ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "-"),
    *("[ab]", "[^a]", "[a-z]", "[^a-zé]", r"[\d_]", r"[^\w]", "[à-ü]", "[一-龥]", "🙂", r"\n"),
    *("(?s:.)", "(?i:k)", "(?i:[a-z])", "(?a:\\w)", "(?i:é)", r"[\s-]", "(?:)", r"\u00e9"),
)
COUNTS = ("*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "*?", "+?", "??")


def made_up_regex(seed: int, depth: int = 2) -> str:
    rng = Random(seed)
    flags = rng.choice(["", "", "", "(?i)", "(?s)", "(?a)"])
    ends = rng.choice([("", ""), ("", ""), ("^", "$"), (r"\A", r"\Z")])
    return flags + ends[0] + _sequence(rng, depth) + ends[1]


def _sequence(rng: Random, depth: int) -> str:
    return "".join(_item(rng, depth) for _ in range(rng.randint(1, 2)))


def _item(rng: Random, depth: int) -> str:
    if not depth or rng.random() < 0.5:
        atom = rng.choice(ATOMS)
        return f"(?:{atom}){rng.choice(COUNTS)}" if rng.random() < 0.4 else atom
    options = "|".join(_sequence(rng, depth - 1) for _ in range(rng.randint(1, 2)))
    group = rng.choice(["(", "(?:", f"(?P<g{rng.randrange(10**9)}>"])
    return f"{group}{options}){rng.choice(COUNTS) if rng.random() < 0.4 else ''}"


def near(text: str, rng: Random) -> str:
    """The text with a character more, less, or another."""
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(["", rng.choice(LETTERS)]) + text[at + rng.randint(0, 1) :]
