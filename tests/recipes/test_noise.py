"""Noise: what is masked, how the ratios rise, and who sees whom, against plain loops."""

from __future__ import annotations

import pytest
import torch
from recipes.noise import BLOCK, FULL, HISTORY, PLAIN, Noisy, corrupt
from recipes.settings import Noise

ROWS, LENGTH, MASK = 96, 160, 1
ONLY = {
    BLOCK: Noise(block=1, full=0, history=0, plain=0),
    FULL: Noise(block=0, full=1, history=0, plain=0),
    HISTORY: Noise(block=0, full=0, history=1, plain=0),
    PLAIN: Noise(block=0, full=0, history=0, plain=1),
}


def sample(noise: Noise, seed: int = 0) -> tuple[Noisy, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(5, 60, (ROWS,), generator=generator)
    answer = torch.randint(1, 96, (ROWS,), generator=generator)
    positions = torch.arange(LENGTH)
    tokens = torch.randint(4, 50, (ROWS, LENGTH), generator=generator)
    tokens = torch.where(positions < (prompt + answer)[:, None], tokens, 0)
    return corrupt(tokens, prompt, answer, MASK, noise, generator), prompt, answer


def test_shares_of_the_kinds_and_reproducible_draws() -> None:
    first, _, _ = sample(Noise())
    again, _, _ = sample(Noise())
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.sees, again.sees)
    kinds = torch.cat([sample(Noise(), seed)[0].kind for seed in range(40)])
    shares = torch.bincount(kinds, minlength=4) / len(kinds)
    assert torch.allclose(shares, torch.tensor([0.42, 0.30, 0.14, 0.14]), atol=0.03)


@pytest.mark.parametrize("kind", [BLOCK, FULL, HISTORY, PLAIN])
def test_masks_lie_in_the_window_and_carry_the_loss(kind: int) -> None:
    noisy, prompt, answer = sample(ONLY[kind])
    masked = noisy.tokens == MASK
    positions = torch.arange(LENGTH)
    assert not (masked & (positions < prompt[:, None])).any()
    assert not (masked & (positions >= noisy.end[:, None])).any()
    assert masked.any(dim=1).all()
    assert torch.equal(noisy.weights > 0, masked)
    assert torch.equal(torch.where(masked, noisy.targets, noisy.tokens), noisy.targets)
    assert (noisy.end <= LENGTH).all()
    if kind == PLAIN:  # the whole answer and its end of text are on the canvas
        assert (noisy.end > prompt + answer).all()
        assert (noisy.end == prompt + 128).any()
        first = noisy.ratios[:, -1]
        assert torch.equal(noisy.ratios, first[:, None].expand(-1, LENGTH))


def test_ratios_rise_from_block_to_block() -> None:
    finished = appended = 0
    for seed in range(5):
        noisy, prompt, answer = sample(ONLY[BLOCK], seed)
        for row in range(ROWS):
            start, end = int(prompt[row]), int(noisy.end[row])
            ratios = noisy.ratios[row, start:end]
            assert (ratios.diff() >= 0).all()
            blocks = noisy.blocks[row, start:end]
            size = int((blocks == 0).sum())
            assert size in (16, 32)
            assert (end - start) % size == 0
            for block in range(int(blocks[-1]) + 1):
                of_block = ratios[blocks == block]
                assert (of_block == of_block[0]).all()
            # At most two blocks of filler behind the one with the end of text.
            assert (end - start) // size <= -(-(int(answer[row]) + 1) // size) + 2
            finished += bool(ratios[0] == 0)
            appended += bool(ratios[-1] == 1)
    assert finished > ROWS
    assert appended > ROWS


def test_masked_share_follows_the_ratio() -> None:
    expected = found = 0.0
    for seed in range(10):
        noisy, prompt, _ = sample(Noise(), seed)
        positions = torch.arange(LENGTH)
        inside = (positions >= prompt[:, None]) & (positions < noisy.end[:, None])
        expected += float(noisy.ratios[inside].sum())
        found += float((noisy.tokens == MASK).sum())
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("kind", [BLOCK, FULL, HISTORY, PLAIN])
def test_attention_is_that_of_a_plain_loop(kind: int) -> None:
    noisy, prompt, _ = sample(ONLY[kind], seed=3)
    for row in range(0, ROWS, 16):
        start, end = int(prompt[row]), int(noisy.end[row])
        size = int((noisy.blocks[row] == 0).sum())

        def block(position: int, start: int = start, size: int = size) -> int:
            return -1 if position < start else (position - start) // size

        active = block(noisy.tokens[row].tolist().index(MASK))
        expected = []
        for query in range(LENGTH):
            for key in range(LENGTH):
                if query >= end or key >= end:
                    sees = query == key
                elif kind in (FULL, PLAIN):
                    sees = True
                elif kind == BLOCK:
                    sees = block(key) <= block(query)
                else:
                    sees = block(key) <= block(query) or block(query) >= active
                expected.append(sees)
        assert noisy.sees[row].flatten().tolist() == expected
