"""What happens in a word problem: its structure, its people and things, and its numbers.

A structure is a chain `start > changes > final` of event kinds, named like `groups>lose>share`.
The story holds no wording; the question and the answer are both worded from it.
"""

from dataclasses import dataclass

from lopa.tasks.rng import Rng, accepts, is_held_out
from lopa.tasks.words.scenarios import GOODS, PEOPLE, SCENARIOS, Deed, Noun, Person, Scenario

# Number of written steps each event kind takes to work out.
STARTS = {
    "have": 0,
    "groups": 1,
    "rate": 1,
    "times": 1,
    "more": 1,
    "fewer": 1,
    "half": 1,
    "two": 1,
    "grow": 3,
}
CHANGES = {
    "gain": 1,
    "gainboxes": 2,
    "lose": 1,
    "loseeach": 2,
    "losehalf": 1,
    "losepart": 2,
    "percent": 2,
    "double": 1,
}
FINALS = {
    "left": 0,
    "share": 1,
    "pack": 1,
    "sell": 1,
    "sellspend": 2,
    "goal": 1,
    "compare": 1,
    "together": 1,
}
SHOP_STARTS = {"buy": 1, "buyplus": 2, "buytwo": 3}
SHOP_CHANGES = {"coupon": 1, "fee": 1, "discount": 2}
SHOP_FINALS = {"total": 0, "change": 1, "splitbill": 1}

TWO_PEOPLE = frozenset(("times", "more", "fewer", "half"))
"""Starts that compare with a second person."""

_KINDS = {
    "stock": frozenset((*STARTS, *CHANGES, *FINALS)),
    "tally": frozenset((*STARTS, "gain", "left", "goal", "compare", "together"))
    - {"have", "groups"},
    "cash": frozenset(
        (*STARTS, "gain", "lose", "losehalf", "losepart", "double", "left", "share", "pack")
    )
    - {"groups"}
    | {"goal", "compare", "together"},
}

Structure = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing told in the question. `before` and `after` are the running number around it."""

    kind: str
    a: int
    b: int
    before: int
    after: int
    deed: Deed | None = None


@dataclass(frozen=True, slots=True)
class Story:
    """Everything a problem is about, without wording. `place` is set for shopping only."""

    structure: str
    person: Person
    other: Person
    scenario: Scenario
    item: Noun
    box: Noun
    period: str
    place: str
    events: tuple[Event, ...]

    @property
    def result(self) -> int:
        """The number the problem asks for."""
        return self.events[-1].after

    @property
    def content(self) -> str:
        """The meaning as text: equal for two problems that differ in wording only."""
        numbers = ",".join(f"{event.a}.{event.b}" for event in self.events)
        return (
            f"{self.structure} {self.person.name} {self.other.name} {self.scenario.name} "
            f"{self.item.one} {self.box.one} {self.period} {self.place} {numbers}"
        )


def _chains() -> list[tuple[Structure, int]]:
    chains: list[tuple[Structure, int]] = []
    pairs = [
        (first, second)
        for first in CHANGES
        for second in CHANGES
        if first != second or first in ("gain", "lose")
    ]
    middles: list[Structure] = [(), *((kind,) for kind in CHANGES), *pairs]
    for start, start_cost in STARTS.items():
        for middle in middles:
            for final, final_cost in FINALS.items():
                if final == "together" and (start not in TWO_PEOPLE or middle):
                    continue
                if final == "compare" and start in TWO_PEOPLE:
                    continue
                cost = start_cost + sum(CHANGES[kind] for kind in middle) + final_cost
                chains.append(((start, *middle, final), cost))
    for start, start_cost in SHOP_STARTS.items():
        for middle in [(), *((kind,) for kind in SHOP_CHANGES)]:
            for final, final_cost in SHOP_FINALS.items():
                cost = start_cost + sum(SHOP_CHANGES[kind] for kind in middle) + final_cost
                chains.append(((start, *middle, final), cost))
    return [(chain, cost) for chain, cost in chains if 2 <= cost <= 4]


def _by_steps(held_out: bool, shop: bool) -> dict[int, list[Structure]]:
    table: dict[int, list[Structure]] = {2: [], 3: [], 4: []}
    for chain, cost in _chains():
        if is_held_out(">".join(chain)) == held_out and (chain[0] in SHOP_STARTS) == shop:
            table[cost].append(chain)
    return table


_TABLES = {
    (held_out, shop): _by_steps(held_out, shop)
    for held_out in (False, True)
    for shop in (False, True)
}
STRUCTURES: tuple[str, ...] = tuple(">".join(chain) for chain, _ in _chains())
_SCENARIOS_FOR = {
    chain: tuple(s for s in SCENARIOS if all(kind in _KINDS[s.kind] for kind in chain))
    for chain, _ in _chains()
}


def pick_story(rng: Rng, split: str) -> Story:
    """Pick stories until one belongs to the split."""
    while True:
        story = _try_story(rng, split == "held-out")
        if story is not None and accepts(split, story.structure, story.content):
            return story


def _try_story(rng: Rng, held_out: bool) -> Story | None:
    shop = rng.chance(0.12)
    steps = rng.pick((2, 2, 2, 3, 3, 3, 3, 4))
    chains = _TABLES[held_out, shop][steps]
    if not chains:
        return None
    chain = rng.pick(chains)
    side = rng.between(0, 1)
    person, other = rng.pick(PEOPLE[side]), rng.pick(PEOPLE[1 - side])
    if shop:
        scenario = SCENARIOS[0]
        place, goods = rng.pick(GOODS)
        item, box = rng.pick(goods), rng.pick(goods)
        if item is box:
            return None
        period = ""
        events = _shop_events(rng, chain)
    else:
        scenario = rng.pick(_SCENARIOS_FOR[chain])
        place = ""
        item = rng.pick(scenario.items)
        box = rng.pick(scenario.boxes) if scenario.boxes else item
        period = rng.pick(scenario.periods)
        events = _events(rng, chain, scenario)
    if events is None:
        return None
    return Story(">".join(chain), person, other, scenario, item, box, period, place, tuple(events))


def _events(rng: Rng, chain: Structure, scenario: Scenario) -> list[Event] | None:
    event = _start(rng, chain[0], scenario)
    events = [event] if event else []
    for kind in chain[1:-1]:
        event = _change(rng, kind, event.after, scenario) if event else None
        if event is None or not 3 <= event.after <= 120:
            return None
        # The same deed twice would make the two mentions hard to tell apart.
        if event.deed is not None and event.deed is events[-1].deed:
            return None
        events.append(event)
    event = _final(rng, chain[-1], event.after, events[0]) if event else None
    if event is None:
        return None
    events.append(event)
    return events


def _start(rng: Rng, kind: str, scenario: Scenario) -> Event | None:
    between = rng.between
    deed = rng.skewed(scenario.make)
    if kind == "have":
        a = between(6, 60)
        return Event(kind, a, 0, 0, a)
    if kind == "groups":
        a, b = between(2, 9), between(2, 12)
        return Event(kind, a, b, 0, a * b)
    if kind == "rate":
        a, b = between(2, 12), between(2, 9)
        return Event(kind, a, b, 0, a * b, deed)
    if kind == "times":
        a, b = between(3, 20), rng.skewed((2, 3, 4))
        return Event(kind, a, b, 0, a * b)
    if kind == "more":
        a, b = between(5, 40), between(2, 20)
        return Event(kind, a, b, 0, a + b)
    if kind == "fewer":
        a, b = between(10, 50), between(2, 20)
        return Event(kind, a, b, 0, a - b) if a - b >= 4 else None
    if kind == "half":
        a = 2 * between(3, 30)
        return Event(kind, a, 2, 0, a // 2)
    if kind == "two":
        a, b = between(4, 30), between(4, 30)
        return Event(kind, a, b, 0, a + b, deed)
    a, b = between(2, 15), between(1, 6)
    return Event(kind, a, b, 0, 3 * a + 3 * b, deed)


def _change(rng: Rng, kind: str, now: int, scenario: Scenario) -> Event | None:
    between = rng.between
    if kind == "gain":
        a = between(2, 20)
        return Event(kind, a, 0, now, now + a, rng.skewed(scenario.gain))
    if kind == "gainboxes":
        a, b = between(2, 6), between(2, 10)
        return Event(kind, a, b, now, now + a * b, rng.skewed(scenario.gain))
    if kind == "double":
        return Event(kind, 2, 0, now, 2 * now) if now <= 50 else None
    if kind == "lose":
        a = between(2, 20)
        return Event(kind, a, 0, now, now - a, rng.skewed(scenario.lose))
    if kind == "loseeach":
        a, b = between(2, 6), between(2, 6)
        return Event(kind, a, b, now, now - a * b)
    deed = rng.skewed(scenario.lose)
    if kind == "losehalf":
        return Event(kind, 2, 0, now, now // 2, deed) if now % 2 == 0 else None
    if kind == "losepart":
        a = rng.skewed((3, 4, 5))
        return Event(kind, a, now // a, now, now - now // a, deed) if now % a == 0 else None
    a = rng.pick((10, 20, 25, 50))
    part = now * a // 100
    return Event(kind, a, part, now, now - part, deed) if now * a % 100 == 0 else None


def _final(rng: Rng, kind: str, now: int, start: Event) -> Event | None:
    if kind == "left":
        return Event(kind, 0, 0, now, now)
    if kind in ("share", "pack"):
        a = rng.between(2, 10)
        return Event(kind, a, 0, now, now // a) if now % a == 0 and now // a >= 2 else None
    if kind == "goal":
        a = now + rng.between(2, 30)
        return Event(kind, a, 0, now, a - now)
    if kind == "compare":
        a = now + rng.between(-20, 20)
        return Event(kind, a, 0, now, abs(a - now)) if a >= 3 and abs(a - now) >= 2 else None
    if kind == "together":
        return Event(kind, start.a, 0, now, now + start.a)
    a = rng.between(2, 9)
    if now > 99 or now * a > 120:
        return None
    if kind == "sell":
        return Event(kind, a, 0, now, now * a)
    b = rng.between(3, 20)
    return Event(kind, a, b, now, now * a - b) if now * a - b >= 2 else None


def _shop_events(rng: Rng, chain: Structure) -> list[Event] | None:
    between = rng.between
    kind = chain[0]
    a, b = between(2, 9), between(2, 12)
    events = [Event("buy", a, b, 0, a * b)]
    now = a * b
    if kind == "buyplus":
        a = between(2, 25)
        events.append(Event("plus", a, 0, now, now + a))
    elif kind == "buytwo":
        a, b = between(2, 6), between(2, 10)
        events.append(Event("second", a, b, now, now + a * b))
    now = events[-1].after
    for kind in chain[1:-1]:
        if kind == "discount":
            a = rng.pick((10, 20, 25, 50))
            if now * a % 100:
                return None
            part = now * a // 100
            events.append(Event(kind, a, part, now, now - part))
        else:
            a = between(2, 15)
            events.append(Event(kind, a, 0, now, now + a if kind == "fee" else now - a))
        now = events[-1].after
    if now < 3:
        return None
    kind = chain[-1]
    if kind == "change":
        options = [note for note in (20, 40, 50, 60, 80, 100, 120, 150, 200) if note > now]
        if not options:
            return None
        a = rng.skewed(options[:3])
        events.append(Event(kind, a, 0, now, a - now))
    elif kind == "splitbill":
        a = between(2, 6)
        if now % a or now // a < 2:
            return None
        events.append(Event(kind, a, 0, now, now // a))
    else:
        events.append(Event(kind, 0, 0, now, now))
    return events
