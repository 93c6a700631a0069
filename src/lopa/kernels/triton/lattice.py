"""Answers that have to fit an automaton, without leaving the device.

The same as `lopa.runner.lattice` in fp32: scores of classes from logits, of bundles from classes,
sums and best paths over the lattice (a program for each row and direction), the walk along the best
path (a program a row), and the statistics of each mask. Every position's numbers are relative to
its largest, so that they keep their precision along a row.

Groups (the tokens of a class, the classes of a bundle) are of two kinds: narrow ones of at most
NARROW members, of which a program takes many at once, and wide ones, a program each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa.kernels.triton.confidence import _mix

NARROW = 16  # members of a narrow group at most
GROUPS = 64  # narrow groups a program
WIDE = 1024  # members of a wide group that are read at once
LANES = 128  # states a tile
AT_ONCE = 8  # transitions of each that are read at once
NOTHING = tl.constexpr(-1e30)
# Arguments whose every value would otherwise be another kernel to compile
SIZES = ["classes", "bundles", "states", "length", "count", "at", "to_tiles", "out_tiles"]
LEAST = tl.constexpr(-87.0)  # a logit counts as at most so much less than the largest: fp32


class Groups(NamedTuple):
    """Members of groups, int32, on the device."""

    count: int  # groups
    narrow: Tensor  # [narrow groups, padded to GROUPS] which; -1: none
    narrow_members: Tensor  # [the same, NARROW]; -1: none
    wide: Tensor  # [wide groups, at least 1] which; -1: none
    wide_begin: Tensor  # [the same + 1] where its members begin
    wide_members: Tensor  # [M]


class Tiles(NamedTuple):
    """Transitions of each state, in tiles of LANES states that have about as many: int32."""

    state: Tensor  # [tiles, LANES]; -1: none
    begin: Tensor  # [tiles] where its transitions begin, in LANES
    degree: Tensor  # [tiles] transitions of a state at most
    other: Tensor  # [sum of degrees, LANES] the state at the other end
    bundle: Tensor  # [the same]; -1: none


class Tables(NamedTuple):
    """An automaton on the device."""

    classes: Groups  # of tokens
    bundles: Groups  # of classes
    following: Tensor  # [states, classes] int32
    distance: Tensor  # [states] int32
    members: Tensor  # [classes, bundles] int8: whether a bundle has a class
    to: Tiles  # transitions by the state that they lead to
    out_of: Tiles  # and by the one that they come from


class LatticeRows(NamedTuple):
    """int32, on the device."""

    slot: Tensor  # [R, L] mask number; -1 - class: filled
    row: Tensor  # [R, 3] positions, state, tokens left from the first position on
    mask: Tensor  # [N, 2] of each mask: its row, its position in the row


@triton.jit
def _keys(x, ids, position, seed, heat, SAMPLING: tl.constexpr):
    """What decides: logits, or perturbed ones, as in the confidence kernel."""
    if SAMPLING:  # noqa: SIM102 (it is known when this is compiled)
        if heat > 0:
            counter = _mix(_mix(position * 0x9E3779B1 + 1) ^ seed)
            bits = _mix(counter + ids.to(tl.int64) * 0x2545F4914F6CDD1D)
            uniform = ((bits >> 11) & 0xFFFFFFFFFFFFF).to(tl.float64)
            uniform = (uniform + 0.5) * 2.220446049250313e-16
            x = x / heat + (-tl.log(-tl.log(uniform))).to(tl.float32)
    return x


@triton.jit(do_not_specialize=SIZES)
def _narrow_scores(
    logits, stride, settings, temperature, which, members, scores, tokens, classes,
    SAMPLING: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """scores [N, 4, classes] fp32: key, its token's logit, mass, mean; tokens [N, classes]"""
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    target = tl.load(which + group)
    ids = tl.load(members + group[:, None] * NARROW + tl.arange(0, NARROW)[None, :])
    live = ids >= 0
    x = tl.load(logits + n * stride + ids, mask=live, other=0.0).to(tl.float32)
    heat = tl.load(temperature + n)
    position, seed = tl.load(settings + n * 4), tl.load(settings + n * 4 + 1)
    keys = tl.where(live, _keys(x, ids, position, seed, heat, SAMPLING), NOTHING)
    x = tl.where(live, tl.maximum(x, NOTHING, propagate_nan=tl.PropagateNan.ALL), NOTHING)
    best = tl.max(keys, 1)
    token = tl.min(tl.where((keys == best[:, None]) & live, ids, 0x7FFFFFFF), 1)
    logit = tl.max(tl.where(ids == token[:, None], x, NOTHING), 1)
    top = tl.max(x, 1)
    below = x - top[:, None]
    chance = tl.exp(below)
    total = tl.sum(chance, 1)
    mean = top + tl.sum(chance * tl.maximum(below, -1e4), 1) / total
    place = scores + n * 4 * classes + target
    store = target >= 0
    tl.store(place, best, mask=store)
    tl.store(place + classes, logit, mask=store)
    tl.store(place + 2 * classes, top + tl.log(total), mask=store)
    tl.store(place + 3 * classes, mean, mask=store)
    tl.store(tokens + n * classes + target, token, mask=store)


@triton.jit(do_not_specialize=SIZES)
def _wide_scores(
    logits, stride, settings, temperature, which, begins, members, scores, tokens, classes,
    SAMPLING: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    target = tl.load(which + group)
    if target < 0:
        return
    begin, end = tl.load(begins + group), tl.load(begins + group + 1)
    heat = tl.load(temperature + n)
    position, seed = tl.load(settings + n * 4), tl.load(settings + n * 4 + 1)
    lane = tl.arange(0, WIDE)
    best = tl.full([WIDE], NOTHING, tl.float32)
    token = tl.full([WIDE], 0x7FFFFFFF, tl.int32)
    logit = tl.full([WIDE], NOTHING, tl.float32)
    top = tl.full([WIDE], NOTHING, tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    weighted = tl.zeros([WIDE], tl.float32)  # of logits less the top
    for at in range(begin, end, WIDE):
        live = at + lane < end
        ids = tl.load(members + at + lane, mask=live, other=0)
        x = tl.load(logits + n * stride + ids, mask=live, other=0.0).to(tl.float32)
        keys = tl.where(live, _keys(x, ids, position, seed, heat, SAMPLING), NOTHING)
        x = tl.where(live, tl.maximum(x, NOTHING, propagate_nan=tl.PropagateNan.ALL), NOTHING)
        better = keys > best
        token = tl.where(better, ids, token)
        logit = tl.where(better, x, logit)
        best = tl.maximum(best, keys)
        # What there is so far, relative to the new top
        higher = tl.maximum(top, x)
        down = tl.maximum(top - higher, -1e4)
        shrink = tl.exp(down)
        weighted = (weighted + total * down) * shrink
        total = total * shrink
        below = tl.maximum(x - higher, -1e4)
        chance = tl.where(live, tl.exp(below), 0.0)
        weighted += chance * below
        total += chance
        top = higher
    overall = tl.max(top, 0)
    down = tl.maximum(top - overall, -1e4)
    shrink = tl.exp(down)
    mass = tl.sum(total * shrink, 0)
    mean = overall + tl.sum((weighted + total * down) * shrink, 0) / mass
    most = tl.max(best, 0)
    first = tl.min(tl.where(best == most, token, 0x7FFFFFFF), 0)
    place = scores + n * 4 * classes + target
    tl.store(place, most)
    tl.store(place + classes, tl.max(tl.where(token == first, logit, NOTHING), 0))
    tl.store(place + 2 * classes, overall + tl.log(mass))
    tl.store(place + 3 * classes, mean)
    tl.store(tokens + n * classes + target, first)


@triton.jit(do_not_specialize=SIZES)
def _shift(scores, classes, CLASSES: tl.constexpr):
    """Logits become relative to the position's largest mass.

    Class 0, which nothing allows, has none: its logit tells whether all are numbers."""
    n = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CLASSES)
    live = (lane > 0) & (lane < classes)
    place = scores + n * 4 * classes + lane
    mass = tl.load(place + 2 * classes, mask=live, other=NOTHING)
    top = tl.max(mass, 0)
    for part in tl.static_range(1, 4):
        values = tl.load(place + part * classes, mask=live, other=NOTHING)
        tl.store(place + part * classes, tl.maximum(values - top, LEAST), mask=live)
    are_numbers = 0.0 * tl.sum(tl.where(live, mass, 0.0), 0)  # 0, or not a number
    tl.store(scores + n * 4 * classes + classes, are_numbers)


@triton.jit(do_not_specialize=SIZES)
def _narrow_bundles(
    scores, which, members, weights, classes, bundles,
    GROUPS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """weights [N, 2, bundles]: the best key, and the mass"""
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    target = tl.load(which + group)
    ids = tl.load(members + group[:, None] * NARROW + tl.arange(0, NARROW)[None, :])
    live = ids >= 0
    place = scores + n * 4 * classes + ids
    keys = tl.load(place, mask=live, other=NOTHING)
    mass = tl.load(place + 2 * classes, mask=live, other=NOTHING)
    top = tl.max(mass, 1)
    total = tl.sum(tl.exp(mass - top[:, None]), 1)
    out = weights + n * 2 * bundles + target
    tl.store(out, tl.max(keys, 1), mask=target >= 0)
    tl.store(out + bundles, top + tl.log(total), mask=target >= 0)


@triton.jit(do_not_specialize=SIZES)
def _wide_bundles(
    scores, which, begins, members, weights, classes, bundles, WIDE: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    target = tl.load(which + group)
    if target < 0:
        return
    begin, end = tl.load(begins + group), tl.load(begins + group + 1)
    lane = tl.arange(0, WIDE)
    best = tl.full([WIDE], NOTHING, tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    for at in range(begin, end, WIDE):
        live = at + lane < end
        ids = tl.load(members + at + lane, mask=live, other=0)
        place = scores + n * 4 * classes + ids
        best = tl.maximum(best, tl.load(place, mask=live, other=NOTHING))
        mass = tl.load(place + 2 * classes, mask=live, other=NOTHING)
        total += tl.exp(mass)  # relative to the position's largest: at most 1 each
    out = weights + n * 2 * bundles + target
    tl.store(out, tl.max(best, 0))
    tl.store(out + bundles, tl.log(tl.sum(total, 0)))


@triton.jit
def _weight(weights, part, slot, bundle, members, bundles, live):
    """Of transitions at a position: the bundle's, or 0 or nothing where a token is filled."""
    if slot >= 0:
        at = weights + (slot.to(tl.int64) * 2 + part) * bundles + bundle
        w = tl.load(at, mask=live, other=NOTHING)
    else:
        held = tl.load(members + (-1 - slot) * bundles + bundle, mask=live, other=0)
        w = tl.where(held > 0, 0.0, NOTHING)
    return w


@triton.jit
def _sum_before(
    slots, weights, members, distance, here, count, state, left, states, bundles,
    tile_state, tile_begin, tile_degree, others, tile_bundle, tiles,
    STATES: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """From left to right. slots, here: of the row"""
    lanes = tl.arange(0, LANES)
    more = tl.arange(0, AT_ONCE)[None, :]
    every = tl.arange(0, STATES)
    tl.store(here + every, tl.where(every == state, 0.0, NOTHING), mask=every < states)
    most = tl.zeros((), tl.float32)
    for i in range(count):
        tl.debug_barrier()
        slot = tl.load(slots + i)
        top = tl.full((), NOTHING, tl.float32)
        for tile in range(tiles):
            own = tl.load(tile_state + tile * LANES + lanes)
            begin, degree = tl.load(tile_begin + tile), tl.load(tile_degree + tile)
            high = tl.full([LANES], NOTHING, tl.float32)
            total = tl.zeros([LANES], tl.float32)
            for k in range(0, degree, AT_ONCE):
                at = (begin + k + more) * LANES + lanes[:, None]
                inside = k + more < degree
                bundle = tl.load(tile_bundle + at, mask=inside, other=-1)
                live = bundle >= 0
                source = tl.load(others + at, mask=live, other=0)
                x = tl.load(here + i * states + source, mask=live, other=NOTHING)
                w = _weight(weights, 1, slot, bundle, members, bundles, live)
                x = tl.maximum(x - most + w, NOTHING)
                higher = tl.maximum(high, tl.max(x, 1))
                total = total * tl.exp(high - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
                high = higher
            far = tl.load(distance + own, mask=own >= 0, other=0x7FFFFFF)
            fits = (own >= 0) & (far <= tl.maximum(left - i - 1, 0)) & (high > 0.5 * NOTHING)
            value = tl.where(fits, high + tl.log(tl.maximum(total, 1e-30)), NOTHING)
            tl.store(here + (i + 1) * states + own, value, mask=own >= 0)
            top = tl.maximum(top, tl.max(value, 0))
        most = top


@triton.jit
def _sum_behind(
    slots, weights, members, distance, sums, keys, scale, count, left, states, bundles,
    tile_state, tile_begin, tile_degree, others, tile_bundle, tiles,
    STATES: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """From right to left. slots, sums, keys, scale: of the row"""
    lanes = tl.arange(0, LANES)
    more = tl.arange(0, AT_ONCE)[None, :]
    every = tl.arange(0, STATES)
    steps = tl.load(distance + every, mask=every < states, other=0x7FFFFFF)
    last = tl.where(steps <= tl.maximum(left - count, 0), 0.0, NOTHING)
    tl.store(sums + count * states + every, last, mask=every < states)
    tl.store(keys + count * states + every, last, mask=every < states)
    tl.store(scale + count, 0.0)
    most = tl.zeros((), tl.float32)
    most_key = tl.zeros((), tl.float32)
    for j in range(count):
        i = count - 1 - j
        tl.debug_barrier()
        slot = tl.load(slots + i)
        top = tl.full((), NOTHING, tl.float32)
        top_key = tl.full((), NOTHING, tl.float32)
        for tile in range(tiles):
            own = tl.load(tile_state + tile * LANES + lanes)
            begin, degree = tl.load(tile_begin + tile), tl.load(tile_degree + tile)
            high = tl.full([LANES], NOTHING, tl.float32)
            total = tl.zeros([LANES], tl.float32)
            best = tl.full([LANES], NOTHING, tl.float32)
            for k in range(0, degree, AT_ONCE):
                at = (begin + k + more) * LANES + lanes[:, None]
                inside = k + more < degree
                bundle = tl.load(tile_bundle + at, mask=inside, other=-1)
                live = bundle >= 0
                target = (i + 1) * states + tl.load(others + at, mask=live, other=0)
                x = tl.load(sums + target, mask=live, other=NOTHING)
                w = _weight(weights, 1, slot, bundle, members, bundles, live)
                x = tl.maximum(x - most + w, NOTHING)
                higher = tl.maximum(high, tl.max(x, 1))
                total = total * tl.exp(high - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
                high = higher
                y = tl.load(keys + target, mask=live, other=NOTHING)
                w = _weight(weights, 0, slot, bundle, members, bundles, live)
                best = tl.maximum(best, tl.max(y - most_key + w, 1))
            far = tl.load(distance + own, mask=own >= 0, other=0x7FFFFFF)
            fits = (own >= 0) & (far <= tl.maximum(left - i, 0)) & (high > 0.5 * NOTHING)
            value = tl.where(fits, high + tl.log(tl.maximum(total, 1e-30)), NOTHING)
            best = tl.where(fits, best, NOTHING)
            tl.store(sums + i * states + own, value, mask=own >= 0)
            tl.store(keys + i * states + own, best, mask=own >= 0)
            top = tl.maximum(top, tl.max(value, 0))
            top_key = tl.maximum(top_key, tl.max(best, 0))
        tl.store(scale + i, top)
        most = top
        most_key = top_key


@triton.jit(do_not_specialize=SIZES)
def _sums(
    slots, rows, weights, members, distance,
    to_state, to_begin, to_degree, to_other, to_bundle, to_tiles,
    out_state, out_begin, out_degree, out_other, out_bundle, out_tiles,
    before,  # [R, L + 1, states] log sums over the paths to a state
    behind,  # [R, 2, L + 1, states] log sums over the paths from it on, and the best sum of keys
    scale,  # [R, L + 1] the largest of `behind`'s sums at each position
    length, states, bundles,
    STATES: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count, state = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    left = tl.load(rows + row * 3 + 2)
    own = slots + row * length
    size = (length + 1) * states
    if tl.program_id(1) == 0:
        _sum_before(
            own, weights, members, distance, before + row * size,
            count, state, left, states, bundles,
            to_state, to_begin, to_degree, to_other, to_bundle, to_tiles,
            STATES, LANES, AT_ONCE,
        )  # fmt: skip
    else:
        sums = behind + row * 2 * size
        _sum_behind(
            own, weights, members, distance, sums, sums + size, scale + row * (length + 1),
            count, left, states, bundles,
            out_state, out_begin, out_degree, out_other, out_bundle, out_tiles,
            STATES, LANES, AT_ONCE,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _walk(
    slots, rows, scores, tokens, following, behind, moves,
    length, states, classes, CLASSES: tl.constexpr,
):  # fmt: skip
    """moves [N]: the class of each mask on the best path"""
    row = tl.program_id(0).to(tl.int64)
    count, state = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    keys = behind + (row * 2 + 1) * (length + 1) * states
    lane = tl.arange(0, CLASSES)
    for i in range(count):
        slot = tl.load(slots + row * length + i)
        move = -1 - slot
        if slot >= 0:
            reached = tl.load(following + state * classes + lane, mask=lane < classes, other=-1)
            live = reached >= 0
            place = slot.to(tl.int64) * classes + lane
            own = tl.load(scores + slot.to(tl.int64) * 4 * classes + lane, mask=live, other=NOTHING)
            x = own + tl.load(keys + (i + 1) * states + reached, mask=live, other=NOTHING)
            x = tl.where(live, x, 2.0 * NOTHING)
            ids = tl.load(tokens + place, mask=live, other=0x7FFFFFFF)
            ties = live & (x == tl.max(x, 0))
            token = tl.min(tl.where(ties, ids, 0x7FFFFFFF), 0)
            move = tl.max(tl.where(ties & (ids == token), lane, 0), 0)
            tl.store(moves + slot, move)
        state = tl.load(following + state * classes + move)


@triton.jit(do_not_specialize=SIZES)
def _statistics(
    masks, settings, scores, tokens, following, before, behind, scale, moves, out,
    count, length, states, classes, at,
    STATES: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [3, count] at column `at` + n, as in the confidence kernel"""
    n = tl.program_id(0).to(tl.int64)
    row, i = tl.load(masks + n * 2).to(tl.int64), tl.load(masks + n * 2 + 1)
    if row < 0:  # a filled token that is wanted: nothing is found for it
        return
    state = tl.arange(0, STATES)
    inside = state < states
    here = before + (row * (length + 1) + i) * states
    a = tl.load(here + state, mask=inside, other=NOTHING)
    sums = behind + (row * 2 * (length + 1) + i) * states
    b = tl.load(sums + state, mask=inside, other=NOTHING)
    both = tl.maximum(a + b, NOTHING)
    top = tl.max(both, 0)
    total = top + tl.log(tl.sum(tl.exp(both - top), 0))
    total += tl.load(scale + row * (length + 1) + i + 1)
    onward = sums + states
    move = tl.load(moves + n)
    reached = tl.load(following + state * classes + move, mask=inside, other=-1)
    c = tl.load(onward + reached, mask=reached >= 0, other=NOTHING)
    around = tl.maximum(a + c, NOTHING)
    top = tl.max(around, 0)
    around_sum = top + tl.log(tl.sum(tl.exp(around - top), 0))
    place = scores + n * 4 * classes
    logit = tl.load(place + classes + move)
    probability = tl.exp(tl.minimum(logit + around_sum - total, 0.0)) + tl.load(place + classes)
    confidence = probability
    if tl.load(settings + n * 4 + 3) == 2:
        high_a = tl.max(a, 0)
        high_b = tl.load(scale + row * (length + 1) + i + 1)
        confidence = 0.0 * probability
        for first in range(0, CLASSES, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            paths = tl.zeros([BLOCK], tl.float32)
            for s in range(states):
                start = tl.load(here + s) - high_a
                if start > -80.0:
                    to = tl.load(following + s * classes + lane, mask=lane < classes, other=-1)
                    rest = tl.load(onward + to, mask=to >= 0, other=NOTHING) - high_b
                    paths += tl.exp(start + tl.maximum(rest, -1e4))
            live = (paths > 0) & (lane < classes) & (lane > 0)
            factor = tl.log(tl.where(live, paths, 1.0)) + high_a + high_b - total
            mass = tl.load(place + 2 * classes + lane, mask=live, other=NOTHING)
            mean = tl.load(place + 3 * classes + lane, mask=live, other=0.0)
            chance = tl.where(live, tl.exp(tl.minimum(mass + factor, 0.0)), 0.0)
            confidence += tl.sum(chance * tl.where(live, mean + factor, 0.0), 0)
        confidence = tl.minimum(confidence, 0.0)
    tl.store(out + at + n, tl.load(tokens + n * classes + move))
    tl.store(out + count + at + n, probability.to(tl.int32, bitcast=True))
    tl.store(out + 2 * count + at + n, confidence.to(tl.int32, bitcast=True))


def fill_lattice(
    logits: Tensor,  # [N, vocab] of the wanted positions of some plans with one automaton
    settings: Tensor,  # [N, 4] int64, temperature [N] fp32: as for `confidence`
    temperature: Tensor,
    tables: Tables,
    rows: LatticeRows,  # of the same plans
    out: Tensor,  # [3, all positions] int32, as for `confidence`
    at: int,  # column of the first of these positions
    *,
    sampling: bool,
) -> None:
    """Filled tokens that are wanted are left alone in `out`."""
    device, count = logits.device, len(logits)
    states, classes = tables.following.shape
    bundles = tables.bundles.count
    length = rows.slot.shape[1]
    floats = {"dtype": torch.float32, "device": device}
    scores = torch.full((count, 4, classes), NOTHING.value, **floats)
    tokens = torch.empty(count, classes, dtype=torch.int32, device=device)
    given = logits, logits.stride(0), settings, temperature
    found = scores, tokens, classes
    of = tables.classes
    narrow = {"GROUPS": GROUPS, "NARROW": NARROW}
    _narrow_scores[(count, len(of.narrow) // GROUPS)](
        *given, of.narrow, of.narrow_members, *found, SAMPLING=sampling, **narrow
    )
    _wide_scores[(count, len(of.wide))](
        *given, of.wide, of.wide_begin, of.wide_members, *found, SAMPLING=sampling, WIDE=WIDE
    )
    # Few sizes, so that few kernels are compiled
    wide_classes = max(512, triton.next_power_of_2(classes))
    _shift[(count,)](scores, classes, CLASSES=wide_classes)
    of = tables.bundles
    weights = torch.empty(count, 2, bundles, **floats)
    _narrow_bundles[(count, len(of.narrow) // GROUPS)](
        scores, of.narrow, of.narrow_members, weights, classes, bundles, **narrow
    )
    _wide_bundles[(count, len(of.wide))](
        scores, of.wide, of.wide_begin, of.wide_members, weights, classes, bundles, WIDE=WIDE
    )
    number = len(rows.row)
    # A state without a transition has nothing.
    before = torch.full((number, length + 1, states), NOTHING.value, **floats)
    behind = torch.full((number, 2, length + 1, states), NOTHING.value, **floats)
    scale = torch.empty(number, length + 1, **floats)
    wide_states = max(1024, triton.next_power_of_2(states))
    to, out_of = tables.to, tables.out_of
    _sums[(number, 2)](
        rows.slot, rows.row, weights, tables.members, tables.distance,
        *to, len(to.begin), *out_of, len(out_of.begin), before, behind, scale,
        length, states, bundles,
        STATES=wide_states, LANES=LANES, AT_ONCE=AT_ONCE, num_warps=8,
    )  # fmt: skip
    moves = torch.empty(count, dtype=torch.int32, device=device)
    _walk[(number,)](
        rows.slot, rows.row, scores, tokens, tables.following, behind, moves,
        length, states, classes, CLASSES=wide_classes,
    )  # fmt: skip
    _statistics[(count,)](
        rows.mask, settings, scores, tokens, tables.following, before, behind, scale, moves, out,
        out.shape[1], length, states, classes, at,
        STATES=wide_states, CLASSES=wide_classes, BLOCK=min(wide_classes, 1024),
    )  # fmt: skip
