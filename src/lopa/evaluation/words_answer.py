"""Word a step-by-step solution of a planned word problem.

Some choices hold for the whole answer (tense, names or pronouns, how equations look, how lines
begin, how chatty it is); the others are made for each step. The arithmetic of every step is
written out as an equation, and the last line is `#### ` with the result.
"""

from lopa.evaluation.draw import Draw
from lopa.evaluation.phrases import expand, phrases
from lopa.evaluation.words_phrases import WORDINGS
from lopa.evaluation.words_plan import Plan
from lopa.evaluation.words_scenarios import Deed, verb
from lopa.evaluation.words_steps import REPEATABLE, Step, solve

_FINITE = (
    "hold contain make bring leave keep start do mean give gain lose get fill need take earn sell "
    "spend pay cost buy save remain"
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

_SYMBOLS = {
    "*": {"*": "*", "+": "+", "-": "-", "/": "/"},
    "x": {"*": "x", "+": "+", "-": "-", "/": "/"},
    "words": {"*": "times", "+": "plus", "-": "minus", "/": "divided by"},
}
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
_FIRST = ("First,", "To start,", "At first,", "To begin,")
_LATER = ("Then,", "Next,", "After that,", "Now,")
_LAST = ("Finally,", "In the end,", "Last,", "So,")
_CLOSERS = phrases(
    "[So|Therefore,|This means] {claim}.",
    "[The|So the|Our] [final answer|answer|result] [is|comes to|must be] {amount}.",
    "[In the end,|All in all,|That is,] {claim}.",
    "[Answer|Result|Final answer]: {amount}.",
)
_MARKS = ("none", "words", "number", "step", "dash")
_FORMS = {
    "told": ("reason", "clause", "equation", "reason"),
    "labelled": ("label", "is", "label", "equation"),
    "taught": ("find", "colon", "find", "is"),
    "mixed": ("clause", "reason", "is", "equation", "find", "colon", "label"),
}
_JOINS = (", so", ", which means", ", and so", ". That means", "; so")
_EQUALS = ("is", "equals", "comes to", "must be", "works out to")


class Answer:
    """Words one answer."""

    def __init__(self, plan: Plan, draw: Draw) -> None:
        self.plan = plan
        self.draw = draw
        self.past = draw.chance(0.4)
        self.voice = draw.skewed(("name then pronoun", "name", "pronoun", "mixed"))
        self.symbols = _SYMBOLS[draw.skewed(("*", "x", "*", "words"))]
        self.is_tight = self.symbols["*"] != "times" and draw.chance(0.3)
        self.shows_units = draw.chance(0.7)
        self.dollars = draw.skewed(("sign", "word", "none"))
        self.percent_as_division = draw.chance(0.35)
        self.mark = draw.skewed(_MARKS)
        self.forms = _FORMS[draw.skewed(("told", "labelled", "taught", "mixed"))]
        self.form = draw.pick(self.forms)  # most steps of an answer are put the same way
        self.swaps = draw.chance(0.25)
        self.doubles_by_adding = draw.chance(0.25)
        self.join = draw.skewed(_JOINS)
        self.equals = draw.skewed(_EQUALS)
        self.named = False
        self.cash = plan.scenario.kind == "cash" or bool(plan.place)
        self.fields = self._fixed_fields()

    def text(self) -> str:
        """The whole answer."""
        draw = self.draw
        steps = solve(self.plan, draw)
        lines = []
        if draw.chance(0.5):
            fields = {"goal": self._goal()}
            lines.append(expand(draw, _OPENERS, fields))
        for index, step in enumerate(steps):
            lines.append(self._line(step, index, len(steps)))
        if draw.chance(0.7):
            last = steps[-1]
            fields = {"claim": self._claim(last), "amount": self._amount(last.result, last.unit)}
            lines.append(expand(draw, _CLOSERS, fields))
        lines.append(f"#### {self.plan.result}")
        return "\n".join(lines)

    def _fixed_fields(self) -> dict[str, str]:
        plan, past = self.plan, self.past
        own = plan.scenario.own
        rich = plan.events[-1].before > plan.events[-1].a
        name, other = plan.person.name, plan.other.name
        periods = plan.period + "s"
        return _TENSED[past] | {
            "A": name,
            "B": other,
            "R": name if rich else other,
            "P": other if rich else name,
            "him": plan.person.them,
            "has": own.form(past),
            "havethey": own.past if past else own.base,
            "item": plan.item.one,
            "many": "money" if self.cash and not plan.place else plan.item.many,
            "box": plan.box.one,
            "boxes": plan.box.many,
            "period": plan.period,
            "periods": periods,
            "fewer": "less" if self.cash else "fewer",
        }

    def _who(self) -> str:
        voice = self.voice
        if voice == "mixed":
            return self.plan.person.name if self.draw.chance(0.5) else self.plan.person.they
        if voice == "name" or (voice == "name then pronoun" and not self.named):
            self.named = True
            return self.plan.person.name
        return self.plan.person.they

    def _amount(self, number: int, unit: str) -> str:
        """A bare number with its unit, as the style has it."""
        if unit == "$":
            if self.dollars == "sign":
                return f"${number}"
            return f"{number} dollars" if self.dollars == "word" else str(number)
        if not self.shows_units or not unit:
            return str(number)
        noun = self.plan.item if unit == "item" else self.plan.box
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
        elif op == "*" and step.y == 2 and self.doubles_by_adding:
            x = step.x
            parts = [str(x), self.symbols["+"], str(x)]
        else:
            parts = [str(x), self.symbols[op], str(y)]
        between = "" if self.is_tight else " "
        return between.join([*parts, "=", str(step.result)])

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
        noun = self.plan.item if step.unit == "item" else self.plan.box
        return f"{equation} {noun.count(step.result)}"

    def _wording_fields(self, step: Step) -> dict[str, str]:
        plan, item = self.plan, self.plan.item
        fields = self.fields
        x, y = step.x, step.y
        fields["S"] = self._who()
        fields["x"], fields["y"] = str(x), str(y)
        fields["third"] = str(step.third)
        fields["items_x"], fields["items_y"] = item.count(x), item.count(y)
        if self.cash:
            fields["x_amount"], fields["y_amount"] = f"${x}", f"${y}"
        else:
            fields["x_amount"], fields["y_amount"] = (
                f"{x} {item.count(x)}",
                f"{y} {item.count(y)}",
            )
        fields["ordinal"] = _ORDINALS.get(y, "part")
        deed = self._deed(step, plan)
        if deed is not None:
            fields["verb"] = deed.verb.form(self.past)
            fields["make"] = fields["verb"]
            fields["tail"] = deed.tail.replace("~", plan.person.their)
        return fields

    def _deed(self, step: Step, plan: Plan) -> Deed | None:
        event = _EVENT_OF.get(step.kind)
        for told in plan.events:
            if told.kind == event and (event not in REPEATABLE or told.a == step.y):
                return told.deed
        return None

    def _line(self, step: Step, index: int, total: int) -> str:
        draw = self.draw
        kind = step.kind
        wordings = WORDINGS.get(f"{kind}/{self.plan.scenario.kind}") or WORDINGS[kind]
        fields = self._wording_fields(step)
        form = draw.pick(self.forms) if draw.chance(0.2) else self.form
        if form == "clause":
            body = expand(draw, wordings.clauses, fields).replace("#", self._full(step))
        elif form == "reason":
            reason = expand(draw, wordings.reasons, fields)
            fields["S"] = self._who()
            clause = expand(draw, wordings.clauses, fields).replace("#", self._full(step))
            body = f"{reason}{self.join} {clause}"
        elif form == "is":
            body = f"{expand(draw, wordings.labels, fields)} {self.equals} {self._full(step)}"
        elif form == "equation":
            amount = self._amount(step.result, step.unit)
            clause = expand(draw, wordings.clauses, fields).replace("#", amount)
            body = f"{self._equation(step)}{self.join} {clause}"
        elif form == "find":
            label = expand(draw, wordings.labels, fields)
            find = draw.skewed(("find", "get", "work out"))
            do = expand(draw, _DO[step.op], fields)
            body = f"to {find} {label}, {do}: {self._full(step)}"
        elif form == "colon":
            body = f"{expand(draw, wordings.reasons, fields)}: {self._full(step)}"
        else:
            body = f"{expand(draw, wordings.labels, fields)}: {self._full(step)}"
        return self._marked(body, index, total) + "."

    def _marked(self, body: str, index: int, total: int) -> str:
        mark = self.mark
        if mark == "words":
            words = _FIRST if index == 0 else (_LAST if index == total - 1 else _LATER)
            return f"{self.draw.skewed(words)} {body}"
        body = body[0].upper() + body[1:]
        if mark == "number":
            return f"{index + 1}. {body}"
        if mark == "step":
            return f"Step {index + 1}: {body}"
        return f"- {body}" if mark == "dash" else body

    def _claim(self, last: Step) -> str:
        wordings = WORDINGS.get(f"{last.kind}/{self.plan.scenario.kind}") or WORDINGS[last.kind]
        fields = self._wording_fields(last)
        # The first clause never points back with "that", so it can stand alone.
        clause = expand(self.draw, wordings.clauses[:1], fields)
        return clause.replace("#", self._amount(last.result, last.unit))

    def _goal(self) -> str:
        final = self.plan.events[-1].kind
        if final in ("share", "splitbill"):
            return self.draw.skewed(("each share", "the share of each person"))
        if final in ("sell", "sellspend", "total", "change") or (self.cash and final != "pack"):
            return self.draw.skewed(("the amount of money", "how much money it is"))
        if final == "compare":
            return self.draw.skewed(("the difference", "how big the difference is"))
        noun = self.plan.box.many if final == "pack" else self.plan.item.many
        return self.draw.skewed((f"the number of {noun}", f"how many {noun} it is"))


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
