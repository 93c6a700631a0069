"""LoPA and D2F as the specification tells them, branch by branch, with lists and dictionaries.

Slow and literal on purpose: the vectorised decoder is checked against it on random statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

# (round, tokens of the row, position) → (token, max_prob, ranking)
StatsOf = Callable[[int, tuple[int, ...], int], tuple[int, float, float]]


@dataclass
class PlainBlock:
    start: int
    end: int
    state: str  # active, to_cache, in_cache
    full: bool  # fully activated


@dataclass
class PlainBranch:
    tokens: list[int]
    blocks: list[PlainBlock]
    eos: bool = False
    creation: float = 1.0


@dataclass
class PlainRun:
    tokens: list[int]
    winners: list[int] = field(default_factory=list)
    fills: list[list[tuple[int, int]]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)


def plain_lopa(
    prompt: list[int],
    stats_of: StatsOf,
    *,
    mask: int,
    eos: int,
    size: int,
    new: int,
    append_at: float,
    activate_at: float,
    threshold: float,
    branches: int,
    floor: float = 0.0,
) -> PlainRun:
    start = PlainBlock(0, len(prompt), "to_cache", True)
    rows = [PlainBranch(list(prompt), [start])]  # lookaheads in rank order, the anchor last
    run = PlainRun([])

    def masks(row: PlainBranch, block: PlainBlock) -> list[int]:
        return [p for p in range(block.start, block.end) if row.tokens[p] == mask]

    def decoded(row: PlainBranch, block: PlainBlock) -> float:
        if block.start == 0:
            return 1.0
        size = block.end - block.start
        return (size - len(masks(row, block))) / size

    for index in range(1, 10**6):
        for row in rows:
            last = row.blocks[-1]
            room = len(row.blocks) - 1 < new // size
            if room and not row.eos and decoded(row, last) >= append_at:
                row.blocks.append(PlainBlock(last.end, last.end + size, "active", False))
                row.tokens += [mask] * size
            for left, right in zip(row.blocks, row.blocks[1:], strict=False):
                if decoded(row, left) >= activate_at:
                    right.full = True
        anchor = rows[-1]
        if mask not in anchor.tokens and all(b.state != "active" for b in anchor.blocks):
            run.tokens = anchor.tokens[len(prompt) :]
            return run
        commit = sum(b.end - b.start for b in anchor.blocks if b.state == "to_cache")
        run.commits.append(commit)

        seen = []
        for row in rows:
            key = tuple(row.tokens)
            active = [b for b in row.blocks if b.state == "active"]
            seen.append({p: stats_of(index, key, p) for b in active for p in masks(row, b)})
        scores = [sum(s[2] for s in of.values()) / len(of) if of else 1.0 for of in seen]
        winner = scores.index(max(scores))
        run.winners.append(winner)
        row, of = rows[winner], seen[winner]

        fills = []
        for block in (b for b in row.blocks if b.state == "active"):
            here = masks(row, block)
            chosen = [p for p in here if of[p][1] > threshold]
            if not chosen and here and block.full:
                chosen = [max(here, key=lambda p: (of[p][2], -p))]
            fills += [(p, of[p][0]) for p in chosen]
        for position, token in fills:
            row.tokens[position] = token
            row.eos = row.eos or token == eos
        run.fills.append(fills)

        left = [p for b in row.blocks if b.state == "active" for p in masks(row, b)]
        left = [p for p in left if of[p][1] >= floor]
        ranked = sorted(left, key=lambda p: (-of[p][2], p))[:branches]
        for block in row.blocks:
            if block.state == "to_cache":
                block.state = "in_cache"
            elif block.state == "active":
                if masks(row, block):
                    break
                block.state = "to_cache"
        rows = []
        for position in ranked:
            branch = copy.deepcopy(row)
            branch.tokens[position] = of[position][0]
            branch.eos = branch.eos or of[position][0] == eos
            rows.append(branch)
        rows.append(row)
    raise AssertionError("the plain loop did not end")
