"""A small grammar notation: text with alternatives in brackets, expanded at random.

`"[Now|Then] {who} has"` expands to one alternative per bracket, mostly the first: the choice that
matters is the one between phrases, a bracket is a writer's occasional whim.
Brackets do not nest; an empty alternative is allowed. Fields in braces are filled in afterwards.
"""

from collections.abc import Mapping

from lopa.evaluation.draw import Draw

Phrase = tuple[str | tuple[str, ...], ...]


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


def expand(draw: Draw, options: tuple[Phrase, ...], fields: Mapping[str, object]) -> str:
    """Choose one phrase and the alternatives in it, fill in the fields, tidy the spaces."""
    chosen = draw.skewed(options)
    text = "".join([part if type(part) is str else draw.leaning(part) for part in chosen])
    return " ".join(text.format_map(fields).split())
