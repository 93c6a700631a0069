"""Moves of staged tokens against indexing, with tokens and slots that stay where they are."""

from __future__ import annotations

import numpy as np
import torch

from lopa.kernels.triton.kv_write import Moves, Staged, gather, settle
from lopa.runner import graph_inputs as layout

LAYERS, TOKENS, PLACES, HEADS, DIM, SLOTS, SIZE = 3, 10, 20, 2, 24, 5, 40


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_settle() -> None:
    torch.manual_seed(0)
    staged = Staged(
        torch.randn(LAYERS, TOKENS, HEADS, DIM),
        torch.randn(LAYERS, TOKENS, HEADS, DIM),
        torch.randn(TOKENS, SIZE),
    )
    pools = torch.randn(2, LAYERS, PLACES, HEADS, DIM)
    carry = torch.randn(SLOTS, SIZE)
    expected, expected_carry = pools.clone(), carry.clone()
    for source, place in ((2, 19), (3, 0), (9, 7)):
        expected[0, :, place] = staged.keys[:, source]
        expected[1, :, place] = staged.values[:, source]
    expected_carry[4] = staged.hidden[3]
    moves = Moves(
        source=ints(2, 3, -1, 9), place=ints(19, 0, 5, 7), carried=ints(3, -1), slot=ints(4, 1)
    )
    settle(staged, pools[0], pools[1], carry, moves)
    assert torch.equal(pools, expected)
    assert torch.equal(carry, expected_carry)


def test_settle_without_a_carry() -> None:
    staged = Staged(*torch.ones(2, 1, 1, 1, DIM), torch.ones(1, SIZE))
    pools, carry = torch.zeros(2, 1, 2, 1, DIM), torch.zeros(1, SIZE)
    settle(staged, *pools, carry, Moves(ints(0), ints(1), ints(), ints()))
    assert pools[:, 0, 1].eq(1).all()
    assert pools[:, 0, 0].eq(0).all()
    assert carry.eq(0).all()


def test_gather() -> None:
    torch.manual_seed(1)
    hidden, carry = torch.randn(TOKENS, SIZE), torch.randn(SLOTS, SIZE)
    found = gather(hidden, carry, ints(3, -1, 0, -5, 9))
    assert torch.equal(found, torch.stack([hidden[3], carry[0], hidden[0], carry[4], hidden[9]]))


def test_nothing_is_left_of_an_earlier_round() -> None:
    sizes = layout.rounded_body(40, 2, 2)
    buffer = layout.body_buffer(sizes)
    arrays, body = layout.BodyArrays(buffer, sizes).arrays, layout.cut_body(buffer, sizes)
    assert layout.moves_of(body).source.eq(-1).all()
    assert layout.moves_of(body).carried.eq(-1).all()
    layout.fill_moves(arrays, Moves(*np.array([[4, 5], [8, 9], [5, 1], [0, 3]])))
    layout.fill_moves(arrays, Moves(*np.array([[6], [7], [6], [2]])))
    source, place, carried, slot = layout.moves_of(body)
    assert source[:1].tolist() + place[:1].tolist() == [6, 7]
    assert carried[:1].tolist() + slot[:1].tolist() == [6, 2]
    assert source[1:].eq(-1).all()
    assert carried[1:].eq(-1).all()
