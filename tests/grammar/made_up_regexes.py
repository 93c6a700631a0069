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
ENDLESS = ("*", "+", "{2,}")


def made_up_regex(seed: int, depth: int = 2, *, nested: bool = True) -> str:
    """nested: there may be endless counts inside of endless counts, for which `re` takes for ever
    where a long text does not match."""
    regex = _made_up(Random(seed), depth)
    if nested or not _is_nested(regex):
        return regex
    return made_up_regex(seed + 1_000_000, depth, nested=False)


def _made_up(rng: Random, depth: int) -> str:
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


def _is_nested(regex: str) -> bool:
    """Whether a group with an endless count has one inside."""
    open_groups: list[bool] = []  # whether there is an endless count in it
    at = 0
    while at < len(regex):
        if regex[at] == "\\":
            at += 2
            continue
        if regex[at] == "(":
            open_groups.append(False)
        elif regex[at] == ")":
            inside = open_groups.pop()
            endless = regex.startswith(ENDLESS, at + 1)
            if inside and endless:
                return True
            if open_groups:
                open_groups[-1] |= inside or endless
        at += 1
    return False


def near(text: str, rng: Random) -> str:
    """The text with a character more, less, or another."""
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(["", rng.choice(LETTERS)]) + text[at + rng.randint(0, 1) :]
