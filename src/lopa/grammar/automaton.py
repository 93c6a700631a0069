"""Automata over characters: built as an `Nfa`, used as a minimal `Dfa`.

Work is counted and not timed, so a pattern that is too large is refused after the same steps
everywhere. The limits are such that this takes well under a second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from lopa.errors import ConfigError
from lopa.grammar import charset
from lopa.grammar.charset import CharSet
from lopa.types import BoolArray

StateArray = npt.NDArray[np.int32]

MAX_NFA_STATES = 20_000
MAX_STATES = 10_000  # of a Dfa
MAX_WORK = 250_000  # steps of making automata, one or two microseconds each


def too_large(what: str) -> ConfigError:
    return ConfigError(
        f"the pattern is too large ({what}): use smaller counts and lengths, fewer alternatives, "
        "or less nesting"
    )


class _Work(threading.local):
    steps = 0


_work = _Work()


def begin_work() -> None:
    """A pattern is compiled from here on: its parts have MAX_WORK together, in this thread."""
    _work.steps = 0


def spend(steps: int) -> None:
    _work.steps += steps
    if _work.steps > MAX_WORK:
        raise too_large("it takes too long to build")


class Nfa:
    """States are numbers; a part is built from a state on, and gives the state it ends in."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[CharSet, int]]] = []
        self.skips: list[list[int]] = []
        self.at_start: dict[int, list[int]] = {}  # taken only before the first character
        self.at_end: dict[int, list[int]] = {}  # taken only behind the last one

    def state(self) -> int:
        if len(self.edges) >= MAX_NFA_STATES:
            raise too_large(f"more than {MAX_NFA_STATES} states")
        self.edges.append([])
        self.skips.append([])
        return len(self.edges) - 1

    def skip(self, source: int, target: int) -> None:
        self.skips[source].append(target)

    def char(self, source: int, chars: CharSet, target: int | None = None) -> int:
        """One of `chars`; none at all where it is empty."""
        target = self.state() if target is None else target
        if chars:
            self.edges[source].append((chars, target))
        return target

    def text(self, source: int, text: str) -> int:
        for point in map(ord, text):
            source = self.char(source, ((point, point),))
        return source

    def any_of(self, source: int, parts: Iterable[Callable[[int], int]]) -> int:
        target = self.state()
        for part in parts:
            inner = self.state()
            self.skip(source, inner)
            self.skip(part(inner), target)
        return target

    def repeat(self, source: int, part: Callable[[int], int], least: int, most: int | None) -> int:
        if most is not None and most < least:
            return self.state()  # to which nothing leads
        if least > MAX_NFA_STATES or (most is not None and most > MAX_NFA_STATES):
            raise too_large(f"a part repeated {least if most is None else most} times")
        for _ in range(least):
            source = part(source)
        if most is None:
            head = self.state()
            self.skip(source, head)
            self.skip(part(head), head)
            return head
        target = self.state()
        self.skip(source, target)
        for _ in range(most - least):
            source = part(source)
            self.skip(source, target)
        return target

    def embed(self, source: int, dfa: Dfa) -> int:
        """A text of `dfa`."""
        states = [self.state() for _ in range(len(dfa.next))]
        target = self.state()
        self.skip(source, states[0])
        for state, inner in enumerate(states):
            for chars, following in dfa.moves(state):
                self.char(inner, chars, states[following])
            if dfa.accepting[state]:
                self.skip(inner, target)
        return target


@dataclass(frozen=True, eq=False)
class Dfa:
    """Minimal. State 0 is the start; every state is on the way to an accepting one."""

    classes: tuple[CharSet, ...]  # disjoint: what its states tell apart
    next: StateArray  # [states, classes]; -1: not allowed
    accepting: BoolArray  # [states]

    @property
    def is_empty(self) -> bool:
        """Whether no text is accepted."""
        return not self.accepting.any()

    def moves(self, state: int) -> Iterator[tuple[CharSet, int]]:
        """The characters that lead to each of the following states."""
        spend(4)
        found: dict[int, list[CharSet]] = {}
        for chars, target in zip(self.classes, self.next[state].tolist(), strict=True):
            if target >= 0:
                found.setdefault(target, []).append(chars)
        for target, sets in found.items():
            yield sets[0] if len(sets) == 1 else charset.union(chain(*sets)), target

    def accepts(self, text: str) -> bool:
        state = 0
        for character in map(ord, text):
            held = (i for i, c in enumerate(self.classes) if any(a <= character <= b for a, b in c))
            found = next(held, None)
            state = -1 if found is None else int(self.next[state, found])
            if state < 0:
                return False
        return bool(self.accepting[state])


NOTHING = Dfa((), np.zeros((1, 0), np.int32), np.zeros(1, np.bool_))


def partition(sets: Sequence[CharSet]) -> tuple[list[CharSet], list[list[int]]]:
    """Disjoint classes, and of each set the classes that make it up."""
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[int]] = {}
    for index, chars in enumerate(sets):
        for low, high in chars:
            opens.setdefault(low, []).append(index)
            closes.setdefault(high + 1, []).append(index)
    ranges: dict[frozenset[int], list[tuple[int, int]]] = {}
    held: set[int] = set()
    for point, following in pairwise(sorted({*opens, *closes})):
        held.difference_update(closes.get(point, ()))
        held.update(opens.get(point, ()))
        if held:
            ranges.setdefault(frozenset(held), []).append((point, following - 1))
    members: list[list[int]] = [[] for _ in sets]
    for number, holders in enumerate(ranges):
        for index in holders:
            members[index].append(number)
    return [charset.union(found) for found in ranges.values()], members


def determinize(nfa: Nfa, start: int, end: int) -> Dfa:
    """The minimal automaton of the texts that lead from `start` to `end`."""
    numbers: dict[CharSet, int] = {}
    edges = [
        [(numbers.setdefault(chars, len(numbers)), target) for chars, target in row]
        for row in nfa.edges
    ]
    classes, members = partition(list(numbers))

    def reach(sources: Iterable[int], *also: dict[int, list[int]]) -> set[int]:
        """States that `sources` lead to without a character."""
        seen = set(sources)
        stack = list(seen)
        while stack:
            state = stack.pop()
            targets = nfa.skips[state]
            for more in also:
                targets = targets + more.get(state, [])
            for target in targets:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        spend(len(seen))
        return seen

    finishing = {end}  # states from which the end can be reached without a character
    if nfa.at_end:
        finishing = {s for s in range(len(edges)) if end in reach([s], nfa.at_end)}

    def subset(states: Iterable[int]) -> frozenset[int]:
        """Only states with edges, and those that finish, tell sets of states apart."""
        return frozenset(s for s in states if edges[s] or s in finishing)

    groups_of: dict[frozenset[int], list[tuple[list[int], npt.NDArray[np.intp]]]] = {}

    def groups(used: frozenset[int]) -> list[tuple[list[int], npt.NDArray[np.intp]]]:
        """Sets of characters that hold the same classes, and those classes."""
        if used not in groups_of:
            holders: dict[int, list[int]] = {}
            for number in used:
                for member in members[number]:
                    holders.setdefault(member, []).append(number)
            spend(len(holders))
            gathered: dict[tuple[int, ...], list[int]] = {}
            for member, holding in holders.items():
                gathered.setdefault(tuple(holding), []).append(member)
            groups_of[used] = [(list(h), np.array(m)) for h, m in gathered.items()]
        return groups_of[used]

    accepts_nothing = end in reach([start], nfa.at_start, nfa.at_end)
    # By its states and whether it accepts: the first one may stand apart from an equal set.
    known = {(subset(reach([start], nfa.at_start)), accepts_nothing): 0}
    queue = list(known)
    rows: list[StateArray] = []
    number_of: dict[frozenset[int], int] = {}  # by what the characters lead to
    for states, _ in queue:
        targets: dict[int, set[int]] = {}
        for state in states:
            for chars, target in edges[state]:
                targets.setdefault(chars, set()).add(target)
        spend(len(states))
        row = np.full(len(classes), -1, np.int32)
        for holding, found in groups(frozenset(targets)):
            led_to = frozenset().union(*(targets[chars] for chars in holding))
            if led_to not in number_of:
                reached = subset(reach(led_to))
                key = reached, not finishing.isdisjoint(reached)
                if key not in known:
                    if len(known) >= MAX_STATES:
                        raise too_large(f"more than {MAX_STATES} states")
                    known[key] = len(known)
                    queue.append(key)
                number_of[led_to] = known[key]
            row[found] = number_of[led_to]
        rows.append(row)
    table = np.stack(rows) if classes else np.zeros((len(rows), 0), np.int32)
    return minimize(tuple(classes), table, np.array([accepts for _, accepts in queue]))


def minimize(classes: tuple[CharSet, ...], table: StateArray, accepting: BoolArray) -> Dfa:
    """Drop what leads nowhere, then merge states that no text tells apart. State 0 starts."""
    table = np.where(useful(table, accepting)[table] & (table >= 0), table, -1).astype(np.int32)
    block = blocks(table, accepting)
    # Numbered as they are first met from the start.
    order, queue = {int(block[0]): 0}, [0]
    for state in queue:
        for target in table[state][table[state] >= 0].tolist():
            if int(block[target]) not in order:
                order[int(block[target])] = len(order)
                queue.append(target)
    renumbered = np.full(int(block.max()) + 1, -1, np.int32)
    for old, new in order.items():
        renumbered[old] = new
    mapped = np.append(renumbered[block], np.int32(-1))
    following = mapped[table[queue]]
    # Classes that no state tells apart any more are one; those that lead nowhere are none.
    columns, inverse = distinct_columns(following)
    merged = [
        charset.union(r for i in np.nonzero(inverse == column)[0] for r in classes[i])
        for column in range(columns.shape[1])
    ]
    kept = [i for i in range(len(merged)) if (columns[:, i] >= 0).any()]
    return Dfa(tuple(merged[i] for i in kept), columns[:, kept], accepting[queue])


def distinct_columns(table: StateArray) -> tuple[StateArray, StateArray]:
    """The columns that differ, in the order they come, and of each column which of them it is."""
    known: dict[bytes, int] = {}
    index = [known.setdefault(column, len(known)) for column in as_bytes(table.T)]
    first = [index.index(number) for number in range(len(known))]
    return np.ascontiguousarray(table[:, first]), np.array(index, np.int32)


def as_bytes(table: npt.NDArray[np.int32]) -> list[bytes]:
    """Each row, to be compared as a whole."""
    width = table.itemsize * table.shape[1]
    if not width:
        return [b""] * len(table)
    found: list[bytes] = np.ascontiguousarray(table).view(f"V{width}").ravel().tolist()
    return found


def predecessors(table: StateArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Sources of edges by target, and [states + 1] where those of each target begin."""
    sources, columns = np.nonzero(table >= 0)
    pairs = np.unique(table[sources, columns].astype(np.int64) * len(table) + sources)
    targets, sources = np.divmod(pairs, len(table))
    return sources, np.searchsorted(targets, np.arange(len(table) + 1))


def useful(table: StateArray, accepting: BoolArray) -> BoolArray:
    """[states] whether an accepting state can be reached."""
    sources, begins = predecessors(table)
    found = accepting.copy()
    edge = np.nonzero(found)[0]
    while len(edge):
        before = np.unique(np.concatenate([sources[begins[s] : begins[s + 1]] for s in edge]))
        edge = before[~found[before]]
        found[edge] = True
    return found


def blocks(table: StateArray, accepting: BoolArray) -> npt.NDArray[np.int32]:
    """[states] block of each state; states of one block accept the same texts.

    A block is split as soon as states of it lead to different blocks. Its largest part keeps the
    number, so a state is looked at again only O(log states) times for each that it leads to.
    """
    states = len(table)
    sources, begins = predecessors(table)
    block = np.append(accepting.astype(np.int32), np.int32(-1))  # the last: no state at all
    count = 2
    sizes = {0: int((~accepting).sum()), 1: int(accepting.sum())}
    affected = np.arange(states)
    while len(affected):
        spend(4 * len(affected))
        groups: dict[int, dict[bytes, list[int]]] = {}
        led_to = as_bytes(block[table[affected]])
        for state, number, row in zip(
            affected.tolist(), block[affected].tolist(), led_to, strict=True
        ):
            groups.setdefault(number, {}).setdefault(row, []).append(state)
        changed: list[int] = []
        for number, parts in groups.items():
            found = sorted(parts.values(), key=len)
            rest = sizes[number] - sum(map(len, found))  # they lead where they led before
            if not rest:
                found.pop()
            elif rest < len(found[-1]):
                looked_at = np.concatenate(found)
                found[-1] = np.setdiff1d(np.nonzero(block[:-1] == number)[0], looked_at).tolist()
            for part in found:
                block[part] = count
                sizes[count] = len(part)
                sizes[number] -= len(part)
                count += 1
                changed += part
        before = [sources[begins[state] : begins[state + 1]] for state in changed]
        affected = np.unique(np.concatenate(before)) if before else np.empty(0, np.int64)
    return block[:-1]


def combine(a: Dfa, b: Dfa, accepts: Callable[[bool, bool], bool]) -> Dfa:
    """The texts whose being in `a` and in `b` is as `accepts` says (never of neither)."""
    classes, members = partition([*a.classes, *b.classes])
    step = []
    for dfa, held in ((a, members[: len(a.classes)]), (b, members[len(a.classes) :])):
        # One more state and one more class, from which there is no way on.
        column = np.full(len(classes), len(dfa.classes))
        for number, made_of in enumerate(held):
            column[made_of] = number
        step.append(np.pad(dfa.next, ((0, 1), (0, 1)), constant_values=-1)[:, column])
    known = {(0, 0): 0}
    queue = [(0, 0)]
    rows = []
    for left, right in queue:
        spend(4 + len(classes))
        row = []
        for pair in zip(step[0][left].tolist(), step[1][right].tolist(), strict=True):
            if pair == (-1, -1):
                row.append(-1)
                continue
            if pair not in known:
                if len(known) >= 2 * MAX_STATES:
                    raise too_large(f"more than {2 * MAX_STATES} states")
                known[pair] = len(known)
                queue.append(pair)
            row.append(known[pair])
        rows.append(row)
    ends = [np.append(dfa.accepting, False) for dfa in (a, b)]
    accepting = np.array([accepts(bool(ends[0][s]), bool(ends[1][t])) for s, t in queue])
    table = np.array(rows, np.int32).reshape(len(rows), len(classes))
    return minimize(tuple(classes), table, accepting)


def both(a: Dfa, b: Dfa) -> Dfa:
    return combine(a, b, lambda left, right: left and right)


def without(a: Dfa, b: Dfa) -> Dfa:
    """The texts of `a` that are none of `b`."""
    return combine(a, b, lambda left, right: left and not right)


def only(dfa: Dfa, chars: CharSet) -> Dfa:
    """The texts that are made of `chars` alone."""
    kept = [charset.intersection(c, chars) for c in dfa.classes]
    held = [i for i, c in enumerate(kept) if c]
    return minimize(tuple(kept[i] for i in held), dfa.next[:, held], dfa.accepting)
