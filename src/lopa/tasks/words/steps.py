"""The equations that solve a planned word problem, without wording."""

from dataclasses import dataclass

from lopa.tasks.rng import Rng
from lopa.tasks.words.story import Event, Story

REPEATABLE = frozenset(("gain", "lose"))
"""Event kinds that may follow each other and may then be worked out in one go."""


@dataclass(frozen=True, slots=True)
class Step:
    """One equation `x op y = result`. A free step depends on no other step."""

    kind: str
    op: str
    x: int
    y: int
    result: int
    unit: str
    free: bool = False
    third: int = 0


def solve(story: Story, rng: Rng) -> list[Step]:
    """The steps to the result, in one of the orders that the arithmetic allows."""
    return _ordered(_steps(story, rng), rng)


def _steps(story: Story, rng: Rng) -> list[Step]:
    """The equations that solve the problem, in the order the story is told."""
    item = "$" if story.scenario.kind == "cash" or story.place else "item"
    events = story.events
    steps: list[Step] = []
    index = 0
    while index < len(events):
        event = events[index]
        following = events[index + 1] if index + 1 < len(events) else event
        if event.kind == following.kind and event.kind in REPEATABLE and rng.chance(0.4):
            both = event.a + following.a
            op = "+" if event.kind == "gain" else "-"
            steps.append(Step(f"merge{event.kind}", "+", event.a, following.a, both, item, True))
            steps.append(Step(f"{event.kind}2", op, event.before, both, following.after, item))
            index += 2
            continue
        steps += _event_steps(event, item)
        index += 1
    return steps


def _event_steps(event: Event, item: str) -> list[Step]:
    kind, a, b, before, after = event.kind, event.a, event.b, event.before, event.after
    if kind in ("have", "left", "total"):
        return []
    if kind in ("groups", "rate", "times", "buy"):
        return [Step(kind, "*", a, b, after, item)]
    if kind in ("more", "two"):
        return [Step(kind, "+", a, b, after, item)]
    if kind == "fewer":
        return [Step(kind, "-", a, b, after, item)]
    if kind == "half":
        return [Step(kind, "/", a, 2, after, item)]
    if kind == "grow":
        second, third = a + b, a + 2 * b
        return [
            Step("grow1", "+", a, b, second, item),
            Step("grow2", "+", second, b, third, item),
            Step("grow3", "sum", a, second, after, item, third=third),
        ]
    if kind in ("gain", "plus", "fee"):
        return [Step(kind, "+", before, a, after, item)]
    if kind in ("lose", "coupon"):
        return [Step(kind, "-", before, a, after, item)]
    if kind == "gainboxes":
        return [
            Step("product", "*", a, b, a * b, item, True),
            Step(kind, "+", before, a * b, after, item),
        ]
    if kind == "second":
        return [
            Step(kind, "*", a, b, a * b, item, True),
            Step("addup", "+", before, a * b, after, item),
        ]
    if kind == "loseeach":
        return [
            Step("handout", "*", a, b, a * b, item, True),
            Step(kind, "-", before, a * b, after, item),
        ]
    if kind == "losehalf":
        return [Step(kind, "/", before, 2, after, item)]
    if kind == "losepart":
        return [Step("part", "/", before, a, b, item), Step(kind, "-", before, b, after, item)]
    if kind == "percent":
        return [Step(kind, "%", before, a, b, item), Step("losepart", "-", before, b, after, item)]
    if kind == "discount":
        return [Step(kind, "%", before, a, b, item), Step("coupon", "-", before, b, after, item)]
    if kind == "double":
        return [Step(kind, "*", before, 2, after, item)]
    if kind in ("share", "splitbill"):
        return [Step(kind, "/", before, a, after, item)]
    if kind == "pack":
        return [Step(kind, "/", before, a, after, "box")]
    if kind in ("goal", "change"):
        return [Step(kind, "-", a, before, after, item)]
    if kind == "compare":
        return [Step(kind, "-", max(a, before), min(a, before), after, item)]
    if kind == "together":
        return [Step(kind, "+", before, a, after, item)]
    sale = Step("sell", "*", before, a, before * a, "$")
    if kind == "sell":
        return [sale]
    return [sale, Step("spend", "-", before * a, b, after, "$")]


def _ordered(steps: list[Step], rng: Rng) -> list[Step]:
    """The steps in a random order that the arithmetic allows: free steps may come first."""
    for index in range(1, len(steps)):
        if steps[index].free and rng.chance(0.4):
            steps.insert(0, steps.pop(index))
    return steps
