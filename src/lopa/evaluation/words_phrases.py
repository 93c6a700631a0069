"""The wordings of solution steps, by what the step works out.

Each entry has three columns. `clauses` are sentences with `#` where the equation goes; `labels`
are noun phrases for the result; `reasons` say why the step is taken. See `phrases` for the
notation and `words_answer` for the fields.
"""

from dataclasses import dataclass

from lopa.evaluation.phrases import Phrase, phrases


@dataclass(frozen=True, slots=True)
class Wordings:
    clauses: tuple[Phrase, ...]
    labels: tuple[Phrase, ...]
    reasons: tuple[Phrase, ...]


def _wordings(clauses: str, labels: str, reasons: str) -> Wordings:
    return Wordings(*(phrases(*column.split(" / ")) for column in (clauses, labels, reasons)))


_NOW = _wordings(
    "{S} [now|then] {has} # / {S} {has} # [now|at this point|after that] / "
    "[that|this] [{brings} the total to|{makes}] # / the [new|current] [total|number] {is} # / "
    "there {are} # [now|then]",
    "the [new|current] [total|number of {many}|amount] / "
    "[how many|the number of] {many} {S} {has} [now|after that] / the [total|count] so far",
    "",
)
_LEFT = _wordings(
    "{S} {has} # [left|remaining] / [that|this] {leaves} [{him} with #|#] / "
    "# {remain} [after that|] / [only|] # {are} left / there {are} # [left|still there]",
    "the [number of {many} left|rest|remaining {many}|remainder] / "
    "[what|the amount that] {is} left / [how many|the number of] {many} {S} {keeps}",
    "",
)


_OF_A = (
    "{A} {has} # [in that case|] / [then|in that case] {A} {has} # / "
    "{A}'s [number|total|share] {is} #"
)


def _like(base: Wordings, reasons: str) -> Wordings:
    return Wordings(base.clauses, base.labels, phrases(*reasons.split(" / ")))


WORDINGS: dict[str, Wordings] = {
    "groups": _wordings(
        "{S} {has} # in the {boxes} / the {boxes} [{hold}|{contain}] # [together|in total|] / "
        "there {are} # in [the {boxes}|all {x} {boxes}] / [that|this] {makes} # [to begin with|] / "
        "{S} {starts} with #",
        "the number of {many} in [the|all the|all {x}] {boxes} / "
        "the [starting|first] [number|total|amount] / the total [in|inside] the {boxes}",
        "each [of the {x} {boxes}|{box}] {holds} {y} {items_y} / "
        "there {are} {x} {boxes} [with|of] {y} {items_y} each / "
        "[every|each] one of the {boxes} has {y} {items_y} [in it|inside]",
    ),
    "rate": _wordings(
        "{S} {make} # [in|over] {y} {periods} / in {y} {periods}, {S} {make} # / "
        "[that|this] {makes} # [after|in|over] {y} {periods} / "
        "[over|in] [all {y}|these] {periods} {S} {make} # [in total|altogether]",
        "the [total|number of {many}] [over|for|after] [{y}|all {y}] {periods} / "
        "what {S} {make} in {y} {periods} / the [first|starting] [total|amount]",
        "{S} {make} {x_amount} [each|every|per] {period} / "
        "there are {y} {periods} with {x_amount} [each|in each] / "
        "{S} {does} this for {y} {periods}",
    ),
    "times": _wordings(
        _OF_A,
        "{A}'s [number|total|share|amount] / [what|the amount] {A} {has} / "
        "the number of {many} {A} {has}",
        "{A} {has} {y} times as [many|much] as {B} / "
        "{B} {has} {x_amount} and {A} {has} {y} times [that|as much|that number] / "
        "[{B}'s|the] number [must be|{is}] multiplied by {y}",
    ),
    "more": _wordings(
        _OF_A,
        "{A}'s [number|total|share|amount] / [what|the amount] {A} {has} / "
        "the number of {many} {A} {has}",
        "{A} {has} {y_amount} more than {B} / {B} {has} {x_amount} and {A} {has} {y} more / "
        "{A} [is ahead of|beats] {B} by {y}",
    ),
    "fewer": _wordings(
        _OF_A,
        "{A}'s [number|total|share|amount] / [what|the amount] {A} {has} / "
        "the number of {many} {A} {has}",
        "{A} {has} {y_amount} {fewer} than {B} / {B} {has} {x_amount} and {A} {has} {y} {fewer} / "
        "{A} [is behind|trails] {B} by {y}",
    ),
    "half": _wordings(
        _OF_A,
        "{A}'s [number|total|share|amount] / [half of|one half of] {x} / "
        "[what|the amount] {A} {has}",
        "{A} {has} half as [many|much] as {B} / half of {B}'s [number|{x}|amount] is {A}'s / "
        "{B} {has} {x_amount} and {A} {has} half of [that|it]",
    ),
    "two": _wordings(
        "{S} {make} # [in total|altogether|in all] / [together|in total], [that|this] {makes} # / "
        "the [two parts|two times] [together|] {give} # / {S} {has} # [to begin with|at first]",
        "the [sum|total] of [both|the two] [numbers|times|parts] / the [first|starting] total / "
        "what {S} {make} [in all|in total]",
        "{S} {make} {x} and [then|later] {y} / [both|the two] [times|numbers] [count|are added] / "
        "the two [numbers|amounts] {are} {x} and {y}",
    ),
    "grow1": _wordings(
        "{S} {make} # in the second {period} / in the second {period}, {S} {make} # / "
        "the second {period} {brings} #",
        "the [number|amount] for the second {period} / the second {period}",
        "the second {period} [has|brings] {y_amount} more [than the first|] / "
        "{S} {make} {y} more [in the second {period}|one {period} later]",
    ),
    "grow2": _wordings(
        "{S} {make} # in the third {period} / in the third {period}, {S} {make} # / "
        "the third {period} {brings} #",
        "the [number|amount] for the third {period} / the [third|last] {period}",
        "the third {period} [has|brings] {y_amount} more [again|than the second] / "
        "[again|once more] {S} {make} {y} more",
    ),
    "grow3": _wordings(
        "{S} {make} # in [total|all] / [all|the] three {periods} [together|] {give} # / "
        "[that|this] {makes} # [in total|altogether]",
        "the [sum|total] of [all|the] three {periods} / the [total|whole amount] so far",
        "there are three {periods} to [add|add up] / [all|the] three {periods} [count|are added]",
    ),
    "gain": _like(
        _NOW,
        "{S} {verb} {y_amount} more [{tail}|] / {y_amount} [more|] [come|are added] "
        "[to the {x}|on top] / {S} [also|then] {verb} {y_amount} {tail}",
    ),
    "gain/tally": _wordings(
        "{S} {has} # [so far|in all|up to then] / "
        "[that|this] [{brings} the total to|{makes}] # / the [new|whole] [total|number] {is} #",
        "the [new|whole] [total|number of {many}|amount] / the [total|count] so far",
        "{S} {verb} {y_amount} more [{tail}|] / {y_amount} [more|] [come|are added] "
        "[to the {x}|on top] / {S} [also|then] {verb} {y_amount} {tail}",
    ),
    "gain2": _like(
        _NOW,
        "{y_amount} [come|are added] [to the {x}|on top] / {S} {has} {x} [at first|to begin with]",
    ),
    "mergegain": _wordings(
        "{S} {gains} # [in total|more|altogether] / the [gains|additions] [come|add up] to # / "
        "[together|in total], the [additions|two gains] {are} #",
        "the number of [new|added] {many} / [everything|what] {S} {gains}",
        "{S} {gains} {x} and [then|later] {y} / [both|the two] gains [can be added|count] first",
    ),
    "product": _wordings(
        "the [new|extra] {boxes} [{hold}|{contain}] # / {S} {gains} # in the [new|extra] {boxes} / "
        "there {are} # in the [new|extra|added] {boxes} / [that|this] {is} # more",
        "the number of [new|extra|added] {many} / "
        "[what|the amount] [the new {boxes} {hold}|{S} {gains}]",
        "each [new|extra] {box} {holds} {y} {items_y} / "
        "there {are} {x} [new|more|extra] {boxes} [with|of] {y} {items_y} each",
    ),
    "gainboxes": _like(
        _NOW,
        "the [new|extra] {y} [come|are added] [to the {x}|on top] / "
        "[these|the new ones] are added [to the {x}|]",
    ),
    "lose": _like(
        _LEFT,
        "{S} {verb} {y_amount} [{tail}|] / {y} [of the {x}|] {are} [gone|taken away] / "
        "[{S}|then {S}] {verb} {y} [of them|] {tail}",
    ),
    "lose2": _like(
        _LEFT,
        "{y_amount} {are} [gone|taken away] [in total|altogether] / {S} [started with|had] {x}",
    ),
    "mergelose": _wordings(
        "{S} {loses} # [in total|altogether] / [together|in total], # {are} gone / "
        "the [two losses|losses] [come|add up] to #",
        "the number of {many} [that are gone|lost] / [everything|all] {S} {gives} up",
        "{S} {loses} {x} and [then|later] {y} / [both|the two] losses [can be added|count] first",
    ),
    "handout": _wordings(
        "{S} {gives} away # / [that|this] {is} # [given away|for the others] / "
        "[together|in total], they {get} # / the {x} [of them|people] {get} #",
        "the number of {many} given away / [what|the amount] {S} {gives} away",
        "[each|every one] of the {x} people {gets} {y} / {x} people {get} {y_amount} each",
    ),
    "loseeach": _like(
        _LEFT, "{y} {are} [given away|gone] / [these|the given ones] are taken [from|off] the {x}"
    ),
    "losehalf": _like(
        _LEFT,
        "half of the {many} {are} [gone|taken away] / {S} {verb} half [of them|] {tail} / "
        "only [half|one half] {remain}",
    ),
    "part": _wordings(
        "{S} {verb} # [{tail}|] / [that|this] [part|share] {is} # / # {are} [gone|taken away]",
        "[one {ordinal}|this part] of [{x}|the {many}] / [what|the part] {S} {loses} / "
        "the [part|number] [that is gone|taken away]",
        "{S} {verb} one {ordinal} [of the {x}|of them] / "
        "one part out of {y} {is} [gone|taken away]",
    ),
    "losepart": _like(
        _LEFT, "{y} {are} [gone|taken away] / [this|that] part is taken [from|off] the {x}"
    ),
    "percent": _wordings(
        "[that|this] {is} # [in all|] / # {are} [gone|taken away] / {S} {loses} #",
        "{y}% of [{x}|the {many}] / the [part|number] [that is gone|taken away] / "
        "[what|the part] {S} {loses}",
        "{y}% of the [{x}|{many}] {are} [gone|taken away] / "
        "[we need|we have to find|first find] {y}% of {x}",
    ),
    "double": _like(
        _NOW, "the [number|amount] [doubles|is doubled] / {S} [now|then] {has} twice as [many|much]"
    ),
    "share": _wordings(
        "each [of them|one|person] {gets} # / everyone {gets} # / "
        "[that|this] {is} # [each|for each|per person] / they [each|all] {get} #",
        "[the|each] share / [the|each] person's [share|part] / the [number|amount] per person",
        "the {x} [{are}|{are} all] [shared|split|divided] [among|by] {y} / "
        "[there are|we have] {y} [people|shares] / [everyone|each one] {gets} the same",
    ),
    "pack": _wordings(
        "{S} {fills} # / [that|this] {makes} # / {S} {needs} # / there {are} # [in the end|]",
        "the number of {boxes} / how many {boxes} [there {are}|{S} {needs}]",
        "each {box} [{takes}|{holds}] {y} / there are {y} [in|for] each {box} / "
        "[{x}|the {x}] {are} [put|packed] in {boxes} of {y}",
    ),
    "pack/cash": _wordings(
        "{S} {can} buy # / [that|this] {is} enough for # / {S} {gets} #",
        "the number of {boxes} / how many {boxes} {S} {can} buy",
        "each {box} {costs} ${y} / [one|a] {box} {is} ${y} / {S} {has} ${x} for {boxes} at ${y}",
    ),
    "sell": _wordings(
        "{S} {earns} # / [that|this] {brings} [{him} |]# / "
        "[all|the] {many} [together|] {bring} # / {S} {gets} # [for them|for all of them|]",
        "the [money|amount] [{S} {earns}|from the sale] / the [sale|price of all {many}]",
        "each {item} {brings} ${y} / {S} {sells} {x} {many} [at|for] ${y} each / "
        "[one|every] {item} {costs} ${y}",
    ),
    "spend": _wordings(
        "{S} {has} # left / [that|this] {leaves} [{him} with |]# / # {remains}",
        "the [money|amount] [left|that remains] / [what|the rest that] {is} left",
        "{S} {spends} ${y} [of it|of the money|] / ${y} {is} [spent|gone|paid]",
    ),
    "goal": _wordings(
        "{S} {needs} # more / # {are} [missing|still missing] / "
        "{S} {has} to [get|find] # more / there {are} # [to go|missing]",
        "the [missing|needed] [number|{many}|amount] / what {S} [still|] {needs}",
        "{S} [wants|needs] {x} and {has} {y} / the goal {is} {x} [in total|{items_x}] / "
        "{y} of the {x} {are} [there|done]",
    ),
    "goal/cash": _wordings(
        "{S} {needs} # more / # {is} [missing|still missing] / {S} {has} to [save|find] # more",
        "the [missing|needed] [money|amount] / what {S} [still|] {needs}",
        "[the price|the cost|it] {is} ${x} and {S} {has} ${y} / "
        "${y} of the ${x} {is} [there|saved]",
    ),
    "compare": _wordings(
        "the difference {is} # / [that|this] {is} # more / {R} {has} # more [than {P}|] / "
        "{R} {is} ahead [of {P}|] by #",
        "the difference [between them|between {A} and {B}|] / "
        "[what|the amount] {R} {has} [more|on top]",
        "{R} {has} {x} and {P} {has} {y} / [compare|we compare] {x} [with|and] {y}",
    ),
    "together": _wordings(
        "[together|in total], they {havethey} # / they {havethey} # [together|in total|in all] / "
        "[both|the two] [together|] {makethey} # / {A} and {B} {havethey} # [together|in total]",
        "the [sum|total] [of both|for both|] / [what|the number] they {havethey} together",
        "{A} {has} {x} and {B} {has} {y} / [both|the two] [numbers|shares] [count|are added]",
    ),
    "buy": _wordings(
        "the {many} {cost} # / {S} {pays} # for the {many} / [that|this] {is} # for the {many} / "
        "[together|in total], the {many} {cost} #",
        "the [price|cost] of [the|all] {many} / the {many} [together|]",
        "each {item} {costs} ${y} / {S} {buys} {x} {many} [at|for] ${y} each / "
        "there {are} {x} {many} [at|for] ${y} each",
    ),
    "second": _wordings(
        "the {boxes} {cost} # / {S} {pays} # for the {boxes} / [that|this] {is} # for the {boxes}",
        "the [price|cost] of [the|all] {boxes} / the {boxes} [together|]",
        "each {box} {costs} ${y} / {S} {buys} {x} {boxes} [at|for] ${y} each",
    ),
    "plus": _wordings(
        "[everything|all of it] {costs} # / the [total|sum|bill] {is} # / "
        "[together|in total], [that|this] {is} #",
        "the [total|sum|bill] / the [cost|price] of everything",
        "the {box} {costs} ${y} [more|] / {S} [also|] {buys} one {box} for ${y} / "
        "the {box} {is} added",
    ),
    "addup": _wordings(
        "[everything|all of it] {costs} # / the [total|sum|bill] {is} # / "
        "[together|in total], [that|this] {is} #",
        "the [total|sum|bill] / the [cost|price] of everything",
        "[both|the two] [amounts|prices|parts] are added / "
        "the two [parts|prices] are ${x} and ${y}",
    ),
    "coupon": _wordings(
        "{S} [only|] {pays} # / the [price|cost|bill] [drops|goes down] to # / "
        "[that|this] {leaves} # to pay",
        "the [price|cost|bill] [with the coupon|after that|] / [what|the amount] {S} {pays}",
        "{S} {gets} ${y} off / ${y} [is taken|comes] off [the bill|the price|]",
    ),
    "fee": _wordings(
        "{S} {pays} # [in all|altogether|] / the [price|cost|bill] [rises|goes up] to # / "
        "[that|this] {makes} # [in total|]",
        "the [price|cost|bill] [with the extra|after that|] / [what|the amount] {S} {pays}",
        "there {is} ${y} extra / ${y} [is added|comes on top]",
    ),
    "discount": _wordings(
        "the discount {is} # / {S} {saves} # / [that|this] {is} # off",
        "the [discount|amount saved] / {y}% of [${x}|the price|the total]",
        "{y}% [is taken|comes] off [the price|the total|] / "
        "[we need|first find] {y}% of [the price|${x}]",
    ),
    "change": _wordings(
        "{S} {gets} # back / the change {is} # / # {is} [given back|returned]",
        "the change / the [money|amount] [back|{S} {gets} back]",
        "{S} {pays} [with|] ${x} / ${y} [is taken|comes] off the ${x} / the bill {is} ${y}",
    ),
    "splitbill": _wordings(
        "each [of them|one|person] {pays} # / everyone {pays} # / "
        "[that|this] {is} # [each|for each|per person]",
        "[the|each] share / the [cost|price] per person / each person's [share|part]",
        "the [bill|cost] {is} split [by|among] {y} / [there are|we have] {y} [people|shares]",
    ),
}
