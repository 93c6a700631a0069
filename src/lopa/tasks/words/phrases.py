"""The wordings of solution steps, by what the step works out.

Each entry has three columns. `clauses` are sentences with `#` where the equation goes; `labels`
are noun phrases for the result; `reasons` say why the step is taken. See `phrases` for the
notation and `words_answer` for the fields.
"""

from dataclasses import dataclass

from lopa.tasks.grammar import Phrase, phrases


@dataclass(frozen=True, slots=True)
class Wordings:
    clauses: tuple[Phrase, ...]
    labels: tuple[Phrase, ...]
    reasons: tuple[Phrase, ...]


def _wordings(clauses: str, labels: str, reasons: str) -> Wordings:
    return Wordings(*(phrases(*column.split(" / ")) for column in (clauses, labels, reasons)))


_NOW = _wordings(
    "{S} {has} # [in total|altogether] / {S} [now|then] {has} # / "
    "[that|this] [{brings} the total to|{makes}] # / the [new|current] total {is} #",
    "the [new|current] total / {how_many} {S} {has} [now|after that] / "
    "the total [so far|up to now]",
    "",
)
_LEFT = _wordings(
    "{S} {has} # [left|remaining] / [that|this] {leaves} [{him} with #|#] / "
    "# {result_remain} [after that|] / there {result_are} # [left|still there]",
    "[{number_of} left|the rest|the remaining {many}] / what {is} left / {how_many} {S} {keeps}",
    "",
)


def _of_a(reasons: str) -> Wordings:
    """What the main person has, known from what the other one has."""
    return _wordings(
        "{A} {has} # / {A} then {has} # / {A}'s total {is} #",
        "{number_of} {A} {has} / what {A} {has} / {A}'s total",
        reasons,
    )


def _like(base: Wordings, reasons: str) -> Wordings:
    return Wordings(base.clauses, base.labels, phrases(*reasons.split(" / ")))


WORDINGS: dict[str, Wordings] = {
    "groups": _wordings(
        "{S} {has} # in the {boxes} / the {boxes} [{hold}|{contain}] # [together|in total|] / "
        "there {are} # in [the {boxes}|all {x} {boxes}] / {S} {starts} with #",
        "the number of {many} in [the|all the|all {x}] {boxes} / "
        "the [starting|first] [number|total] / the total [in|inside] the {boxes}",
        "each [of the {x} {boxes}|{box}] {holds} {y} {items_y} / "
        "there {are} {x} {boxes} [with|of] {y} {items_y} each / "
        "every one of the {boxes} {holds} {y} {items_y}",
    ),
    "rate": _wordings(
        "{S} {make} # [in|over] {y} {periods} / in {y} {periods}, {S} {make} # / "
        "the {y} {periods} {bring} # [together|in total] / "
        "over [these|the] {y} {periods}, {S} {make} #",
        "the total [over|for|after] [{y}|all {y}] {periods} / "
        "what {S} {make} in {y} {periods} / the [first|starting] total",
        "{S} {make} {x_amount} [each|every|per] {period} / "
        "there {are} {y} {periods} with {x_amount} [each|in each] / "
        "{S} {does} this for {y} {periods}",
    ),
    "times": _of_a(
        "{A} {has} {y} times as {as_many} as {B} / "
        "{B} {has} {x_amount} and {A} {has} {y} times [that|as {as_many}] / "
        "{B}'s total {is} multiplied by {y}",
    ),
    "more": _of_a(
        "{A} {has} {y_more} than {B} / {B} {has} {x_amount} and {A} {has} {y_short} more / "
        "{A} {is} ahead of {B} by {y_short}",
    ),
    "fewer": _of_a(
        "{A} {has} {y_fewer} than {B} / {B} {has} {x_amount} and {A} {has} {y_short} {fewer} / "
        "{A} {is} behind {B} by {y_short}",
    ),
    "half": _of_a(
        "{A} {has} half as {as_many} as {B} / "
        "{B} {has} {x_amount} and {A} {has} half of [that|it] / "
        "half of {B}'s total {is} {A}'s total",
    ),
    "two": _wordings(
        "{S} {make} # [in total|altogether|in all] / "
        "[both|the two] parts together {give} # / the [sum|total] {is} #",
        "the [sum|total] of [both|the two] [numbers|parts] / the [first|starting] total / "
        "what {S} {make} [in all|in total]",
        "{S} {make} {x_short} and [then|later] {y_short} / "
        "[both|the two] [numbers|parts] {are} added / "
        "the two [numbers|amounts] {are} {x_short} and {y_short}",
    ),
    "grow1": _wordings(
        "{S} {make} # {in} the second {period} / {in} the second {period}, {S} {make} # / "
        "the second {period} {brings} #",
        "the [number|amount] for the second {period} / what the second {period} {brings}",
        "the second {period} {brings} {y_more} [than the first|] / "
        "{S} {make} {y_short} more [{in} the second {period}|one {period} later]",
    ),
    "grow2": _wordings(
        "{S} {make} # {in} the third {period} / {in} the third {period}, {S} {make} # / "
        "the third {period} {brings} #",
        "the [number|amount] for the third {period} / what the [third|last] {period} {brings}",
        "the third {period} {brings} {y_more} [than the second|again] / "
        "[again|once more], {S} {make} {y_short} more",
    ),
    "grow3": _wordings(
        "{S} {make} # in [total|all] / [all|the] three {periods} [together|] {give} # / "
        "[that|this] {makes} # [in total|altogether]",
        "the [sum|total] of [all|the] three {periods} / the [total|whole amount] so far",
        "there {are} three {periods} to [add|add up] / [all|the] three {periods} {are} added",
    ),
    "gain": _like(
        _NOW,
        "{S} {verb} {y_more} [{tail}|] / {y_amount} {y_are} added [to the {x_short}|] / "
        "{S} [also|then] {verb} {y_amount} {tail}",
    ),
    "gain/tally": _wordings(
        "{S} {has} # [in all|in total|so far] / "
        "[that|this] [{brings} the total to|{makes}] # / the [new|whole] total {is} #",
        "the [new|whole] total / {how_many} {S} {has} so far / the total [so far|up to now]",
        "{S} {verb} {y_more} [{tail}|] / {y_amount} {y_are} added [to the {x_short}|] / "
        "{S} [also|then] {verb} {y_amount} {tail}",
    ),
    "gain2": _like(
        _NOW,
        "{y_amount} {y_are} added [to the {x_short}|] / "
        "{S} {has} {x_amount} [at first|to begin with]",
    ),
    "mergegain": _wordings(
        "{S} {gains} # [in total|altogether] / the two additions {come} to # / "
        "the two additions together {give} #",
        "[everything|all] {S} {gains} / the sum of the two additions",
        "{S} {gains} {x_short} and [then|later] {y_short} / "
        "there {are} two additions, {x_short} and {y_short}",
    ),
    "mergegain/tally": _wordings(
        "{S} {has} # more / the two additions {come} to # / the two additions together {give} #",
        "what {S} {has} on top / the sum of the two additions",
        "{S} {has} {x} more and [then|later] {y} more / "
        "there {are} two additions, {x_short} and {y_short}",
    ),
    "product": _wordings(
        "the [new|extra] {boxes} [{hold}|{contain}] # / {S} {gains} # in the [new|extra] {boxes} / "
        "there {are} # in the [new|extra|added] {boxes} / there {are} # more",
        "the number of [new|extra|added] {many} / what [the new {boxes} {hold}|{S} {gains}]",
        "each [new|extra] {box} {holds} {y} {items_y} / "
        "there {are} {x} [new|more|extra] {boxes} [with|of] {y} {items_y} each",
    ),
    "gainboxes": _like(
        _NOW,
        "the [new|extra] {y} {are} added [to the {x}|] / "
        "[these|the new ones] {are} added [to the {x}|]",
    ),
    "lose": _like(
        _LEFT,
        "{S} {verb} {y_amount} {tail} / "
        "{y_short} [of the {x_short}|] {y_are} [gone|taken away] / "
        "[{S}|then {S}] {verb} {y_short} [{of_them}|] {tail}",
    ),
    "lose2": _like(
        _LEFT,
        "{y_amount} {y_are} [gone|taken away] [in total|altogether] / "
        "{S} {has} {x_amount} [before that|at first]",
    ),
    "mergelose": _wordings(
        "{S} {loses} # [in total|altogether] / # {result_are} gone [in total|altogether] / "
        "the two losses {come} to #",
        "{number_of} [that {many_are} gone|lost] / [everything|all] {S} {gives} up",
        "{S} {loses} {x_short} and [then|later] {y_short} / "
        "there {are} two losses, {x_short} and {y_short}",
    ),
    "handout": _wordings(
        "{S} {gives} away # / # {are} given away / "
        "they {get} # [together|in total] / the {x} [of them|people] {get} #",
        "the number of {many} given away / [what|the amount] {S} {gives} away",
        "[each|every one] of the {x} people {gets} {y} / {x} people {get} {y_amount} each",
    ),
    "loseeach": _like(
        _LEFT, "{y} {are} [given away|gone] / [these|the given ones] {are} taken [from|off] the {x}"
    ),
    "losehalf": _like(
        _LEFT,
        "half of the {many} {many_are} [gone|taken away] / {S} {verb} half [{of_them}|] {tail} / "
        "only [half|one half] {is} left",
    ),
    "part": _wordings(
        "{S} {verb} # {tail} / one {ordinal} of the {many} {is} # / "
        "# {result_are} [gone|taken away]",
        "one {ordinal} of [{x_short}|the {many}] / what {S} {verb} {tail} / "
        "the part [that {is} gone|taken away]",
        "{S} {verb} one {ordinal} [of the {x_short}|{of_them}] {tail} / "
        "one part out of {y} {is} [gone|taken away]",
    ),
    "losepart": _like(
        _LEFT,
        "{y_short} {y_are} [gone|taken away] / [this|that] part {is} taken [from|off] "
        "the {x_short}",
    ),
    "percent": _wordings(
        "the part [that {is} gone|taken away] {is} # / # {result_are} [gone|taken away] / "
        "{S} {loses} #",
        "the part [that {is} gone|taken away] / [what|the part] {S} {loses} / {y}% of the {many}",
        "{y}% of the [{x}|{many}] {are} [gone|taken away] / {S} {loses} {y}% of [the {many}|{x}]",
    ),
    "double": _like(
        _NOW, "the [number|amount] {is} doubled / {S} [now|then] {has} twice as {as_many}"
    ),
    "share": _wordings(
        "each [of them|one|person] {gets} # / everyone {gets} # / "
        "[that|this] {is} # [each|for each|per person] / they [each|all] {get} #",
        "each [share|part] / each person's [share|part] / the [number|amount] per person",
        "the {x_amount} {x_are} [shared|split|divided] among {y} people / "
        "there {are} {y} [people|shares] / [everyone|each one] {gets} the same amount",
    ),
    "pack": _wordings(
        "{S} {fills} # / [that|this] {makes} # / {S} {needs} # / there {are} # [in the end|]",
        "the number of {boxes} / how many {boxes} [there {are}|{S} {needs}]",
        "each {box} [{takes}|{holds}] {y} / there {are} {y} [in|for] each {box} / "
        "the {x_amount} {x_are} [put|packed] in {boxes} of {y}",
    ),
    "pack/cash": _wordings(
        "{S} {can} buy # / [that|this] {is} enough for # / {S} {gets} #",
        "the number of {boxes} / how many {boxes} {S} {can} buy",
        "each {box} {costs} ${y} / [one|a] {box} {is} ${y} / {S} {has} ${x} for {boxes} at ${y}",
    ),
    "sell": _wordings(
        "{S} {earns} # / [that|this] {brings} [{him} |]# / "
        "[all|the] {many} [together|] {bring} # / {S} {gets} # [for them|for all of them|]",
        "the [money|amount] [{S} {earns}|from the sale] / the price of all {many}",
        "each {item} {brings} ${y} / {S} {sells} {x} {many} [at|for] ${y} each / "
        "[one|every] {item} {costs} ${y}",
    ),
    "spend": _wordings(
        "{S} {has} # left / [that|this] {leaves} [{him} with |]# / # {remains}",
        "the [money|amount] [left|that {remains}] / what {is} left",
        "{S} {spends} ${y} [of it|of the money|] / ${y} {is} [spent|gone|paid]",
    ),
    "goal": _wordings(
        "{S} {needs} # more / # {result_are} [missing|still missing] / "
        "there {result_are} # [to go|missing]",
        "the [missing|needed] [number|{many}] / what {S} [still|] {needs}",
        "{S} {needs} {x} and {has} {y} / the goal {is} {x} {items_x} / "
        "{y} of the {x} {are} [there|done]",
    ),
    "goal/cash": _wordings(
        "{S} {needs} # more / # {is} [missing|still missing] / {S} {has} to [save|find] # more",
        "the [missing|needed] [money|amount] / what {S} [still|] {needs}",
        "[the price|the cost|it] {is} ${x} and {S} {has} ${y} / "
        "${y} of the ${x} {is} [there|saved]",
    ),
    "compare": _wordings(
        "the difference {is} # / {R} {has} # more [than {P}|] / {R} {is} ahead [of {P}|] by #",
        "the difference [between {A} and {B}|between them] / {how} more {R} {has}",
        "{R} {has} {x_short} and {P} {has} {y_short} / "
        "the two [numbers|totals] {are} {x_short} and {y_short}",
    ),
    "together": _wordings(
        "they {havethey} # [together|in total|in all] / "
        "{A} and {B} {havethey} # [together|in total] / [both|the two] together {makethey} #",
        "the [sum|total] [of|for] both / what they {havethey} together",
        "{A} {has} {x_short} and {B} {has} {y_short} / [both|the two] [numbers|parts] {are} added",
    ),
    "buy": _wordings(
        "the {many} {cost} # / {S} {pays} # for the {many} / "
        "the [price|cost] of the {many} {is} # / {S} {buys} the {many} for #",
        "the [price|cost] of [the|all] {many} / what the {many} {cost}",
        "each {item} {costs} ${y} / {S} {buys} {x} {many} [at|for] ${y} each / "
        "there {are} {x} {many} [at|for] ${y} each",
    ),
    "second": _wordings(
        "the {boxes} {cost} # / {S} {pays} # for the {boxes} / "
        "the [price|cost] of the {boxes} {is} # / {S} {buys} the {boxes} for #",
        "the [price|cost] of [the|all] {boxes} / what the {boxes} {cost}",
        "each {box} {costs} ${y} / {S} {buys} {x} {boxes} [at|for] ${y} each",
    ),
    "plus": _wordings(
        "[everything|all of it] {costs} # / the [total|sum|bill] {is} # / "
        "[that|this] {is} # [together|in total]",
        "the [total|sum|bill] / the [cost|price] of everything",
        "the {box} {costs} ${y} / {S} [also|] {buys} one {box} for ${y} / the {box} {is} added",
    ),
    "addup": _wordings(
        "[everything|all of it] {costs} # / the [total|sum|bill] {is} # / "
        "[that|this] {is} # [together|in total]",
        "the [total|sum|bill] / the [cost|price] of everything",
        "[both|the two] [amounts|prices|parts] {are} added / "
        "the two [parts|prices] {are} ${x} and ${y}",
    ),
    "coupon": _wordings(
        "{S} [only|] {pays} # / the [price|cost|bill] {drops} to # / [that|this] {leaves} # to pay",
        "the [price|cost|bill] [after that|in the end] / [what|the amount] {S} {pays}",
        "{S} {gets} ${y} off / ${y} [{is} taken|{comes}] off [the bill|the price|]",
    ),
    "fee": _wordings(
        "{S} {pays} # [in all|altogether|] / the [price|cost|bill] {rises} to # / "
        "[that|this] {makes} # [in total|]",
        "the [price|cost|bill] [with the extra|after that|] / [what|the amount] {S} {pays}",
        "there {is} ${y} extra / ${y} [{is} added|{comes} on top]",
    ),
    "discount": _wordings(
        "the discount {is} # / {S} {saves} # / [that|this] {is} # off",
        "the [discount|amount saved] / {y}% of [${x}|the price|the total]",
        "{y}% [{is} taken|{comes}] off [the price|the total|] / there {is} a discount of {y}%",
    ),
    "change": _wordings(
        "{S} {gets} # back / the change {is} # / # {is} [given back|returned]",
        "the change / the [money|amount] {S} {gets} back",
        "{S} {pays} with ${x} / ${y} [{is} taken|{comes}] off the ${x} / the bill {is} ${y}",
    ),
    "splitbill": _wordings(
        "each [of them|one|person] {pays} # / everyone {pays} # / "
        "[that|this] {is} # [each|for each|per person]",
        "each [share|part] / the [cost|price] per person / each person's [share|part]",
        "the [bill|cost] {is} split among {y} people / there {are} {y} [people|shares]",
    ),
}
