"""Copies of staged tokens against indexing, with padding in between."""

from __future__ import annotations

import torch

from lopa.kernels.triton.kv_write import PendingKVWrites, Staged, gather, write_kv

LAYERS, TOKENS, CACHE_TOKENS, HEADS, DIM, SLOTS, SIZE = 3, 10, 20, 2, 24, 5, 40


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_write_kv() -> None:
    torch.manual_seed(0)
    staged = Staged(
        torch.randn(LAYERS, TOKENS, HEADS, DIM),
        torch.randn(LAYERS, TOKENS, HEADS, DIM),
        torch.randn(TOKENS, SIZE),
    )
    caches = torch.randn(2, LAYERS, CACHE_TOKENS, HEADS, DIM)
    carry = torch.randn(SLOTS, SIZE)
    expected, expected_carry = caches.clone(), carry.clone()
    for source, slot in ((2, 19), (3, 0), (9, 7)):
        expected[0, :, slot] = staged.keys[:, source]
        expected[1, :, slot] = staged.values[:, source]
    expected_carry[4] = staged.hidden[3]
    writes = PendingKVWrites(
        source=ints(2, 3, -1, 9),
        slot_mapping=ints(19, 0, 5, 7),
        carry_source=ints(3, -1),
        carry_slot=ints(4, 1),
    )
    write_kv(staged, caches[0], caches[1], carry, writes)
    assert torch.equal(caches, expected)
    assert torch.equal(carry, expected_carry)


def test_write_kv_without_a_carry() -> None:
    staged = Staged(*torch.ones(2, 1, 1, 1, DIM), torch.ones(1, SIZE))
    caches, carry = torch.zeros(2, 1, 2, 1, DIM), torch.zeros(1, SIZE)
    write_kv(staged, *caches, carry, PendingKVWrites(ints(0), ints(1), ints(), ints()))
    assert caches[:, 0, 1].eq(1).all()
    assert caches[:, 0, 0].eq(0).all()
    assert carry.eq(0).all()


def test_gather() -> None:
    torch.manual_seed(1)
    hidden, carry = torch.randn(TOKENS, SIZE), torch.randn(SLOTS, SIZE)
    found = gather(hidden, carry, ints(3, -1, 0, -5, 9))
    assert torch.equal(found, torch.stack([hidden[3], carry[0], hidden[0], carry[4], hidden[9]]))
