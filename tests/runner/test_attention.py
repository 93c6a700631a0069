from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa.runner.attention import reference, sdpa


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 9),
    st.sampled_from([(4, 4), (4, 2), (7, 1), (14, 2)]),
    st.booleans(),
)
def test_sdpa_is_the_reference(
    seed: int, rows: int, length: int, shared: int, heads: tuple[int, int], masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, length, heads[0], 8, generator=generator)
    k, v = torch.randn(2, rows, shared + length, heads[1], 8, generator=generator)
    mask = None
    if masked:
        mask = torch.rand(rows, length, shared + length, generator=generator) < 0.5
        mask[:, :, shared] = True  # every query sees something
    torch.testing.assert_close(sdpa(q, k, v, mask), reference(q, k, v, mask))


def test_groups_and_masks_by_hand() -> None:
    """Two query heads on one key head; a query that sees one key copies its value."""
    q = torch.randn(1, 2, 2, 4)
    k, v = torch.randn(2, 1, 3, 1, 4)
    mask = torch.tensor([[[True, False, False], [False, False, True]]])
    for attend in (reference, sdpa):
        out = attend(q, k, v, mask)
        assert out.shape == (1, 2, 2, 4)
        for head in range(2):
            assert out[0, 0, head].tolist() == pytest.approx(v[0, 0, 0].tolist())
            assert out[0, 1, head].tolist() == pytest.approx(v[0, 2, 0].tolist())
