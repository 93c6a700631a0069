"""An automaton, and the rows that have to fit it, as the lattice kernels read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lopa.kernels.triton.bundle_weights import GROUPS, NARROW, Chunks, Groups
from lopa.kernels.triton.lattice import LatticeRows, Nodes, Tables, Tiling
from lopa.runner.constrained import row_groups
from lopa.runner.transitions import transitions_of
from lopa.types import Automaton, IntArray, Plan

_made: WeakKeyDictionary[Automaton, dict[torch.device, Tables]] = WeakKeyDictionary()


def tables_of(automaton: Automaton, device: torch.device) -> Tables:
    """Made once for an automaton and a device."""
    made = _made.setdefault(automaton, {})
    if device not in made:
        made[device] = make_tables(automaton, device, Tiling())
    return made[device]


def make_tables(automaton: Automaton, device: torch.device, tiling: Tiling) -> Tables:
    transitions = transitions_of(automaton)
    states, edges = transitions.states, transitions.by_source
    by_class = automaton.class_of.argsort(kind="stable")
    classes = np.arange(transitions.classes)
    ends = np.searchsorted(automaton.class_of[by_class], classes, side="right")
    tokens = np.split(by_class, ends)[: len(ends)]
    tokens[0] = tokens[0][:0]  # nobody asks for those that nothing allows
    # The bundle of partial sums is the last
    members = np.ones((transitions.classes, len(transitions.bundles) + 1), np.int8)
    members[:, :-1] = transitions.members.T
    partial = len(transitions.bundles)
    source, target, bundle = edges
    begin = np.searchsorted(source, np.arange(states + 1))
    following = [targets.tolist() for targets in np.split(target, begin[1:-1])]
    depth = _depths(automaton.start, following)
    to_size, to = _nodes(target, source, bundle, depth, partial, tiling)
    out_size, out_of = _nodes(source, target, bundle, depth, partial, tiling)
    distance = np.zeros(max(to_size, out_size))
    distance[:states] = automaton.distance
    return Tables(
        tiling=tiling,
        classes=_groups(tokens, device),
        chunks=_chunks([len(group) for group in tokens], tiling.chunk, device),
        bundles=_groups(transitions.bundles, device),
        class_of=_int32(automaton.class_of, device),
        following=_int32(automaton.next, device),
        distance=_int32(distance, device),
        depth=_int32(depth, device),
        lowest=_int32(_lowest(source, target, states), device),
        members=torch.from_numpy(members).to(device),
        to=Nodes(*(_int32(part, device) for part in to)),
        out_of=Nodes(*(_int32(part, device) for part in out_of)),
        begin=_int32(begin, device),
        target=_int32(target, device),
        bundle=_int32(bundle, device),
    )


def lattice_rows(plans: Sequence[Plan], mask_id: int, device: torch.device) -> LatticeRows:
    """Of plans with one automaton, all that they want numbered in its order."""
    slots: list[IntArray] = []
    about: list[tuple[int, int, int]] = []
    end = 0
    for plan in plans:
        constraint = plan.constraint
        assert constraint is not None
        number = plan.wanted.cumsum()
        begin, end = end, end + int(number[-1])
        number = np.where(plan.wanted, number.reshape(plan.wanted.shape) + (begin - 1), -1)
        first = constraint.start - plan.start
        for which, classes in row_groups(plan, mask_id):
            here = number[which, first : first + classes.shape[1]]
            slots.append(np.where(classes < 0, here, -1 - classes))
            left = constraint.limit - constraint.start
            about += [(classes.shape[1], constraint.state, left)] * len(which)
    if not slots:
        slots, about = [np.full((1, 1), -1)], [(0, 0, 0)]
    rows, length = len(about), -(-max(of_plan.shape[1] for of_plan in slots) // 32) * 32
    both = np.full(rows * (length + 3), -1, np.int32)  # in one copy to the device
    slot = both[: rows * length].reshape(rows, length)
    both[rows * length :] = [number for of_row in about for number in of_row]
    row = 0
    for of_plan in slots:
        slot[row : row + len(of_plan), : of_plan.shape[1]] = of_plan
        row += len(of_plan)
    on_device = _int32(both, device)
    return LatticeRows(
        on_device[: rows * length].view(rows, length), on_device[rows * length :].view(rows, 3)
    )


def _groups(groups: Sequence[IntArray], device: torch.device) -> Groups:
    narrow = [i for i, group in enumerate(groups) if 0 < len(group) <= NARROW]
    wide = [i for i, group in enumerate(groups) if len(group) > NARROW]
    which = np.full(max(1, -(-len(narrow) // GROUPS)) * GROUPS, -1)
    which[: len(narrow)] = narrow
    members = np.full((len(which), NARROW), -1)
    for line, index in zip(members, narrow, strict=False):
        line[: len(groups[index])] = groups[index]
    begin = np.cumsum([0, *(len(groups[index]) for index in wide)])
    flat = np.concatenate([groups[index] for index in wide] or [np.zeros(1, np.int64)])
    arrays = which, members, np.array(wide or [-1]), begin, flat
    narrow_, members_, wide_, begin_, flat_ = (_int32(x, device) for x in arrays)
    return Groups(len(groups), narrow_, members_, wide_, begin_, flat_)


def _chunks(sizes: Sequence[int], most: int, device: torch.device) -> Chunks:
    begin, first = [0], [0]
    for size in sizes:
        if size > NARROW:
            last = begin[-1]
            begin += [last + min(at, size) for at in range(most, size + most, most)]
            first.append(len(begin) - 1)
    return Chunks(len(begin) - 1, _int32(begin, device), _int32(first, device))


def _depths(start: int, following: Sequence[Sequence[int]]) -> IntArray:
    """[states] fewest tokens from the start; following: [states] the states behind each."""
    depth = np.full(len(following), len(following))  # of those that cannot be reached
    depth[start] = 0
    queue = [start]
    for state in queue:
        for to in following[state]:
            if depth[to] == len(following):
                depth[to] = depth[state] + 1
                queue.append(to)
    return depth


def _lowest(source: IntArray, target: IntArray, states: int) -> IntArray:
    """[states] a state before which there is none that can be reached from it."""
    back = np.arange(states)
    np.minimum.at(back, source, target)
    back = np.minimum.accumulate(back[::-1])[::-1]  # the first that it or a later one leads to
    lowest = back
    while (back[lowest] < lowest).any():
        lowest = back[lowest]
    return lowest


def _nodes(
    own: IntArray, other: IntArray, bundle: IntArray, depth: IntArray, partial: int, tiling: Tiling
) -> tuple[int, list[IntArray]]:
    """States, and partial sums where a state has too many inputs: how many, and their tiles.

    own, other, bundle: [T] of each transition. depth: [states]
    partial: the bundle of what a partial sum gives
    """
    states = len(depth)
    kept = [np.stack([own, other, bundle])]
    sums = [0] * states  # of each node: how many partial sums are below one another
    owner = list(range(states))
    degree = np.bincount(own, minlength=states)
    by_own, last = own.argsort(kind="stable"), np.cumsum(degree)
    for state in np.flatnonzero(degree > tiling.inputs).tolist():
        which = by_own[last[state] - degree[state] : last[state]]
        inputs = deque(zip(other[which].tolist(), bundle[which].tolist(), strict=True))
        added = []
        while len(inputs) > tiling.inputs:
            taken = [inputs.popleft() for _ in range(tiling.inputs)]
            added += [(len(sums), *one) for one in taken]
            inputs.append((len(sums), partial))
            sums.append(_sums_below(taken, sums, partial))
            owner.append(state)
        added += [(state, *one) for one in inputs]
        sums[state] = _sums_below(inputs, sums, partial)
        kept.append(np.array(added).T)
    kept[0] = kept[0][:, degree[own] <= tiling.inputs]
    own, other, bundle = np.concatenate(kept, axis=1)
    order = np.lexsort((other, own))
    own, other, bundle = own[order], other[order], bundle[order]
    rank = np.arange(len(own)) - np.searchsorted(own, own)
    # A phase's nodes in the order of their states: neighbours read what is near.
    size, lanes = len(sums), tiling.lanes
    phase, owners = np.array(sums), np.array(owner)
    ends = np.cumsum(-(-np.bincount(phase) // lanes))  # in tiles
    order = np.lexsort((owners, phase))
    begins = np.append(0, ends[:-1]) * lanes
    place = np.empty(size, np.int64)
    place[order] = (
        begins[phase[order]] + np.arange(size) - np.searchsorted(phase[order], phase[order])
    )
    tiles = int(ends[-1])
    owns = np.full(tiles * lanes, -1)
    owns[place] = np.arange(size)
    # By phase: its first tile with a state or later ones, the end of those of up to a depth
    begin = np.zeros((len(ends), states), np.int64)
    end = np.zeros((len(ends), int(depth.max()) + 1), np.int64)
    for level, first in enumerate(begins // lanes):
        nodes = order[phase[order] == level]
        begin[level] = first + np.searchsorted(owners[nodes], np.arange(states)) // lanes
        np.maximum.at(end[level], depth[owners[nodes]], place[nodes] // lanes + 1)
    end = np.maximum.accumulate(end, axis=1)
    others = np.zeros((tiles, tiling.inputs, lanes), np.int64)
    bundles = np.full(others.shape, -1)
    at = place[own] // lanes, rank, place[own] % lanes
    others[at], bundles[at] = other, bundle
    return size, [begin, end, owns.reshape(tiles, lanes), others, bundles]


def _sums_below(inputs: Iterable[tuple[int, int]], sums: list[int], partial: int) -> int:
    return max((1 + sums[node] for node, bundle in inputs if bundle == partial), default=0)


def _int32(array: object, device: torch.device) -> Tensor:
    on_host = torch.from_numpy(np.ascontiguousarray(array, np.int32))
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)  # it does not wait for a forward in flight
