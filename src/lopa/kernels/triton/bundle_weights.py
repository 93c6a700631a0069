"""What the logits of a position say of each class of tokens, and of each bundle of classes.

A class's scores are its best token and that token's key and logit, the log of the sum of its
tokens' exp(logit) (the mass), and their mean logit. Groups (the tokens of a class, the classes of a
bundle) are of two kinds: narrow ones of at most NARROW members, of which a program takes many at
once, and wide ones. The tokens of wide classes are read in chunks, a program each, so that a class
of most of the vocabulary is read as fast as the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lopa.kernels.triton.confidence import _mix

NARROW = 16  # members of a narrow group at most
GROUPS = 64  # narrow groups a program
WIDE = 256  # classes of a wide bundle, or chunks of a wide class, that are read at once
NOTHING = tl.constexpr(-1e30)
LEAST = tl.constexpr(-87.0)  # a logit counts as at most so much less than the largest: fp32
# Arguments whose every value would otherwise be another kernel to compile
SIZES = [
    "count", "classes", "columns", "length", "narrow_tiles", "wide_classes",
    "wide_bundles", "width", "size", "states", "depths", "at", "to_phases", "out_phases",
]  # fmt: skip


class Groups(NamedTuple):
    """Members of groups, int32, on the device."""

    count: int  # groups
    narrow: Tensor  # [narrow groups, padded to GROUPS] which; -1: none
    narrow_members: Tensor  # [the same, NARROW]; -1: none
    wide: Tensor  # [wide groups]
    wide_begin: Tensor  # [wide groups + 1] where its members begin
    wide_members: Tensor  # [M]


class Chunks(NamedTuple):
    """Of the members of wide groups: int32, on the device."""

    count: int
    begin: Tensor  # [chunks + 1] where its members begin
    first: Tensor  # [wide groups + 1] the first chunk of each


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


@triton.jit
def _score_groups(
    ids,  # [G, M] tokens; -1: none
    to,  # [G] column, where it is stored
    store,  # [G]
    logits, settings, temperature, scores, tokens, n, columns, SAMPLING: tl.constexpr,
):  # fmt: skip
    """Of a position; logits: its own."""
    live = ids >= 0
    x = tl.load(logits + ids, mask=live, other=0.0).to(tl.float32)
    x = tl.where(live, tl.maximum(x, NOTHING, propagate_nan=tl.PropagateNan.ALL), NOTHING)
    top = tl.max(x, 1)
    best = top
    keys = x
    if SAMPLING:
        heat = tl.load(temperature + n)
        position, seed = tl.load(settings + n * 4), tl.load(settings + n * 4 + 1)
        keys = tl.where(live, _keys(x, ids, position, seed, heat, SAMPLING), 2.0 * NOTHING)
        best = tl.max(keys, 1)
    token = tl.min(tl.where((keys == best[:, None]) & live, ids, 0x7FFFFFFF), 1)
    logit = top
    if SAMPLING:
        logit = tl.max(tl.where(ids == token[:, None], x, NOTHING), 1)
    below = x - top[:, None]
    chance = tl.exp(below)
    total = tl.sum(chance, 1)
    mean = top + tl.sum(chance * tl.maximum(below, -1e4), 1) / total
    place = scores + n * 4 * columns + to
    tl.store(place, best, mask=store)
    tl.store(place + columns, logit, mask=store)
    tl.store(place + 2 * columns, top + tl.log(total), mask=store)
    tl.store(place + 3 * columns, mean, mask=store)
    tl.store(tokens + n * columns + to, token, mask=store)


@triton.jit(do_not_specialize=SIZES)
def _class_scores(
    logits, stride, settings, temperature, which, narrow_members, begins, members,
    scores,  # [N, 4, columns] fp32: key, its token's logit, mass, mean; columns: classes, chunks
    tokens,  # [N, columns]
    count, classes, columns, narrow_tiles,
    SAMPLING: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * POSITIONS
    last = tl.minimum(first + POSITIONS, count)
    if tile < narrow_tiles:
        group = tile * GROUPS + tl.arange(0, GROUPS)
        target = tl.load(which + group)
        few = tl.load(narrow_members + group[:, None] * NARROW + tl.arange(0, NARROW)[None, :])
        for n in range(first, last):
            _score_groups(
                few, target, target >= 0, logits + n * stride, settings, temperature,
                scores, tokens, n, columns, SAMPLING,
            )  # fmt: skip
    else:
        chunk = tile - narrow_tiles + tl.arange(0, 1)
        begin, end = tl.load(begins + chunk), tl.load(begins + chunk + 1)
        lane = begin[:, None] + tl.arange(0, CHUNK)[None, :]
        many = tl.load(members + lane, mask=lane < end[:, None], other=-1)
        for n in range(first, last):
            _score_groups(
                many, classes + chunk, chunk >= 0, logits + n * stride, settings, temperature,
                scores, tokens, n, columns, SAMPLING,
            )  # fmt: skip


@triton.jit
def _join_chunks(scores, tokens, columns, classes, target, begin, end, WIDE: tl.constexpr):
    """The scores of a wide class. scores, tokens: of the position"""
    lane = tl.arange(0, WIDE)
    best = tl.full([WIDE], 2.0 * NOTHING, tl.float32)
    token = tl.full([WIDE], 0x7FFFFFFF, tl.int32)
    logit = tl.full([WIDE], NOTHING, tl.float32)
    top = tl.full([WIDE], NOTHING, tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    weighted = tl.zeros([WIDE], tl.float32)  # of logits less the top
    for chunk in range(begin, end, WIDE):
        live = chunk + lane < end
        place = scores + classes + chunk + lane
        key = tl.load(place, mask=live, other=2.0 * NOTHING)
        better = key > best
        ids = tl.load(tokens + classes + chunk + lane, mask=live, other=0x7FFFFFFF)
        token = tl.where(better, ids, token)
        logit = tl.where(better, tl.load(place + columns, mask=live, other=NOTHING), logit)
        best = tl.maximum(best, key)
        mass = tl.load(place + 2 * columns, mask=live, other=NOTHING)
        mean = tl.load(place + 3 * columns, mask=live, other=NOTHING)
        # What there is so far, relative to the new top
        higher = tl.maximum(top, mass)
        down = tl.maximum(top - higher, -1e4)
        weighted = (weighted + total * down) * tl.exp(down)
        total = total * tl.exp(down)
        chance = tl.where(live, tl.exp(mass - higher), 0.0)
        weighted += chance * tl.maximum(mean - higher, -1e4)
        total += chance
        top = higher
    overall = tl.max(top, 0)
    down = tl.maximum(top - overall, -1e4)
    mass = tl.sum(total * tl.exp(down), 0)
    mean = overall + tl.sum((weighted + total * down) * tl.exp(down), 0) / mass
    most = tl.max(best, 0)
    first = tl.min(tl.where(best == most, token, 0x7FFFFFFF), 0)
    place = scores + target
    tl.store(place, most)
    tl.store(place + columns, tl.max(tl.where(token == first, logit, NOTHING), 0))
    tl.store(place + 2 * columns, overall + tl.log(mass))
    tl.store(place + 3 * columns, mean)
    tl.store(tokens + target, first)


@triton.jit
def _weigh_narrow(
    which, members, keys, masses, tokens, top, weights, best, width,
    GROUPS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, GROUPS)
    to = tl.load(which + group)
    ids = tl.load(members + group[:, None] * NARROW + tl.arange(0, NARROW)[None, :])
    live = ids >= 0
    key = tl.load(keys + ids, mask=live, other=2.0 * NOTHING)
    most = tl.max(key, 1)
    token = tl.load(tokens + ids, mask=live & (key == most[:, None]), other=0x7FFFFFFF)
    mass = tl.load(masses + ids, mask=live, other=NOTHING)
    mass = tl.where(live, tl.maximum(mass - top, LEAST), NOTHING)
    high = tl.max(mass, 1)
    total = tl.sum(tl.exp(mass - high[:, None]), 1)
    tl.store(weights + to, most, mask=to >= 0)
    tl.store(weights + width + to, high + tl.log(total), mask=to >= 0)
    tl.store(best + to, tl.min(token, 1), mask=to >= 0)


@triton.jit
def _weigh_wide(
    members, begin, end, keys, masses, tokens, top, to, best_to, width, WIDE: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, WIDE)
    most = tl.full([WIDE], 2.0 * NOTHING, tl.float32)
    token = tl.full([WIDE], 0x7FFFFFFF, tl.int32)
    total = tl.zeros([WIDE], tl.float32)
    for first in range(begin, end, WIDE):
        live = first + lane < end
        ids = tl.load(members + first + lane, mask=live, other=0)
        key = tl.load(keys + ids, mask=live, other=2.0 * NOTHING)
        own = tl.load(tokens + ids, mask=live, other=0x7FFFFFFF)
        is_better = (key > most) | ((key == most) & (own < token))
        token = tl.where(is_better, own, token)
        most = tl.maximum(most, key)
        mass = tl.load(masses + ids, mask=live, other=NOTHING)
        # Relative to the position's largest: at most 1 each
        total += tl.where(live, tl.exp(tl.maximum(mass - top, LEAST)), 0.0)
    best_key = tl.max(most, 0)
    tl.store(to, best_key)
    tl.store(to + width, tl.log(tl.sum(total, 0)))
    tl.store(best_to, tl.min(tl.where(most == best_key, token, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=SIZES)
def _bundle_weights(
    slots, rows, scores, tokens, members,
    wide_class, chunk_first, narrow_bundle, narrow_members, wide_bundle, wide_begin, wide_members,
    tops,  # [N] fp32: the largest mass of a class; not a number where a logit is not
    weights,  # [R, L, 2, width] fp32: a bundle's best key, and its mass relative to the largest
    best,  # [R, L, width] int32: the bundle's token with that key
    values,  # [R, 3, L + 1, size] fp32, of the passes: they begin with nothing
    length, classes, columns, width, size, wide_classes, narrow_tiles, wide_bundles,
    CLASSES: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program a position. The last bundle is no class's and weighs nothing: of partial sums."""
    at = tl.program_id(0).to(tl.int64)
    row = at // length
    i = at - row * length
    if i >= tl.load(rows + row * 3):
        return
    values += (row * 3 * (length + 1) + i) * size
    begin = tl.where(i == 0, 0, size)  # the first position's, and those behind this one
    for first in range(0, 2 * size, WIDE):
        lane = first + tl.arange(0, WIDE)
        for part in tl.static_range(3):
            place = values + part * (length + 1) * size + lane
            tl.store(place, NOTHING, mask=(lane >= begin) & (lane < 2 * size))
    slot = tl.load(slots + at)
    weights += at * 2 * width
    best += at * width
    if slot < 0:  # filled: bundles that hold its class
        for first in range(0, width, WIDE):
            bundle = first + tl.arange(0, WIDE)
            inside = bundle < width
            held = tl.load(members + (-1 - slot) * width + bundle, mask=inside, other=0)
            weight = tl.where(held > 0, 0.0, NOTHING)
            tl.store(weights + bundle, weight, mask=inside)
            tl.store(weights + width + bundle, weight, mask=inside)
            tl.store(best + bundle, 0, mask=inside)
        return
    scores += slot.to(tl.int64) * 4 * columns
    tokens += slot.to(tl.int64) * columns
    for group in range(wide_classes):
        target = tl.load(wide_class + group)
        chunk, last = tl.load(chunk_first + group), tl.load(chunk_first + group + 1)
        _join_chunks(scores, tokens, columns, classes, target, chunk, last, WIDE)
    tl.debug_barrier()
    masses = scores + 2 * columns
    lane = tl.arange(0, CLASSES)
    live = (lane > 0) & (lane < classes)  # class 0, which nothing allows, has no scores
    mass = tl.load(masses + lane, mask=live, other=NOTHING)
    top = tl.max(mass, 0) + 0.0 * tl.sum(tl.where(live, mass, 0.0), 0)
    tl.store(tops + slot, top)
    for tile in range(narrow_tiles):
        _weigh_narrow(
            narrow_bundle + tile * GROUPS, narrow_members + tile * GROUPS * NARROW,
            scores, masses, tokens, top, weights, best, width, GROUPS, NARROW,
        )  # fmt: skip
    for group in range(wide_bundles):
        target = tl.load(wide_bundle + group)
        member, last = tl.load(wide_begin + group), tl.load(wide_begin + group + 1)
        _weigh_wide(
            wide_members, member, last, scores, masses, tokens, top,
            weights + target, best + target, width, WIDE,
        )  # fmt: skip
    tl.store(weights + width - 1, 0.0)
    tl.store(weights + 2 * width - 1, 0.0)
