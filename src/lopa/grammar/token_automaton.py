"""The texts of a pattern, spelt in the tokens of a model: an automaton over classes of tokens.

Tokens that lead from every state to the same state are one class, so what is computed for a
pattern depends on its size and not on the vocabulary's. `lift` makes it from an automaton over
bytes; the decoder looks for paths through it. Nothing here knows a tokenizer or a device.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lopa.errors import ConfigError
from lopa.grammar.automaton import StateArray, distinct_columns, predecessors, too_large
from lopa.grammar.utf8 import ByteDfa
from lopa.types import BoolArray

FORBIDDEN = 0  # the class of tokens that no state allows
MAX_CELLS = 40_000_000  # states × classes of tokens
_CHUNK = 4_000_000  # cells computed at a time


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Deterministic, and every state of it can be finished: some tokens lead to an accepting one.

    The tokens that end an answer are a class of their own. From an accepting state they lead to
    `end`, which is accepting, and from `end` to `end`; nothing else leaves `end`.
    """

    class_of: StateArray  # [vocab] class of each token; the mask token is FORBIDDEN
    next: StateArray  # [states, classes]; -1: not allowed
    start: int
    accepting: BoolArray  # [states] the answer may end here
    distance: StateArray  # [states] fewest tokens from here to an accepting state
    end: int  # the state behind EOS

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process twice, it is one object there: what is made of it is kept."""
        return _received, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def states(self) -> int:
        return len(self.next)

    @property
    def classes(self) -> int:
        return int(self.next.shape[1])

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest answer, without an EOS."""
        return int(self.distance[self.start])

    def advance(self, state: int, tokens: Iterable[int]) -> int:
        """The state that `tokens` lead to from `state`; -1: they are not allowed."""
        for token in tokens:
            if state < 0:
                break
            state = int(self.next[state, self.class_of[token]])
        return state


_RECEIVED: OrderedDict[bytes, TokenAutomaton] = OrderedDict()
_MOST_RECEIVED = 16


def _received(*values: Any) -> TokenAutomaton:
    """The automaton of these fields, of those that came last the same one again."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(np.ascontiguousarray(value).data)
        digest.update(repr(np.shape(value)).encode())
    key = digest.digest()
    found = _RECEIVED.pop(key, None) or TokenAutomaton(*values)
    _RECEIVED[key] = found
    while len(_RECEIVED) > _MOST_RECEIVED:
        _RECEIVED.popitem(last=False)
    return found


@dataclass(frozen=True, eq=False)
class Spelling:
    """The bytes that each token of a vocabulary stands for; none: not known, or no text."""

    data: npt.NDArray[np.uint8]  # of all tokens, one after the other
    starts: npt.NDArray[np.int64]  # [vocab + 1] where those of each token start

    @classmethod
    def of(cls, tokens: Sequence[bytes | None]) -> Spelling:
        ends = np.cumsum([0, *(len(token or b"") for token in tokens)])
        return cls(np.frombuffer(b"".join(t or b"" for t in tokens), np.uint8), ends)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts)


def lift(
    dfa: ByteDfa,
    later: Spelling,
    first: Spelling | None = None,
    *,
    eos_ids: Collection[int],
    forbidden: Collection[int] = (),
) -> TokenAutomaton:
    """The automaton of the same texts over tokens.

    later, first: the tokens' bytes, and those at the start of an answer where they differ: some
    tokenizers drop a leading space there. forbidden: tokens not to be used, beside those without
    bytes. ConfigError if no text can be spelt.
    """
    usable = later.lengths > 0
    usable[[token for token in (*eos_ids, *forbidden) if token < len(usable)]] = False
    ids, vectors = _vectors(dfa, later, usable)
    class_of, table = ids, vectors.T
    start, accepting = 0, dfa.accepting
    if first is not None:
        # A state of its own, to which nothing leads back.
        begin = np.where(usable, _walk(dfa, first), -1)
        pairs, class_of = np.unique(np.stack([ids, begin]), axis=1, return_inverse=True)
        class_of = class_of.reshape(-1)
        table = np.vstack([table[:, pairs[0]], pairs[1].astype(np.int16)])
        start, accepting = len(dfa.next), np.append(accepting, accepting[0])
    return _finished(table, class_of, start, accepting, eos_ids)


def _vectors(
    dfa: ByteDfa, tokens: Spelling, usable: BoolArray
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
    """Where each token leads from every state: [tokens] which vector, [vectors, states] those.

    All tokens take a byte at a time. Few of the vectors differ, so what is computed is a step from
    each vector with each class of bytes that comes, and not the tokens one by one. Vector 0: from
    no state.
    """
    states, classes = dfa.next.shape
    step = np.pad(dfa.next.astype(np.int16), ((0, 1), (0, 0)), constant_values=-1)
    nowhere, here = np.full(states, -1, np.int16), np.arange(states, dtype=np.int16)
    known = {nowhere.tobytes(): 0, here.tobytes(): 1}
    vectors = [nowhere, here]
    found = np.zeros(len(usable), np.int64)
    active = np.nonzero(usable)[0]
    vector = np.ones(len(active), np.int64)
    lengths, depth = tokens.lengths, 0
    while len(active):
        byte = tokens.data[tokens.starts[active] + depth]
        keys, of_key = np.unique(vector * classes + dfa.class_of[byte], return_inverse=True)
        reached = np.empty(len(keys), np.int64)
        for low in range(0, len(keys), chunk := max(1, _CHUNK // states)):
            sources, column = np.divmod(keys[low : low + chunk], classes)
            rows = step[np.stack([vectors[v] for v in sources]), column[:, None]]
            for index, row in enumerate(rows, start=low):
                number = known.setdefault(row.tobytes(), len(vectors))
                if number == len(vectors):
                    if number * states > MAX_CELLS:
                        raise too_large(f"more than {MAX_CELLS} states × classes of tokens")
                    vectors.append(row)
                reached[index] = number
        vector = reached[of_key.reshape(-1)]
        depth += 1
        ends = lengths[active] == depth
        found[active[ends]] = vector[ends]
        going_on = ~ends & (vector != 0)
        active, vector = active[going_on], vector[going_on]
    used, of_used = np.unique(np.append(found, 0), return_inverse=True)
    return of_used.reshape(-1)[:-1], np.stack([vectors[v] for v in used])


def _walk(dfa: ByteDfa, tokens: Spelling) -> npt.NDArray[np.int64]:
    """[tokens] where each leads from the start."""
    step = np.pad(dfa.next, ((0, 1), (0, 0)), constant_values=-1)
    state = np.zeros(len(tokens.lengths), np.int64)
    for depth in range(int(tokens.lengths.max(initial=0))):
        active = np.nonzero(tokens.lengths > depth)[0]
        byte = tokens.data[tokens.starts[active] + depth]
        state[active] = step[state[active], dfa.class_of[byte]]
    return state


def _finished(
    table: npt.NDArray[np.int16],
    class_of: npt.NDArray[np.int64],
    start: int,
    accepting: BoolArray,
    eos_ids: Collection[int],
) -> TokenAutomaton:
    """Without states and classes that lead nowhere, and with EOS."""
    distance = distances(table, accepting)
    if distance[start] < 0:
        raise ConfigError("the model's tokens cannot spell any text of the pattern: change it")
    table = np.where(distance[table] >= 0, table, -1)  # row -1 is asked for too, and left as it is
    order, seen = [start], {start}
    for state in order:
        for target in np.unique(table[state]).tolist():
            if target >= 0 and target not in seen:
                seen.add(target)
                order.append(target)
    kept = np.array(order)
    number = np.full(len(table) + 1, -1, np.int32)
    number[kept] = np.arange(len(kept))
    columns, of_class = distinct_columns(number[table[kept]])
    dead = np.nonzero((columns < 0).all(axis=0))[0]
    # Class 0 leads nowhere; EOS is the last one.
    alive = [column for column in range(columns.shape[1]) if column not in dead]
    renumbered = np.zeros(columns.shape[1], np.int32)
    renumbered[alive] = np.arange(1, len(alive) + 1)
    end, eos = len(kept), len(alive) + 1
    following = np.full((end + 1, eos + 1), -1, np.int32)
    following[:end, 1:eos] = columns[:, alive]
    ends = np.append(accepting[kept], True)
    following[ends, eos] = end
    classes = renumbered[of_class[class_of]]
    classes[[token for token in eos_ids if token < len(classes)]] = eos
    return TokenAutomaton(
        class_of=classes,
        next=following,
        start=0,
        accepting=ends,
        distance=np.append(distance[kept], 0).astype(np.int32),
        end=end,
    )


def distances(table: npt.NDArray[np.signedinteger], accepting: BoolArray) -> StateArray:
    """[states] fewest steps from each state to an accepting one; -1: there is no way."""
    sources, begins = predecessors(table)
    found = np.where(accepting, 0, -1).astype(np.int32)
    edge, steps = np.nonzero(accepting)[0], 0
    while len(edge):
        steps += 1
        before = np.concatenate([sources[begins[state] : begins[state + 1]] for state in edge])
        edge = np.unique(before[found[before] < 0])
        found[edge] = steps
    return found
