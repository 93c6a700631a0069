"""From clean rows to what the model is trained on: which tokens are masked, who sees whom.

A row is a prompt, an answer, and end-of-text filler up to the fixed length. Behind the prompt it
is cut into blocks, and what the model gets to see is a *window*: the prompt and the blocks up to
some end, as a decoder would have it in the middle of its work. Everything is sampled on the
training device, for the whole batch at once.

Kinds, chosen per row:
  block    a block sees the prompt, the blocks before it and itself (D2F training, `block`)
  full     everything in the window sees everything (`full`, first rounds)
  history  the clean prefix is block-causal, the blocks from the first mask on see everything: a
           cache of finished blocks and an active window
  plain    one mask ratio over a whole canvas, everything sees everything (vanilla, infilling)
In the first three the mask ratios rise from block to block, as in D2F's pipeline: finished blocks,
then one to four active ones, the last of them often just appended and still all masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.settings import Noise

BLOCK, FULL, HISTORY, PLAIN = range(4)
LARGE, SMALL = 32, 16
PROMPT = -1  # the block number of prompt tokens


@dataclass(frozen=True, slots=True)
class Noisy:
    """N rows of length L. Row p − 1 of the model predicts position p."""

    tokens: Tensor  # [N, L] with masks
    targets: Tensor  # [N, L] without
    weights: Tensor  # [N, L] of each position's loss; zero where nothing is masked
    sees: Tensor  # [N, L, L]: query, key
    kind: Tensor  # [N]
    blocks: Tensor  # [N, L] block numbers
    ratios: Tensor  # [N, L] the mask ratio sampled for each position
    end: Tensor  # [N] where the window ends


def corrupt(
    tokens: Tensor,  # [N, L]
    prompt: Tensor,  # [N] tokens of the prompt
    answer: Tensor,  # [N] tokens of the answer; the end of text is the token behind it
    mask_id: int,
    noise: Noise,
    generator: torch.Generator,
) -> Noisy:
    """Rows must hold at least the whole LARGE blocks that answer + end of text need."""
    rows, length = tokens.shape
    device = tokens.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    def choice(shares: tuple[float, ...]) -> Tensor:
        """[N] indices sampled with these relative frequencies."""
        edges = torch.tensor(shares, device=device).cumsum(0)
        return torch.bucketize(uniform(rows) * edges[-1], edges[:-1], right=True)

    kind = choice((noise.block, noise.full, noise.history, noise.plain))
    plain = kind == PLAIN
    size = torch.where(uniform(rows) < noise.small_blocks, SMALL, LARGE)
    positions = torch.arange(length, device=device)
    blocks = torch.div(positions - prompt[:, None], size[:, None], rounding_mode="floor")
    blocks = blocks.clamp(min=PROMPT)

    # The window: `first` is the first active block, `last` is one past the last.
    content = (answer + size) // size  # blocks that hold the answer and its end of text
    room = torch.div(length - prompt, size, rounding_mode="floor")
    # One block of filler behind the end, sometimes two: a pipeline appends that far ahead.
    most = torch.minimum(room, content + 1 + (uniform(rows) < 0.3))
    first = (uniform(rows) * content).long()
    last = torch.minimum(first + 1 + choice(noise.active), most)
    end = prompt + last * size

    # Rising ratios: sorting puts the clean blocks first and those outside the window last.
    number = torch.arange(length // SMALL + 1, device=device)
    ratios = uniform(rows, len(number))
    ratios = torch.where(number < first[:, None], -1.0, ratios)
    ratios = torch.where(number >= last[:, None], 2.0, ratios).sort(dim=1).values
    appended = (number == last[:, None] - 1) & (uniform(rows) < noise.fresh)[:, None]
    ratios = torch.where(appended, 1.0, ratios).clamp(0.0, 1.0)
    ratios = ratios.gather(1, blocks.clamp(min=0))  # by position

    # A canvas holds the whole answer and filler up to any length; often a usual one.
    least = answer + 1
    canvas = least + (uniform(rows) * (length - prompt - least + 1)).long()
    usual = (uniform(rows) < noise.canvas) & (least <= noise.canvas_length)
    canvas = torch.where(usual, noise.canvas_length, canvas)
    end = torch.where(plain, torch.minimum(prompt + canvas, torch.full_like(end, length)), end)
    even = uniform(rows)
    even = torch.where(uniform(rows) < 0.15, 1.0, even)  # the first step of a canvas
    ratios = torch.where(plain[:, None], even[:, None], ratios)

    inside = (positions >= prompt[:, None]) & (positions < end[:, None])
    masked = (uniform(rows, length) < ratios) & inside
    # A row without a mask teaches nothing: give it one, in its first active block.
    spare = torch.where(plain, 0, first * size) + (uniform(rows) * size).long()
    spare = torch.minimum(prompt + spare, end - 1)
    masked |= (positions == spare[:, None]) & ~masked.any(dim=1, keepdim=True)

    # Full 1 / ratio weights (the likelihood bound) would let the rare, almost clean blocks swamp
    # a batch; none at all would let the almost empty ones, whose loss is mostly wording that the
    # prompt leaves open. The root is between, and keeps late positions, where sums are settled.
    weights = masked * ratios.clamp(min=1 / 8).rsqrt()
    return Noisy(
        tokens=tokens.masked_fill(masked, mask_id),
        targets=tokens,
        weights=weights,
        sees=visible(blocks, masked, kind, end),
        kind=kind,
        blocks=blocks,
        ratios=ratios,
        end=end,
    )


def visible(blocks: Tensor, masked: Tensor, kind: Tensor, end: Tensor) -> Tensor:
    """[N, L, L]: True where a query sees a key. What lies outside the window sees itself only."""
    length = blocks.shape[1]
    outside = blocks.amax() + 1
    active = torch.where(masked, blocks, outside).amin(dim=1, keepdim=True)
    kind = kind[:, None]
    # A position sees the groups up to its own.
    group = torch.where((kind == FULL) | (kind == PLAIN), 0, blocks)
    group = torch.where(kind == HISTORY, torch.minimum(blocks, active), group)
    positions = torch.arange(length, device=blocks.device)
    inside = positions < end[:, None]
    sees = (group[:, None, :] <= group[:, :, None]) & inside[:, None, :] & inside[:, :, None]
    return sees | torch.eye(length, dtype=torch.bool, device=blocks.device)
