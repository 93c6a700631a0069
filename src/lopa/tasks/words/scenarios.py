"""The everyday settings word problems are told in: people, things, and what is done with them."""

from dataclasses import dataclass

_IRREGULAR = {
    "bring": "brings brought bringing brought",
    "come": "comes came coming come",
    "rise": "rises rose rising risen",
    "mean": "means meant meaning meant",
    "keep": "keeps kept keeping kept",
    "cost": "costs cost costing cost",
    "have": "has had having had",
    "buy": "buys bought buying bought",
    "find": "finds found finding found",
    "get": "gets got getting got",
    "give": "gives gave giving given",
    "sell": "sells sold selling sold",
    "eat": "eats ate eating eaten",
    "lose": "loses lost losing lost",
    "make": "makes made making made",
    "read": "reads read reading read",
    "run": "runs ran running run",
    "swim": "swims swam swimming swum",
    "ride": "rides rode riding ridden",
    "write": "writes wrote writing written",
    "spend": "spends spent spending spent",
    "win": "wins won winning won",
    "draw": "draws drew drawing drawn",
    "grow": "grows grew growing grown",
    "send": "sends sent sending sent",
    "cut": "cuts cut cutting cut",
    "put": "puts put putting put",
    "hold": "holds held holding held",
    "drop": "drops dropped dropping dropped",
    "swap": "swaps swapped swapping swapped",
    "do": "does did doing done",
    "catch": "catches caught catching caught",
    "take": "takes took taking taken",
    "lend": "lends lent lending lent",
    "leave": "leaves left leaving left",
    "pay": "pays paid paying paid",
    "hang": "hangs hung hanging hung",
    "plan": "plans planned planning planned",
    "set": "sets set setting set",
    "string": "strings strung stringing strung",
    "drive": "drives drove driving driven",
}


@dataclass(frozen=True, slots=True)
class Verb:
    """The forms of a verb for a third-person subject."""

    base: str
    present: str
    past: str
    ing: str
    participle: str

    def form(self, past: bool) -> str:
        """The finite form in the given tense."""
        return self.past if past else self.present


def verb(base: str) -> Verb:
    """The forms of a verb, regular unless listed."""
    if base in _IRREGULAR:
        return Verb(base, *_IRREGULAR[base].split())
    if base.endswith("e"):
        return Verb(base, base + "s", base + "d", base[:-1] + "ing", base + "d")
    if base.endswith("y") and base[-2] not in "aeiou":
        return Verb(base, base[:-1] + "ies", base[:-1] + "ied", base + "ing", base[:-1] + "ied")
    third = base + ("es" if base.endswith(("sh", "ch", "s", "x")) else "s")
    return Verb(base, third, base + "ed", base + "ing", base + "ed")


@dataclass(frozen=True, slots=True)
class Deed:
    """Something a person does with things: `verb`, the things, then `tail`."""

    verb: Verb
    tail: str


@dataclass(frozen=True, slots=True)
class Noun:
    one: str
    many: str

    def count(self, number: int) -> str:
        """The form that goes with a number."""
        return self.one if number == 1 else self.many


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    they: str
    them: str
    their: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """A setting.

    `kind` says which events make sense: `stock` (things that come and go), `tally` (things that
    are only counted up), `cash` (money, written with a dollar sign). `own` is the verb for having
    a number of them, `make` how they come about over time.
    """

    name: str
    kind: str
    own: Verb
    items: tuple[Noun, ...]
    boxes: tuple[Noun, ...]
    make: tuple[Deed, ...]
    gain: tuple[Deed, ...]
    lose: tuple[Deed, ...]
    bad: tuple[str, ...]
    goal: tuple[str, ...]
    periods: tuple[str, ...]


def _nouns(text: str) -> tuple[Noun, ...]:
    nouns = []
    for entry in text.split(", "):
        one, _, many = entry.partition("/")
        nouns.append(Noun(one, many or one + "s"))
    return tuple(nouns)


def _deeds(text: str) -> tuple[Deed, ...]:
    deeds = []
    for entry in text.split(", "):
        base, _, tail = entry.partition(" ")
        deeds.append(Deed(verb(base), tail))
    return tuple(deeds)


def _stock(
    name: str, items: str, boxes: str, make: str, gain: str, lose: str, bad: str, periods: str
) -> Scenario:
    return Scenario(
        name,
        "stock",
        verb("have"),
        _nouns(items),
        _nouns(boxes),
        _deeds(make),
        _deeds(gain),
        _deeds(lose),
        tuple(bad.split(", ")),
        (),
        tuple(periods.split()),
    )


def _tally(name: str, own: str, items: str, gain: str, goal: str, periods: str) -> Scenario:
    deeds = _deeds(gain)
    return Scenario(
        name,
        "tally",
        verb(own),
        _nouns(items),
        (),
        (Deed(verb(own), ""),),
        deeds,
        (),
        (),
        tuple(goal.split(", ")),
        tuple(periods.split()),
    )


def _cash(name: str, make: str, gain: str, lose: str, goal: str, periods: str) -> Scenario:
    return Scenario(
        name,
        "cash",
        verb("have"),
        (Noun("dollar", "dollars"),),
        _nouns("book, ticket, game, toy, poster, puzzle"),
        _deeds(make),
        _deeds(gain),
        _deeds(lose),
        (),
        tuple(goal.split(", ")),
        tuple(periods.split()),
    )


SCENARIOS: tuple[Scenario, ...] = (
    _stock(
        "fruit",
        "apple, orange, peach/peaches, plum, lemon, pear",
        "basket, bag, box/boxes, crate",
        "pick, collect",
        "buy at the market, pick from another tree, get from ~ aunt",
        "give to a neighbor, sell at the market, eat with ~ family, drop on the way home",
        "rotten, bruised",
        "day hour",
    ),
    _stock(
        "baking",
        "cookie, muffin, cupcake, roll, pie",
        "tray, box/boxes, tin",
        "bake, make",
        "bake in the evening, buy at the bakery, get from ~ grandmother",
        "eat with ~ friends, sell at the fair, give to ~ class, take to a party",
        "burnt, broken",
        "day hour",
    ),
    _stock(
        "stickers",
        "sticker, stamp, card, coin",
        "album, sheet, packet",
        "collect, find",
        "buy at the store, win in a contest, get from ~ uncle",
        "give to ~ cousin, trade for a toy, lose on the bus, sell online",
        "torn, damaged",
        "week day",
    ),
    _stock(
        "marbles",
        "marble, bead, button, pebble",
        "jar, bag, pouch/pouches",
        "collect, gather",
        "find in the park, win in a game, buy at the toy shop",
        "lose in a game, give to ~ brother, drop on the street, swap for a toy",
        "cracked, chipped",
        "day week",
    ),
    _stock(
        "books",
        "book, comic, magazine",
        "shelf/shelves, box/boxes, stack",
        "collect, buy",
        "buy at a sale, get from ~ teacher, find in the attic",
        "donate to the library, sell online, lend to a friend, give to ~ school",
        "damaged, torn",
        "week month",
    ),
    _stock(
        "school",
        "pencil, pen, crayon, marker, eraser",
        "pack, case, box/boxes",
        "collect, buy",
        "buy at the store, get from ~ teacher, find in a drawer",
        "give to classmates, lose at school, lend to ~ sister, use for a project",
        "broken, empty",
        "week month",
    ),
    _stock(
        "flowers",
        "rose, tulip, flower, daisy/daisies, lily/lilies",
        "vase, bunch/bunches, pot",
        "grow, pick",
        "plant in the yard, buy at the shop, pick in the meadow",
        "sell at the stand, give to ~ mother, use for a wreath, send to a friend",
        "wilted, dry",
        "week day",
    ),
    _stock(
        "farm",
        "egg, potato/potatoes, carrot, tomato/tomatoes, onion",
        "carton, crate, sack",
        "collect, gather",
        "collect in the afternoon, buy from a farmer, get from a neighbor",
        "sell at the market, use for dinner, give to ~ friends, drop in the barn",
        "cracked, spoiled",
        "day week",
    ),
    _stock(
        "beach",
        "shell, stone, starfish/starfish, feather",
        "bucket, net, box/boxes",
        "gather, find",
        "find on the beach, get from ~ father, collect near the pier",
        "leave on the sand, give to ~ sister, paint for a show, sell to tourists",
        "broken, dirty",
        "day hour",
    ),
    _stock(
        "toys",
        "toy car, block, puzzle, doll, robot",
        "shelf/shelves, box/boxes, chest",
        "make, collect",
        "buy at the fair, get for ~ birthday, find in the garage",
        "give to charity, sell at a yard sale, lend to ~ cousin, trade at school",
        "broken, faulty",
        "month week",
    ),
    _stock(
        "crafts",
        "bracelet, candle, necklace, scarf/scarves, mug",
        "box/boxes, bag, display",
        "make, finish",
        "make at night, order online, get from ~ partner",
        "sell at the fair, give to ~ aunt, send to a customer, donate to the school",
        "faulty, cracked",
        "day week",
    ),
    _stock(
        "party",
        "balloon, hat, candy/candies, cup, paper plate",
        "bag, pack, box/boxes",
        "prepare, decorate",
        "buy at the store, get from a friend, find in the closet",
        "use at the party, give to guests, lose in the wind, hand to ~ cousins",
        "damaged, dirty",
        "hour day",
    ),
    _stock(
        "aquarium",
        "fish/fish, snail, shrimp/shrimp, frog",
        "tank, bowl, pond",
        "raise, catch",
        "buy at the pet shop, get from a friend, catch in the lake",
        "sell to a shop, give to ~ friend, release in a lake, move to the school",
        "sick, hurt",
        "month week",
    ),
    _stock(
        "photos",
        "photo, drawing, painting, poster",
        "album, folder, frame",
        "print, prepare",
        "print at the shop, get from ~ cousin, find in a drawer",
        "give to ~ parents, sell at the gallery, send to a friend, hang in the hall",
        "blurry, torn",
        "day week",
    ),
    _tally(
        "reading",
        "read",
        "page, chapter, story/stories, poem",
        "read on the bus, read before bed, read after lunch",
        "the whole book has, the reading list has, the summer challenge asks for",
        "day week",
    ),
    _tally(
        "hiking",
        "walk",
        "mile, kilometer, block",
        "walk after dinner, walk with a friend, walk on the weekend",
        "the whole trail has, the plan asks for, the charity event asks for",
        "day hour",
    ),
    _tally(
        "swimming",
        "swim",
        "lap, length",
        "swim in the evening, swim with ~ team, swim after school",
        "the training plan asks for, the coach asks for, the badge requires",
        "day week",
    ),
    _tally(
        "homework",
        "solve",
        "problem, exercise, puzzle, equation",
        "solve after dinner, solve on the train, solve with a friend",
        "the workbook has, the teacher asks for, the contest requires",
        "day hour",
    ),
    _tally(
        "letters",
        "write",
        "letter, card, note, invitation",
        "write at night, write with ~ sister, write at school",
        "the whole list has, the project requires, the club asks for",
        "day week",
    ),
    _tally(
        "planting",
        "plant",
        "tree, bush/bushes, seed, bulb",
        "plant near the fence, plant with ~ father, plant in the evening",
        "the whole garden needs, the plan asks for, the town asks for",
        "hour day",
    ),
    _cash(
        "lawns",
        "earn, make",
        "get from ~ uncle, find in a coat, earn for washing cars",
        "spend on lunch, pay for a book, lose on the way, give to ~ brother",
        "a bike, a skateboard, a tent",
        "day hour",
    ),
    _cash(
        "savings",
        "save, earn",
        "get for ~ birthday, receive from ~ aunt, earn for babysitting",
        "spend on a gift, pay for a ticket, donate to a shelter, lend to a friend",
        "a guitar, a camera, a phone",
        "week month",
    ),
)

_WOMEN = "Mia Anna Emma Kate Sara Lucy Alice Grace"
_MEN = "Tom Ben Leo Max Sam Jack Noah Paul"

PEOPLE: tuple[tuple[Person, ...], tuple[Person, ...]] = (
    tuple(Person(name, "she", "her", "her") for name in _WOMEN.split()),
    tuple(Person(name, "he", "him", "his") for name in _MEN.split()),
)

GOODS: tuple[tuple[str, tuple[Noun, ...]], ...] = (
    ("toy shop", _nouns("ball, puzzle, kite, doll, game")),
    ("bookstore", _nouns("book, comic, notebook, map, magazine")),
    ("bakery", _nouns("pie, cake, loaf/loaves, muffin, sandwich/sandwiches")),
    ("garden shop", _nouns("pot, plant, rose, shovel, bag of seeds/bags of seeds")),
    ("sports store", _nouns("ball, cap, bottle, racket, shirt")),
    ("music store", _nouns("record, poster, flute, songbook, drum")),
    ("pet shop", _nouns("collar, leash/leashes, bowl, bag of food/bags of food, toy")),
    ("craft store", _nouns("brush/brushes, candle, frame, canvas/canvases, paint set")),
)
"""Shops and what they sell, for the problems about paying."""
