"""Word a step-by-step solution of a planned word problem.

The choices hold for the whole answer: tense, names or pronouns, how equations look, how lines
begin, how a step is put, how chatty the answer is, and the habits that pick a phrase from each
list. A step rarely departs from them. The arithmetic of every step is written out as an equation,
and the last line is `#### ` with the result.
"""

from lopa.tasks.grammar import EXCEPTIONS, Phrase, expand, phrases, pick_habits
from lopa.tasks.rng import Rng
from lopa.tasks.words.phrases import WORDINGS, Wordings
from lopa.tasks.words.scenarios import Deed, verb
from lopa.tasks.words.steps import REPEATABLE, Step, solve
from lopa.tasks.words.story import Story

_FINITE = (
    "hold contain make bring leave keep start do mean give gain lose get fill need take earn sell "
    "spend pay cost buy save remain come drop rise"
)


def _tensed(past: bool) -> dict[str, str]:
    fields: dict[str, str] = {}
    for base in _FINITE.split():
        forms = verb(base)
        fields[forms.present] = forms.form(past)
        fields[base] = forms.past if past else base
    for past_form, present, name in (
        ("was", "is", "is"),
        ("were", "are", "are"),
        ("could", "can", "can"),
    ):
        fields[name] = past_form if past else present
    fields["makethey"] = "made" if past else "make"
    return fields


_TENSED = {past: _tensed(past) for past in (False, True)}

_WORDS = {"*": "times", "+": "plus", "-": "minus", "/": "divided by"}
# How equations are written: what stands for the operations, and whether spaces stand around them.
_NOTATIONS = (
    ({"*": "*", "+": "+", "-": "-", "/": "/"}, " "),
    ({"*": "x", "+": "+", "-": "-", "/": "/"}, " "),
    ({"*": "*", "+": "+", "-": "-", "/": "/"}, ""),
    (_WORDS, " "),
)
_DO = {
    "*": phrases("[multiply|we multiply] {x} by {y}", "[take|we take] {y} times {x}"),
    "+": phrases(
        "[add|we add] {y} to {x}", "[add|we add] {x} and {y}", "[put|we put] {y} on top of {x}"
    ),
    "-": phrases(
        "[subtract|we subtract] {y} from {x}",
        "[take|we take] {y} away from {x}",
        "[take|we take] {x} minus {y}",
    ),
    "/": phrases("[divide|we divide] {x} by {y}", "[split|we split] {x} into {y} [equal|] parts"),
    "%": phrases("[take|we take|find|we find] {y}% of {x}"),
    "sum": phrases(
        "[add|we add] [all three|the three numbers]", "[sum|we sum] up {x}, {y} and {third}"
    ),
}
_ORDINALS = {3: "third", 4: "quarter", 5: "fifth"}
_DIVISOR = {10: 10, 20: 5, 25: 4, 50: 2}

_OPENERS = phrases(
    "[Let's|We can|I will] [solve this|work this out|find the answer] "
    "[step by step|one step at a time].",
    "[We need|We have|We want] to [find|find out|work out] {goal}.",
    "[Here is|This is] [how to solve it|the solution|how it goes]:",
    "[Solution|Steps|Working]:",
)
_FIRST = ("First,", "First of all,", "Firstly,", "At the start,")
_LATER = ("Then,", "Next,", "After that,", "Now,")
_LAST = ("Finally,", "In the end,", "Lastly,", "At the end,")
_FIND = ("find", "get", "work out")
_CLOSERS = phrases(
    "[So|Therefore,|This means] {claim}.",
    "[The|So the|Our] [final answer|answer|result] [is|comes to|must be] {amount}.",
    "[In the end,|All in all,|That is,] {claim}.",
    "[Answer|Result|Final answer]: {amount}.",
)
_MARKS = ("none", "words", "number", "step", "dash")
_FORMS = ("reason", "clause", "find", "equation", "is", "colon", "label")
_JOINS = (", so", ", which means", ", and so", "; so")
_EQUALS = ("is", "equals", "comes to", "works out to")


class Answer:
    """Words one answer."""

    def __init__(self, story: Story, rng: Rng) -> None:
        self.story = story
        self.rng = rng
        self.habits = pick_habits(rng)
        self.past = rng.chance(0.25)
        self.always_names = rng.chance(0.1)
        self.symbols, self.space = rng.leaning(_NOTATIONS)
        self.shows_units = rng.chance(0.85)
        self.dollars = rng.leaning(("sign", "word", "none"))
        self.percent_as_division = rng.chance(0.2)
        self.mark = rng.skewed(_MARKS)
        self.form = rng.skewed(_FORMS)
        self.swaps = rng.chance(0.05)
        self.named = False
        self.cash = story.scenario.kind == "cash" or bool(story.place)
        self.fields = self._fixed_fields()

    def text(self) -> str:
        """The whole answer."""
        rng = self.rng
        steps = solve(self.story, rng)
        lines = []
        if rng.chance(0.45):
            fields = {"goal": self._goal()}
            lines.append(expand(rng, self.habits, _OPENERS, fields))
        for index, step in enumerate(steps):
            lines.append(self._line(step, index, len(steps)))
        if rng.chance(0.65):
            last = steps[-1]
            fields = {"claim": self._claim(last), "amount": self._amount(last.result, last.unit)}
            lines.append(expand(rng, self.habits, _CLOSERS, fields))
        lines.append(f"#### {self.story.result}")
        return "\n".join(lines)

    def _fixed_fields(self) -> dict[str, str]:
        story, past = self.story, self.past
        own = story.scenario.own
        rich = story.events[-1].before > story.events[-1].a
        name, other = story.person.name, story.other.name
        periods = story.period + "s"
        money = self.cash and not story.place
        many = "money" if money else story.item.many
        return _TENSED[past] | {
            "A": name,
            "B": other,
            "R": name if rich else other,
            "P": other if rich else name,
            "him": story.person.them,
            "has": own.form(past),
            "havethey": own.past if past else own.base,
            "item": story.item.one,
            "many": many,
            "many_are": _TENSED[past]["is" if money else "are"],
            "how": "how much" if money else "how many",
            "how_many": f"how {'much' if money else 'many'} {many}",
            "number_of": f"the {'amount' if money else 'number'} of {many}",
            "as_many": "much" if money else "many",
            "of_them": "of it" if money else "of them",
            "box": story.box.one,
            "boxes": story.box.many,
            "in": "on" if story.period == "day" else "in",
            "period": story.period,
            "periods": periods,
            "fewer": "less" if self.cash else "fewer",
        }

    def _say(self, options: tuple[Phrase, ...]) -> str:
        """A phrase about the step at hand; the person is named at first, or always."""
        person = self.story.person
        uses_name = self.always_names or not self.named
        self.fields["S"] = person.name if uses_name else person.they
        text = expand(self.rng, self.habits, options, self.fields)
        self.named = self.named or person.name in text
        return text

    def _amount(self, number: int, unit: str) -> str:
        """A bare number with its unit, as the style has it."""
        if unit == "$":
            if self.dollars == "sign":
                return f"${number}"
            return f"{number} dollars" if self.dollars == "word" else str(number)
        if not self.shows_units or not unit:
            return str(number)
        noun = self.story.item if unit == "item" else self.story.box
        return f"{number} {noun.count(number)}"

    def _equation(self, step: Step) -> str:
        x, y, op = step.x, step.y, step.op
        if op == "%":
            if not self.percent_as_division:
                return f"{y}% of {x} = {step.result}"
            y, op = _DIVISOR[y], "/"
        if op in "*+" and self.swaps:
            x, y = y, x
        if op == "sum":
            sign = self.symbols["+"]
            parts = [str(x), sign, str(y), sign, str(step.third)]
        else:
            parts = [str(x), self.symbols[op], str(y)]
        return self.space.join([*parts, "=", str(step.result)])

    def _full(self, step: Step) -> str:
        """The equation with the unit of its result."""
        equation = self._equation(step)
        if step.unit == "$":
            if self.dollars == "none":
                return equation
            left, _, right = equation.rpartition("=")
            shown = f"${step.result}" if self.dollars == "sign" else f"{step.result} dollars"
            return f"{left}={' ' if right[0] == ' ' else ''}{shown}"
        if not self.shows_units or not step.unit:
            return equation
        noun = self.story.item if step.unit == "item" else self.story.box
        return f"{equation} {noun.count(step.result)}"

    def _wordings(self, step: Step) -> Wordings:
        """The phrases for a step, whose fields are set for it."""
        story, item = self.story, self.story.item
        fields = self.fields
        x, y = step.x, step.y
        fields["x"], fields["y"] = str(x), str(y)
        fields["third"] = str(step.third)
        fields["items_x"], fields["items_y"] = item.count(x), item.count(y)
        if self.cash:
            fields["x_short"], fields["y_short"] = f"${x}", f"${y}"
            fields["x_amount"], fields["y_amount"] = f"${x}", f"${y}"
            fields["y_more"], fields["y_fewer"] = f"${y} more", f"${y} less"
        else:
            fields["x_short"], fields["y_short"] = str(x), str(y)
            fields["x_amount"], fields["y_amount"] = (
                f"{x} {item.count(x)}",
                f"{y} {item.count(y)}",
            )
            fields["y_more"] = f"{y} more {item.count(y)}"
            fields["y_fewer"] = f"{y} fewer {item.count(y)}"
        # An amount of money is one thing, like a single item.
        for name, number in (("x", x), ("y", y), ("result", step.result)):
            fields[f"{name}_are"] = fields["is" if self.cash or number == 1 else "are"]
        fields["result_remain"] = fields["remains" if self.cash or step.result == 1 else "remain"]
        fields["ordinal"] = _ORDINALS.get(y, "part")
        deed = self._deed(step, story)
        if deed is not None:
            fields["verb"] = deed.verb.form(self.past)
            fields["make"] = fields["verb"]
            fields["tail"] = deed.tail.replace("~", story.person.their)
        return WORDINGS.get(f"{step.kind}/{story.scenario.kind}") or WORDINGS[step.kind]

    def _deed(self, step: Step, story: Story) -> Deed | None:
        event = _EVENT_OF.get(step.kind)
        for told in story.events:
            if told.kind == event and (event not in REPEATABLE or told.a == step.y):
                return told.deed
        return None

    def _line(self, step: Step, index: int, total: int) -> str:
        rng, say = self.rng, self._say
        wordings = self._wordings(step)
        form = rng.skewed(_FORMS) if rng.chance(EXCEPTIONS) else self.form
        habit = self.habits.phrase
        full = self._full(step)
        if form == "clause":
            body = say(wordings.clauses).replace("#", full)
        elif form == "reason":
            reason = say(wordings.reasons)
            clause = say(wordings.clauses).replace("#", full)
            body = f"{reason}{habit.of(_JOINS)} {clause}"
        elif form == "is":
            body = f"{say(wordings.labels)} {habit.of(_EQUALS)} {full}"
        elif form == "equation":
            clause = say(wordings.clauses).replace("#", self._amount(step.result, step.unit))
            body = f"{self._equation(step)}{habit.of(_JOINS)} {clause}"
        elif form == "find":
            body = f"to {habit.of(_FIND)} {say(wordings.labels)}, {say(_DO[step.op])}: {full}"
        elif form == "colon":
            body = f"{say(wordings.reasons)}: {full}"
        else:
            body = f"{say(wordings.labels)}: {full}"
        return self._marked(body, index, total) + "."

    def _marked(self, body: str, index: int, total: int) -> str:
        mark = self.mark
        if mark == "words":
            words = _FIRST if index == 0 else (_LAST if index == total - 1 else _LATER)
            return f"{self.habits.phrase.of(words)} {body}"
        body = body[0].upper() + body[1:]
        if mark == "number":
            return f"{index + 1}. {body}"
        if mark == "step":
            return f"Step {index + 1}: {body}"
        return f"- {body}" if mark == "dash" else body

    def _claim(self, last: Step) -> str:
        # The first clause never points back with "that", so it can stand alone.
        clause = self._say(self._wordings(last).clauses[:1])
        return clause.replace("#", self._amount(last.result, last.unit))

    def _goal(self) -> str:
        choose = self.habits.bracket.of
        final = self.story.events[-1].kind
        if final in ("share", "splitbill"):
            return choose(("each share", "the share of each person"))
        if final in ("sell", "sellspend", "total", "change") or (self.cash and final != "pack"):
            return choose(("the amount of money", "how much money it comes to"))
        if final == "compare":
            return choose(("the difference", "how big the difference is"))
        noun = self.story.box.many if final == "pack" else self.story.item.many
        return choose((f"the number of {noun}", f"how many {noun} there are"))


_EVENT_OF = {
    "rate": "rate",
    "two": "two",
    "grow1": "grow",
    "grow2": "grow",
    "grow3": "grow",
    "gain": "gain",
    "lose": "lose",
    "losehalf": "losehalf",
    "part": "losepart",
}
