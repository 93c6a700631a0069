"""Word the question of a planned word problem."""

from lopa.tasks.rng import Rng
from lopa.tasks.words.story import TWO_PEOPLE, Event, Story

_PAIRS = (
    ("on Monday", "on Tuesday"),
    ("in the morning", "in the afternoon"),
    ("on Saturday", "on Sunday"),
    ("before lunch", "after lunch"),
)
_TIMES = {2: "twice", 3: "three times", 4: "four times"}
_PARTS = {3: "a third", 4: "a quarter", 5: "a fifth"}
_NEXT = ("Then", "After that,", "Later,", "Next,")


class Question:
    """Words one question. The main person is named first, later named or referred to."""

    def __init__(self, story: Story, rng: Rng) -> None:
        self.story = story
        self.rng = rng
        self.past = rng.chance(0.45)
        self.cash = story.scenario.kind == "cash"
        self.named = False
        many = story.item.many
        self.many = "money" if self.cash else many
        self.as_many = "as much money" if self.cash else f"as many {many}"
        self.have = story.scenario.own.form(self.past)

    def text(self) -> str:
        """The whole question on one line, with a line break at its end."""
        if self.story.place:
            sentences = [self._shop(event) for event in self.story.events]
        else:
            sentences = [self._told(event, i) for i, event in enumerate(self.story.events)]
        return " ".join(sentences) + "\n"

    def _who(self) -> str:
        """The main person as the subject inside a sentence."""
        if not self.named or self.rng.chance(0.35):
            self.named = True
            return self.story.person.name
        return self.story.person.they

    def _whom(self) -> str:
        """The main person again, in a sentence that has already mentioned the person."""
        return self.story.person.they if self.rng.chance(0.7) else self.story.person.name

    def _amount(self, number: int) -> str:
        if self.cash:
            return f"${number}"
        return f"{number} {self.story.item.count(number)}"

    def _start_sentence(self, text: str) -> str:
        return text[0].upper() + text[1:]

    def _then(self, text: str) -> str:
        if self.rng.chance(0.55):
            return f"{self.rng.skewed(_NEXT)} {text}"
        return self._start_sentence(text)

    def _told(self, event: Event, index: int) -> str:
        story, rng = self.story, self.rng
        kind = event.kind
        if index == 0:
            return self._start(event)
        if index == len(story.events) - 1:
            return self._final(event)
        who = self._who()
        a, b = event.a, event.b
        tail = ""
        verb = ""
        if event.deed is not None:
            verb = event.deed.verb.form(self.past)
            tail = " " + event.deed.tail.replace("~", story.person.their)
        of_them = rng.skewed(
            ("of them", f"of the {self.many}", f"of {story.person.their} {self.many}")
        )
        if self.cash:
            of_them = rng.skewed(("of it", "of the money", f"of {story.person.their} money"))
        if story.events[0].kind in TWO_PEOPLE:
            of_them = f"of {story.person.their} {self.many}"
        if kind == "gain":
            more = f"${a} more" if self.cash else f"{a} more {story.item.count(a)}"
            if rng.chance(0.3):
                more = f"another ${a}" if self.cash else f"another {self._amount(a)}"
            return self._then(f"{who} {verb} {more}{tail}.")
        if kind == "gainboxes":
            each = rng.skewed(
                (
                    f"with {self._amount(b)} in each",
                    f"of {self._amount(b)} each",
                    f"that each hold {self._amount(b)}",
                )
            )
            return self._then(f"{who} {verb} {a} more {story.box.many} {each}{tail}.")
        if kind == "double":
            relative = rng.pick(("uncle", "aunt", "grandfather", "mother"))
            double = "doubled" if self.past else "doubles"
            noun = "money" if self.cash else f"number of {self.many}"
            return self._then(
                f"{story.person.name}'s {relative} {double} {story.person.their} {noun}."
            )
        if kind == "lose":
            some = f"${a}" if self.cash else f"{a} {rng.skewed((story.item.many, 'of them'))}"
            return self._then(f"{who} {verb} {some}{tail}.")
        if kind == "loseeach":
            give = "gave" if self.past else "gives"
            friends = rng.skewed(("friends", "cousins", "neighbors", "classmates"))
            if rng.chance(0.5):
                return self._then(f"{who} {give} {self._amount(b)} to each of {a} {friends}.")
            return self._then(f"{who} {give} {a} {friends} {self._amount(b)} each.")
        if kind == "losehalf":
            return self._then(f"{who} {verb} half {of_them}{tail}.")
        if kind == "losepart":
            return self._then(f"{who} {verb} {_PARTS[a]} {of_them}{tail}.")
        if rng.chance(0.5):
            are = "were" if self.past else "are"
            bad = rng.skewed(story.scenario.bad)
            out = rng.skewed(("thrown away", "thrown out"))
            if story.events[0].kind in TWO_PEOPLE:
                of_them = f"of {story.person.name}'s {self.many}"
            return self._start_sentence(f"{a}% {of_them} {are} {bad} and {are} {out}.")
        return self._then(f"{who} {verb} {a}% {of_them}{tail}.")

    def _start(self, event: Event) -> str:
        story, rng = self.story, self.rng
        kind, a, b = event.kind, event.a, event.b
        other, box, period = story.other.name, story.box, story.period
        who = self._who()
        make = event.deed.verb.form(self.past) if event.deed else ""
        if kind == "have":
            have = rng.skewed((self.have, "started with" if self.past else "starts with"))
            return f"{who} {have} {self._amount(a)}."
        if kind == "groups":
            if rng.chance(0.5):
                each = rng.skewed(
                    (
                        f"with {self._amount(b)} in each",
                        f"of {self._amount(b)} each",
                        f"that each hold {self._amount(b)}",
                    )
                )
                return f"{who} {self.have} {a} {box.many} {each}."
            holds = "held" if self.past else "holds"
            return rng.skewed(
                (
                    f"{who} {self.have} {a} {box.many}. Each {box.one} {holds} {self._amount(b)}.",
                    f"{who} {self.have} {a} {box.many}, and each one {holds} {self._amount(b)}.",
                )
            )
        if kind == "rate":
            return rng.skewed(
                (
                    f"{who} {make} {self._amount(a)} every {period} for {b} {period}s.",
                    f"For {b} {period}s, {who} {make} {self._amount(a)} each {period}.",
                    f"{who} {make} {self._amount(a)} per {period} and {self._keep()} this up"
                    f" for {b} {period}s.",
                )
            )
        if kind == "two":
            first, second = rng.pick(_PAIRS)
            bare = f"${b}" if self.cash else str(b)
            return rng.skewed(
                (
                    f"{who} {make} {self._amount(a)} {first} and {bare} {second}.",
                    f"{self._start_sentence(first)}, {who} {make} {self._amount(a)}, and {second}"
                    f" {self._whom()} {make} {self._amount(b)}.",
                )
            )
        if kind == "grow":
            more = f"${b} more" if self.cash else f"{b} more"
            return rng.skewed(
                (
                    f"{who} {make} {self._amount(a)} in the first {period}. Each {period} after"
                    f" that, {self._whom()} {make} {more} than the {period} before,"
                    f" for 3 {period}s in total.",
                    f"In the first {period}, {who} {make} {self._amount(a)}. In the second and"
                    f" third {period}, {self._whom()} {make} {more} than in the {period} before.",
                )
            )
        opening = f"{other} {self.have} {self._amount(a)}."
        if kind == "times":
            relation = f"{_TIMES[b]} {self.as_many}"
        elif kind == "half":
            relation = f"half {self.as_many}"
        else:
            word = "more" if kind == "more" else ("less" if self.cash else "fewer")
            relation = f"${b} {word}" if self.cash else f"{b} {word} {story.item.many}"
        link = "than" if kind in ("more", "fewer") else "as"
        return rng.skewed(
            (
                f"{opening} {who} {self.have} {relation} {link} {other}.",
                f"{who} {self.have} {relation} {link} {other}. {opening}",
                f"{who} {self.have} {relation} {link} {other}, who {self.have} {self._amount(a)}.",
            )
        )

    def _keep(self) -> str:
        return "kept" if self.past else "keeps"

    def _lost(self) -> bool:
        return self.story.events[-2].after < self.story.events[-2].before

    def _how_many(self) -> str:
        return "How much money" if self.cash else f"How many {self.story.item.many}"

    def _final(self, event: Event) -> str:
        story, rng = self.story, self.rng
        kind, a = event.kind, event.a
        tally = story.scenario.kind == "tally"
        who = self._who()
        does = "did" if self.past else "does"
        own = story.scenario.own.base
        if kind == "left":
            end = rng.skewed(("in all", "in total", "altogether"))
            if not tally:
                end = rng.skewed(
                    ("in the end", "left" if self._lost() else "in total", "at the end")
                )
            return f"{self._how_many()} {does} {who} {own} {end}?"
        all_of = rng.skewed(
            (f"the {self.many}", f"all {story.person.their} {self.many}", f"all the {self.many}")
        )
        if story.events[0].kind in TWO_PEOPLE:
            all_of = f"all {story.person.their} {self.many}"
        if kind == "share":
            group = rng.skewed(("friends", "children", "cousins"))
            one = {"friends": "friend", "children": "child", "cousins": "cousin"}[group]
            split = rng.skewed(("shares", "splits", "divides"))
            if self.past:
                split = split.rstrip("s") + "d" if split != "splits" else "split"
            return self._then(
                f"{who} {split} {all_of} equally among {a} {group}. {self._how_many()} {does}"
                f" each {one} get?"
            )
        if kind == "pack" and self.cash:
            spend = "spent" if self.past else "spends"
            return self._then(
                f"{who} {spend} {all_of} on {story.box.many} that cost ${a} each."
                f" How many {story.box.many} {does} {self._whom()} buy?"
            )
        if kind == "pack":
            put = rng.skewed(
                ("packed", "put", "sorted") if self.past else ("packs", "puts", "sorts")
            )
            need = rng.skewed(("fill", "need", "use"))
            return self._then(
                f"{who} {put} {all_of} into {story.box.many} of {a}."
                f" How many {story.box.many} {does} {self._whom()} {need}?"
            )
        if kind == "goal":
            if tally:
                goal = self._start_sentence(rng.skewed(story.scenario.goal))
                return (
                    f"{goal} {self._amount(a)}. How many more {story.item.many} {does} {who}"
                    f" have to {own}?"
                )
            if self.cash:
                thing = rng.skewed(story.scenario.goal)
                costs = "cost" if self.past else "costs"
                return (
                    f"{self._start_sentence(thing)} {costs} ${a}. How much more money {does}"
                    f" {who} need to buy it?"
                )
            want = "wanted" if self.past else "wants"
            return (
                f"{self._start_sentence(who)} {want} to have {self._amount(a)} in total."
                f" How many more {story.item.many} {does} {self._whom()} need?"
            )
        name, other = story.person.name, story.other.name
        if kind == "compare":
            how = "How much more money" if self.cash else f"How many more {story.item.many}"
            rich, poor = (name, other) if event.before > a else (other, name)
            return f"{other} {self.have} {self._amount(a)}. {how} {does} {rich} {own} than {poor}?"
        if kind == "together":
            do = "did" if self.past else "do"
            pair = rng.skewed(("they", f"{name} and {other}", f"{other} and {name}"))
            end = rng.skewed(("together", "in total", "altogether"))
            return f"{self._how_many()} {do} {pair} {own} {end}?"
        sell = "sold" if self.past else "sells"
        price = rng.skewed((f"for ${a} each", f"at ${a} each", f"at a price of ${a} each"))
        first = f"{who} {sell} {all_of} {price}"
        make = rng.skewed(("make", "get", "earn"))
        if kind == "sell":
            return self._then(f"{first}. How much money {does} {self._whom()} {make}?")
        thing = rng.pick(("a book", "a game", "a shirt", "a ball", "lunch"))
        spend = "spent" if self.past else "spends"
        is_left = rng.skewed(
            (
                f"How much money {does} {self._whom()} have left?",
                f"How much of this money {'was' if self.past else 'is'} left?",
            )
        )
        return self._then(f"{first} and {spend} ${event.b} of this money on {thing}. {is_left}")

    def _shop(self, event: Event) -> str:
        story, rng = self.story, self.rng
        kind, a, b = event.kind, event.a, event.b
        who = self._who()
        buy = "bought" if self.past else "buys"
        cost = "cost" if self.past else "costs"
        does = "did" if self.past else "does"
        item, box = story.item, story.box
        also = rng.skewed(("also", "then"))
        if kind == "buy":
            price = rng.skewed(
                (
                    f"{a} {item.many} for ${b} each",
                    f"{a} {item.many} that cost ${b} each",
                    f"{a} {item.many} at ${b} each",
                )
            )
            if rng.chance(0.4):
                return f"At the {story.place}, {who} {buy} {price}."
            return f"{who} {buy} {price} at the {story.place}."
        if kind == "plus":
            return self._start_sentence(f"{who} {also} {buy} one {box.one} for ${a}.")
        if kind == "second":
            return self._start_sentence(f"{who} {also} {buy} {a} {box.many} for ${b} each.")
        if kind == "coupon":
            use = "used" if self.past else "uses"
            got = "got" if self.past else "gets"
            return rng.skewed(
                (
                    self._start_sentence(f"{who} {use} a coupon for ${a} off the total."),
                    self._start_sentence(f"{who} {got} ${a} off the total price."),
                )
            )
        if kind == "fee":
            fee = rng.skewed(("Gift wrapping", "Delivery", "A carrying bag"))
            return f"{fee} {cost} ${a} extra."
        if kind == "discount":
            got = "got" if self.past else "gets"
            gave = "gave" if self.past else "gives"
            return rng.skewed(
                (
                    self._start_sentence(f"{who} {got} a discount of {a}% on the total."),
                    f"The shop {gave} {a}% off the total.",
                )
            )
        if kind == "change":
            pay = "paid" if self.past else "pays"
            give = rng.skewed(
                (
                    f"How much change {does} {self._whom()} get?",
                    f"How much money {does} {self._whom()} get back?",
                )
            )
            return self._start_sentence(f"{who} {pay} with ${a}. {give}")
        if kind == "splitbill":
            split = rng.skewed(("split", "shared"))
            if rng.chance(0.5):
                do = "did" if self.past else "do"
                told = "share" if split == "shared" and not self.past else split
                return f"{a} friends {told} the cost equally. How much {do} they each pay?"
            is_ = "was" if self.past else "is"
            return (
                f"The cost {is_} {split} equally by {a} people. How much {does} each of them pay?"
            )
        return rng.skewed(
            (
                f"How much {does} {who} pay in total?",
                f"How much money {does} {who} spend altogether?",
                f"What {'was' if self.past else 'is'} the total cost?",
            )
        )
