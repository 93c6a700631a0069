"""An automaton, and the rows that have to fit it, as the lattice kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lopa.kernels.triton.lattice import (
    GROUPS,
    LANES,
    NARROW,
    Groups,
    LatticeRows,
    Tables,
    Tiles,
)
from lopa.runner.constrained import row_groups
from lopa.runner.transitions import Edges, transitions_of
from lopa.types import Automaton, IntArray, Plan

_made: WeakKeyDictionary[Automaton, dict[torch.device, Tables]] = WeakKeyDictionary()


def tables_of(automaton: Automaton, device: torch.device) -> Tables:
    """Made once for an automaton and a device."""
    made = _made.setdefault(automaton, {})
    if device not in made:
        transitions = transitions_of(automaton)
        classes = automaton.class_of.argsort(kind="stable")
        ends = np.searchsorted(
            automaton.class_of[classes], np.arange(transitions.classes), side="right"
        )
        tokens = np.split(classes, ends)[: len(ends)]
        tokens[0] = tokens[0][:0]  # nobody asks for those that nothing allows
        members = np.ascontiguousarray(transitions.members.T).astype(np.int8)
        made[device] = Tables(
            classes=_groups(tokens, device),
            bundles=_groups(transitions.bundles, device),
            following=_int32(automaton.next, device),
            distance=_int32(automaton.distance, device),
            members=torch.from_numpy(members).to(device),
            to=_tiles(transitions.by_source, transitions.states, device, by_target=True),
            out_of=_tiles(transitions.by_source, transitions.states, device, by_target=False),
        )
    return made[device]


def lattice_rows(plans: Sequence[Plan], mask_id: int, device: torch.device) -> LatticeRows:
    """Of plans with one automaton, all that they want numbered in its order."""
    slots: list[IntArray] = []
    rows, masks = [], []
    end = 0
    for plan in plans:
        constraint = plan.constraint
        assert constraint is not None
        row, column = plan.wanted.nonzero()
        number = np.full(plan.rows.shape, -1, np.int64)
        number[row, column] = np.arange(end, end + len(row))
        mask = np.full((len(row), 2), -1, np.int64)
        first = constraint.start - plan.start
        for which, classes in row_groups(plan, mask_id):
            length = classes.shape[1]
            own = np.where(classes < 0, number[which, first : first + length], -1 - classes)
            for line, index in zip(own, range(len(slots), len(slots) + len(own)), strict=True):
                at = np.flatnonzero(line >= 0)
                mask[line[at] - end] = np.stack([np.full(len(at), index), at], axis=1)
                slots.append(line)
                rows.append((length, constraint.state, constraint.limit - constraint.start))
        masks.append(mask)
        end += len(row)
    most = max(map(len, slots), default=1)
    slot = np.full((max(1, len(slots)), -(-most // 32) * 32), -1, np.int64)
    for index, line in enumerate(slots):
        slot[index, : len(line)] = line
    about = np.array(rows or [(0, 0, 0)])
    about_masks = _int32(np.concatenate(masks), device)
    return LatticeRows(_int32(slot, device), _int32(about, device), about_masks)


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


def _tiles(edges: Edges, states: int, device: torch.device, *, by_target: bool) -> Tiles:
    own, other = edges.source, edges.target
    if by_target:
        own, other = other, own
    degree = np.bincount(own, minlength=states)
    order = (-degree).argsort(kind="stable")
    order = order[degree[order] > 0]
    tiles = -(-len(order) // LANES)
    state = np.full((tiles, LANES), -1)
    state.reshape(-1)[: len(order)] = order
    most = degree[order[::LANES]]  # the first of a tile has the most
    begin = np.cumsum(most) - most
    others, bundles = np.full((2, int(most.sum()), LANES), -1)
    place = np.empty(states, np.int64)
    place[order] = np.arange(len(order))
    by_own = own.argsort(kind="stable")
    first = np.cumsum(degree) - degree
    rank = np.empty(len(own), np.int64)  # of each edge among those of its state
    rank[by_own] = np.arange(len(own)) - first[own[by_own]]
    at = begin[place[own] // LANES] + rank, place[own] % LANES
    others[at], bundles[at] = other, edges.bundle
    return Tiles(*(_int32(x, device) for x in (state, begin, most, others, bundles)))


def _int32(array: object, device: torch.device) -> Tensor:
    on_host = torch.from_numpy(np.ascontiguousarray(array, np.int32))
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)  # it does not wait for a forward in flight
