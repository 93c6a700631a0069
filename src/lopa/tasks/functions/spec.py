"""What a generated function does: its parts, their parameters, its name, and its asserts."""

from dataclasses import dataclass
from typing import Any

from lopa.tasks.functions.maps import MAPS
from lopa.tasks.functions.parts import REDUCTIONS, SOURCES, Map, Predicate, Reduction, Source
from lopa.tasks.functions.predicates import PREDICATES
from lopa.tasks.rng import Rng, accepts, is_held_out

_PLAIN_NAMES = ("solve", "compute", "process", "func", "answer")
# Products and cubes of long lists grow too large to be learnable or readable.
_SHORT_ONLY = frozenset(("product",))


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function without wording. Literals are parameters as Python source."""

    source: Source
    predicate: Predicate
    map: Map
    reduction: Reduction
    predicate_literal: str
    map_literal: str
    reduction_literal: str
    argument: str
    name: str
    example: str
    asserts: tuple[str, ...]

    @property
    def structure(self) -> str:
        """The parts by name, without parameters."""
        return structure_name(self.source, self.predicate, self.map, self.reduction)

    @property
    def value_type(self) -> str:
        """The type of the values that are reduced."""
        return value_type(self.source, self.map)

    @property
    def return_hint(self) -> str:
        """The type hint of the return value; empty where it would need a union."""
        reduction = self.reduction.name
        if reduction in ("first", "last"):
            return ""
        if reduction in ("list", "ascending", "descending", "reverse", "unique"):
            return f"list[{self.value_type}]"
        return {"text": "str", "any": "bool"}.get(reduction, "int")


def structure_name(source: Source, predicate: Predicate, map_: Map, reduction: Reduction) -> str:
    return f"{source.name}:{predicate.name}>{map_.name}>{reduction.name}"


def value_type(source: Source, map_: Map) -> str:
    if map_.codes:
        return map_.result
    return "int" if source.element == "int" else "str"


def is_sensible(source: Source, predicate: Predicate, map_: Map, reduction: Reduction) -> bool:
    """Whether the parts fit each other and make a function worth asking for."""
    if value_type(source, map_) not in reduction.inputs:
        return False
    if reduction.needs_plain_elements and (map_.codes or not predicate.codes):
        return False
    if not predicate.codes and not map_.codes and reduction.name == "list":
        return False
    if reduction.name == "product" and (source.name == "chars" or map_.name in ("cube", "square")):
        return False
    if predicate.name == "digit" and map_.name in ("toupper", "tolower", "swap"):
        return False
    if source.name in ("range", "digits") and (predicate.name == "negative" or map_.name == "abs"):
        return False
    return not (source.name == "range" and predicate.name in ("positive", "nonzero"))


def _fitting(element: str) -> tuple[tuple[Predicate, ...], tuple[Map, ...]]:
    return (
        tuple(p for p in PREDICATES if p.element == element),
        tuple(m for m in MAPS if m.element == element),
    )


_FITTING = {element: _fitting(element) for element in ("int", "char", "word")}
_EVERY, _SAME = PREDICATES[0], MAPS[0]

STRUCTURES: tuple[str, ...] = tuple(
    structure_name(source, predicate, map_, reduction)
    for source in SOURCES
    for predicate in (_EVERY, *_FITTING[source.element][0])
    for map_ in (_SAME, *_FITTING[source.element][1])
    for reduction in REDUCTIONS
    if is_sensible(source, predicate, map_, reduction)
)
_HELD_OUT = frozenset(name for name in STRUCTURES if is_held_out(name))


def pick_spec(rng: Rng, split: str) -> FunctionSpec:
    """Pick specs until one belongs to the split."""
    while True:
        source = rng.skewed(
            (SOURCES[0], SOURCES[3], SOURCES[4], SOURCES[1], SOURCES[5], SOURCES[2])
        )
        predicates, maps = _FITTING[source.element]
        predicate = _EVERY if rng.chance(0.12) else rng.pick(predicates)
        map_ = _SAME if rng.chance(0.3) else rng.pick(maps)
        reduction = rng.pick(REDUCTIONS)
        if not is_sensible(source, predicate, map_, reduction):
            continue
        if (structure_name(source, predicate, map_, reduction) in _HELD_OUT) != (
            split == "held-out"
        ):
            continue
        spec = _with_details(rng, split, source, predicate, map_, reduction)
        if spec is not None:
            return spec


def _with_details(
    rng: Rng, split: str, source: Source, predicate: Predicate, map_: Map, reduction: Reduction
) -> FunctionSpec | None:
    """Parameters, name and asserts, or None when the content belongs to another split."""
    keep = rng.pick(predicate.parameters) if predicate.parameters else None
    change = rng.pick(map_.parameters) if map_.parameters else None
    joint = None
    if reduction.parameters:
        joint = rng.pick(reduction.parameters[value_type(source, map_)])
    argument = rng.skewed(source.arguments)
    name = _function_name(rng, predicate, map_, reduction)
    if name == argument:
        return None

    def expected(value: Any) -> tuple[Any, int, int]:
        elements = source.listing(value)
        kept = [x for x in elements if predicate.holds(x, keep)]
        return (
            reduction.apply([map_.apply(x, change) for x in kept], joint),
            len(kept),
            len(elements),
        )

    shortest = 3 if reduction.name in _SHORT_ONLY else 4
    value = source.sample(rng, rng.between(shortest, shortest + 2))
    result, kept, _ = expected(value)
    if kept == 0:
        return None
    example = f"assert {name}({value!r}) == {result!r}"
    structure = structure_name(source, predicate, map_, reduction)
    # The example holds name, input and result; with the parameters that is the whole content.
    if not accepts(split, structure, f"{structure} {keep} {change} {joint} {argument} {example}"):
        return None
    asserts = [f"assert {name}({source.empty!r}) == {expected(source.empty)[0]!r}"]
    telling = 0
    for index in range(rng.between(3, 4)):
        for _ in range(3):
            value = source.sample(rng, shortest + index)
            if index == 1 and source.name == "list" and keep is not None:
                # The parameter itself as an element tells `<` from `<=`.
                value[rng.between(0, len(value) - 1)] = keep
            result, kept, count = expected(value)
            if 0 < kept < count or not predicate.codes:
                telling += 1
                break
        asserts.append(f"assert {name}({value!r}) == {result!r}")
    if telling < 2 and source.name != "digits":
        return None
    return FunctionSpec(
        source,
        predicate,
        map_,
        reduction,
        repr(keep),
        repr(change),
        repr(joint),
        argument,
        name,
        example,
        tuple(asserts),
    )


def _function_name(rng: Rng, predicate: Predicate, map_: Map, reduction: Reduction) -> str:
    if rng.chance(0.08):
        return rng.skewed(_PLAIN_NAMES)
    words = [rng.skewed(part.words) for part in (reduction, predicate, map_)]
    words = [word for word in words if word]
    if len(words) == 3 and rng.chance(0.3):
        del words[rng.between(0, 2)]
    if len(words) == 1:
        words.append(rng.skewed(("values", "of", "them", "all")))
    return "_".join(words)
