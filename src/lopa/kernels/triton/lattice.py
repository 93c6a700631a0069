"""Answers that have to fit an automaton, without leaving the device.

The same as `lopa.runner.lattice` in fp32: weights of bundles from logits (`bundle_weights`), the
passes over the lattice (a program for each row and pass), the walk along the best path (a program a
row), and the statistics of each mask. Every position's numbers are relative to its largest, so that
they keep their precision along a row.

A step of a pass reads the values of all states before it and writes those behind it. The states are
nodes of few inputs each: one with more transitions than that takes partial sums as inputs, which
are nodes of their own. So a step is as long as its tiles of nodes, whatever the largest degree, and
tiles that a row cannot reach at a position are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa.kernels.triton.bundle_weights import (
    GROUPS,
    LEAST,
    NARROW,
    NOTHING,
    SIZES,
    WIDE,
    Chunks,
    Groups,
    _bundle_weights,
    _class_scores,
)

ONWARD = 32  # transitions of a state that the walk reads at once


class Tiling(NamedTuple):
    # Of the passes; a lane a thread
    lanes: int = 256  # nodes a tile
    inputs: int = 8  # of a node at most
    # Of the classes' scores
    chunk: int = 2048  # tokens of a wide class that a program reads at once
    positions: int = 4  # a program's: it reads which tokens these are once for all
    chunk_warps: int = 4
    # Of the statistics
    states: int = 8  # whose ways on are read at once
    statistics_warps: int = 4


class Nodes(NamedTuple):
    """States, and partial sums behind them, in tiles: int32, on the device."""

    # A phase's nodes have inputs of earlier phases alone. A node's state is itself, or what it is a
    # partial sum of.
    begin: Tensor  # [phases, states] its first tile with nodes of this state or of later ones
    end: Tensor  # [phases, depths] end of its tiles with nodes of states of at most this depth
    own: Tensor  # [tiles, lanes]; -1: none
    other: Tensor  # [tiles, inputs, lanes] where an input comes from
    bundle: Tensor  # [the same]; -1: none


class Tables(NamedTuple):
    """An automaton on the device."""

    tiling: Tiling
    classes: Groups  # of tokens
    chunks: Chunks  # of the tokens of wide classes
    bundles: Groups  # of classes
    class_of: Tensor  # [vocab] int32
    following: Tensor  # [states, classes] int32
    distance: Tensor  # [size] int32: of states; 0: of partial sums
    depth: Tensor  # [states] int32: fewest tokens from the start
    lowest: Tensor  # [states] int32: before it there is no state that can be reached from this one
    members: Tensor  # [classes, bundles + 1] int8: whether a bundle has a class; the last has all
    to: Nodes  # inputs: transitions that lead to a state
    out_of: Nodes  # and those that come from it
    begin: Tensor  # [states + 1] int32: the first transition of each state
    target: Tensor  # [transitions] int32
    bundle: Tensor  # [transitions] int32


class LatticeRows(NamedTuple):
    """int32, on the device."""

    slot: Tensor  # [R, L] mask number; -1 - class: filled
    row: Tensor  # [R, 3] positions, state, tokens left from the first position on


@triton.jit
def _pass(
    weights,  # [L, 2, width] of the row, from the part on that is added up
    values,  # [L + 1, size] the result
    scale,  # [L + 1] the largest value at each position
    distance, count, left, depth, lowest, states, size, width,
    begins, ends, owns, others, bundles, phases, depths,
    back,  # 1: from right to left; 0: from left to right
    SUM: tl.constexpr,  # of exp, in logarithms; else the largest
    LANES: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, LANES)
    most = tl.zeros((), tl.float32)
    for j in range(count):
        i = back * (count - 1) + (1 - 2 * back) * j
        here, there = i + back, i + 1 - back
        budget = tl.maximum(left - there, 0)
        if SUM:
            tl.store(scale + here, most)
        step = weights + i * 2 * width
        top = tl.full([LANES], NOTHING, tl.float32)
        reached = tl.minimum(depth + there, depths - 1)
        for phase in range(phases):
            begin = tl.load(begins + phase * states + lowest)
            end = tl.load(ends + phase * depths + reached)
            tl.debug_barrier()  # what is read was written by other threads
            for tile in range(begin, end):
                inputs = ()
                high = tl.full([LANES], NOTHING, tl.float32)
                for k in tl.static_range(INPUTS):
                    at = (tile * INPUTS + k) * LANES + lanes
                    bundle = tl.load(bundles + at)
                    source = here * size + tl.load(others + at)
                    x = tl.load(values + source, mask=bundle >= 0, other=NOTHING)
                    x += tl.load(step + bundle, mask=bundle >= 0, other=NOTHING)
                    high = tl.maximum(high, x)
                    inputs = inputs + (x,)  # noqa: RUF005 (which Triton cannot compile)
                own = tl.load(owns + tile * LANES + lanes)
                far = tl.load(distance + own, mask=own >= 0, other=0x7FFFFFF)
                fits = (far <= budget) & (high > 0.5 * NOTHING)
                if SUM:
                    total = tl.zeros([LANES], tl.float32)
                    for k in tl.static_range(INPUTS):
                        total += tl.exp(inputs[k] - high)
                    high += tl.log(tl.maximum(total, 1e-30))
                is_state = own < states
                value = tl.where(fits, high - tl.where(is_state, most, 0.0), NOTHING)
                to = tl.where(is_state, there, here) * size + own
                tl.store(values + to, value, mask=own >= 0)
                top = tl.maximum(top, tl.where(is_state, value, NOTHING))
        most = tl.max(top, 0)


@triton.jit(do_not_specialize=SIZES)
def _passes(
    rows, weights, distance, depth_of, lowest_of,
    to_begin, to_end, to_own, to_other, to_bundle, to_phases,
    out_begin, out_end, out_own, out_other, out_bundle, out_phases,
    # [R, 3, L + 1, size]: log sums over the paths to a state, log sums over those from it on, and
    # the best sum of keys from it on; nothing where it cannot be reached
    values,
    scale,  # [R, 2, L + 1] the largest of the first and the second at each position
    length, states, depths, size, width,
    LANES: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, state = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    left = tl.load(rows + row * 3 + 2)
    weights += row * length * 2 * width
    values += (row * 3 + which) * (length + 1) * size
    scale += (row * 2 + which) * (length + 1)
    for first in range(0, states, LANES):  # the values where a pass begins
        every = first + tl.arange(0, LANES)
        if which == 0:
            tl.store(values + every, tl.where(every == state, 0.0, NOTHING), mask=every < states)
        else:
            far = tl.load(distance + every, mask=every < states, other=0x7FFFFFF)
            last = tl.where(far <= tl.maximum(left - count, 0), 0.0, NOTHING)
            tl.store(values + count * size + every, last, mask=every < states)
    depth, lowest = tl.load(depth_of + state), tl.load(lowest_of + state)
    begins, ends, phases = to_begin, to_end, to_phases
    owns, others, bundles = to_own, to_other, to_bundle
    if which > 0:
        begins, ends, phases = out_begin, out_end, out_phases
        owns, others, bundles = out_own, out_other, out_bundle
    back = (which > 0).to(tl.int32)
    if which < 2:
        _pass(
            weights + width, values, scale, distance, count, left, depth, lowest, states, size,
            width, begins, ends, owns, others, bundles, phases, depths,
            back, True, LANES, INPUTS,
        )  # fmt: skip
    else:
        _pass(
            weights, values, scale, distance, count, left, depth, lowest, states, size,
            width, begins, ends, owns, others, bundles, phases, depths,
            back, False, LANES, INPUTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _walk(
    slots, rows, weights, best, begins, targets, bundles, values,
    found,  # [N] int32: the token of each mask on the best path
    length, size, width, ONWARD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count, state = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    slots += row * length
    weights += row * length * 2 * width
    best += row * length * width
    values += (row * 3 + 2) * (length + 1) * size
    lane = tl.arange(0, ONWARD)
    for i in range(count):
        begin, end = tl.load(begins + state), tl.load(begins + state + 1)
        most = tl.full([ONWARD], 2.0 * NOTHING, tl.float32)
        token = tl.full([ONWARD], 0x7FFFFFFF, tl.int32)
        to = tl.full([ONWARD], 0, tl.int32) + state
        for first in range(begin, end, ONWARD):
            live = first + lane < end
            target = tl.load(targets + first + lane, mask=live, other=0)
            bundle = tl.load(bundles + first + lane, mask=live, other=0)
            key = tl.load(weights + i * 2 * width + bundle, mask=live, other=NOTHING)
            own = tl.load(best + i * width + bundle, mask=live, other=0x7FFFFFFF)
            x = key + tl.load(values + (i + 1) * size + target, mask=live, other=NOTHING)
            is_better = (x > most) | ((x == most) & (own < token))  # of equals the lowest token
            most = tl.where(is_better, x, most)
            token = tl.where(is_better, own, token)
            to = tl.where(is_better, target, to)
        is_best = most == tl.max(most, 0)
        chosen = tl.min(tl.where(is_best, token, 0x7FFFFFFF), 0)
        # Where nothing is a number, there is no token: any will do.
        state = tl.max(tl.where(is_best & (token == chosen), to, 0), 0)
        slot = tl.load(slots + i)
        tl.store(found + slot, tl.where(chosen == 0x7FFFFFFF, 0, chosen), mask=slot >= 0)


@triton.jit(do_not_specialize=SIZES)
def _statistics(
    slots, rows, settings, scores, tops, class_of, following, values, scale, found,
    out,  # [3, count] at column `at` + n, as in the confidence kernel
    count, length, states, size, classes, columns, at,
    STATES: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program a position."""
    row = tl.program_id(0).to(tl.int64) // length
    i = tl.program_id(0) % length
    slot = tl.load(slots + tl.program_id(0))
    if (i >= tl.load(rows + row * 3)) | (slot < 0):
        return
    n = slot.to(tl.int64)
    before = values + (row * 3 * (length + 1) + i) * size
    behind = before + (length + 1) * size
    onward = behind + size
    high_b = tl.load(scale + (row * 2 + 1) * (length + 1) + i + 1)
    top_mass = tl.load(tops + n)
    state = tl.arange(0, STATES)
    inside = state < states
    a = tl.load(before + state, mask=inside, other=NOTHING)
    both = tl.maximum(a + tl.load(behind + state, mask=inside, other=NOTHING), NOTHING)
    top = tl.max(both, 0)
    total = top + tl.log(tl.sum(tl.exp(both - top), 0)) + high_b
    token = tl.load(found + n)
    move = tl.load(class_of + token)
    reached = tl.load(following + state * classes + move, mask=inside, other=-1)
    c = tl.load(onward + reached, mask=reached >= 0, other=NOTHING)
    around = tl.maximum(a + c, NOTHING)
    top = tl.max(around, 0)
    around_sum = top + tl.log(tl.sum(tl.exp(around - top), 0))
    place = scores + n * 4 * columns
    logit = tl.maximum(tl.load(place + columns + move) - top_mass, LEAST)
    probability = tl.exp(tl.minimum(logit + around_sum - total, 0.0)) + 0.0 * top_mass
    confidence = probability
    if tl.load(settings + n * 4 + 3) == 2:
        high_a = tl.max(a, 0)
        confidence = 0.0 * probability
        for first in range(0, classes, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            paths = tl.zeros([BLOCK], tl.float32)
            for s in range(0, states, AT_ONCE):
                several = s + tl.arange(0, AT_ONCE)
                start = tl.load(before + several, mask=several < states, other=NOTHING)
                start = tl.where(several < states, start - high_a, NOTHING)
                if tl.max(start, 0) > -80.0:
                    live = (start > -80.0)[:, None] & (lane < classes)[None, :]
                    place_of = following + several[:, None] * classes + lane[None, :]
                    to = tl.load(place_of, mask=live, other=-1)
                    rest = tl.load(onward + to, mask=to >= 0, other=NOTHING) - high_b
                    paths += tl.sum(tl.exp(start[:, None] + tl.maximum(rest, -1e4)), 0)
            live = (paths > 0) & (lane < classes) & (lane > 0)
            factor = tl.log(tl.where(live, paths, 1.0)) + high_a + high_b - total
            mass = tl.load(place + 2 * columns + lane, mask=live, other=NOTHING) - top_mass
            mean = tl.load(place + 3 * columns + lane, mask=live, other=0.0) - top_mass
            mass, mean = tl.maximum(mass, LEAST), tl.maximum(mean, LEAST)
            chance = tl.where(live, tl.exp(tl.minimum(mass + factor, 0.0)), 0.0)
            confidence += tl.sum(chance * tl.where(live, mean + factor, 0.0), 0)
        confidence = tl.minimum(confidence, 0.0) + 0.0 * top_mass
    tl.store(out + at + n, token)
    tl.store(out + count + at + n, probability.to(tl.int32, bitcast=True))
    tl.store(out + 2 * count + at + n, confidence.to(tl.int32, bitcast=True))


def _pieces(sizes: list[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Of one allocation, which takes the host less than several, at addresses that 16 divides."""
    padded = [-(-size // 32) * 32 for size in sizes]
    return torch.empty(sum(padded), dtype=dtype, device=device).split(padded)


class LatticeWork:
    """The kernels of a call, one after the other."""

    def __init__(
        self,
        logits: Tensor,  # [N, vocab] of the wanted positions of some plans with one automaton
        settings: Tensor,  # [N, 4] int64, temperature [N] fp32: as for `confidence`
        temperature: Tensor,
        tables: Tables,
        rows: LatticeRows,  # of the same plans
        *,
        sampling: bool,
    ) -> None:
        self.logits, self.settings, self.temperature = logits, settings, temperature
        self.tables, self.rows, self.sampling = tables, rows, sampling
        self.states, self.classes = tables.following.shape
        self.columns = self.classes + tables.chunks.count
        self.number, self.length = rows.slot.shape
        self.size, self.width = len(tables.distance), tables.members.shape[1]
        # Few sizes, so that few kernels are compiled
        self.wide_classes = max(512, triton.next_power_of_2(self.classes))
        count, (positions, width) = len(logits), (rows.slot.numel(), self.width)
        ends = self.number * (self.length + 1)
        self.scores, self.tops, self.weights, self.values, self.scale = _pieces(
            [
                count * 4 * self.columns,
                count,
                positions * 2 * width,
                ends * 3 * self.size,
                ends * 2,
            ],
            torch.float32,
            logits.device,
        )
        self.tokens, self.best, self.found = _pieces(
            [count * self.columns, positions * width, count], torch.int32, logits.device
        )

    def score_classes(self) -> None:
        of, chunks, tiling = self.tables.classes, self.tables.chunks, self.tables.tiling
        count, tiles = len(self.logits), len(of.narrow) // GROUPS
        _class_scores[(tiles + chunks.count, triton.cdiv(count, tiling.positions))](
            self.logits, self.logits.stride(0), self.settings, self.temperature,
            of.narrow, of.narrow_members, chunks.begin, of.wide_members, self.scores, self.tokens,
            count, self.classes, self.columns, tiles,
            SAMPLING=self.sampling, GROUPS=GROUPS, NARROW=NARROW, CHUNK=tiling.chunk,
            POSITIONS=tiling.positions, num_warps=tiling.chunk_warps,
        )  # fmt: skip

    def weigh_bundles(self) -> None:
        tables, of = self.tables, self.tables.bundles
        _bundle_weights[(self.rows.slot.numel(),)](
            *self.rows, self.scores, self.tokens, tables.members,
            tables.classes.wide, tables.chunks.first,
            of.narrow, of.narrow_members, of.wide, of.wide_begin, of.wide_members,
            self.tops, self.weights, self.best, self.values,
            self.length, self.classes, self.columns, self.width, self.size,
            len(tables.classes.wide_begin) - 1, len(of.narrow) // GROUPS, len(of.wide_begin) - 1,
            CLASSES=self.wide_classes, GROUPS=GROUPS, NARROW=NARROW, WIDE=WIDE,
        )  # fmt: skip

    def sum_paths(self) -> None:
        tables, tiling = self.tables, self.tables.tiling
        to, out_of = tables.to, tables.out_of
        _passes[(self.number, 3)](
            self.rows.row, self.weights, tables.distance, tables.depth, tables.lowest,
            *to, len(to.end), *out_of, len(out_of.end), self.values, self.scale,
            self.length, self.states, to.end.shape[1], self.size, self.width,
            LANES=tiling.lanes, INPUTS=tiling.inputs, num_warps=tiling.lanes // 32,
        )  # fmt: skip

    def walk(self) -> None:
        tables = self.tables
        _walk[(self.number,)](
            *self.rows, self.weights, self.best, tables.begin, tables.target, tables.bundle,
            self.values, self.found, self.length, self.size, self.width,
            ONWARD=ONWARD, num_warps=1,
        )  # fmt: skip

    def find_statistics(self, out: Tensor, at: int) -> None:
        tables = self.tables
        _statistics[(self.rows.slot.numel(),)](
            *self.rows, self.settings, self.scores, self.tops, tables.class_of, tables.following,
            self.values, self.scale, self.found, out, out.shape[1], self.length,
            self.states, self.size, self.classes, self.columns, at,
            STATES=max(1024, triton.next_power_of_2(self.states)),
            BLOCK=256, AT_ONCE=tables.tiling.states, num_warps=tables.tiling.statistics_warps,
        )  # fmt: skip


def fill_lattice(
    logits: Tensor,
    settings: Tensor,
    temperature: Tensor,
    tables: Tables,
    rows: LatticeRows,
    out: Tensor,  # [3, all positions] int32, as for `confidence`
    at: int,  # column of the first of these positions
    *,
    sampling: bool,
) -> None:
    """Filled tokens that are wanted are left alone in `out`. The others as in LatticeWork."""
    work = LatticeWork(logits, settings, temperature, tables, rows, sampling=sampling)
    work.score_classes()
    work.weigh_bundles()
    work.sum_paths()
    work.walk()
    work.find_statistics(out, at)
