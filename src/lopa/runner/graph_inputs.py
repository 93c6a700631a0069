"""The layout of a batch as integers: the buffers that a step on fused kernels reads.

There are two, one for the layers and one for the head, each cut into the same arrays on the host
and on the device. Their sizes are rounded up, so that few graphs do for all batches; what is
rounded up is padding that no tile of the attention covers and no statistic is read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.kernels.triton.attention import TILE, Rows, most_tiles
from lopa.kernels.triton.confidence import RANKINGS
from lopa.kernels.triton.kv_write import Moves
from lopa.runner.batch import Batch, Outline
from lopa.types import IntArray

MOVES, CARRIES = 64, 16  # that a round has room for: two blocks of 32, and some slots

_A = TypeVar("_A")


class BodySizes(NamedTuple):
    """What the layers are laid out for: at most so many of each."""

    tokens: int
    rows: int
    tiles: int  # of attention


class HeadSizes(NamedTuple):
    """What the head is laid out for."""

    wanted: int  # positions
    drawing: bool  # whether the token of any of them is drawn


class Body(NamedTuple, Generic[_A]):
    """int32 each; see Outline and Rows for what they mean."""

    tokens: _A  # [T]
    positions: _A
    blocks: _A
    tile_row: _A  # [tiles]
    tile_at: _A
    begin: _A  # [R]
    length: _A
    start: _A
    cached: _A
    slot: _A
    # What is settled first: see `lopa.kernels.triton.kv_write.Moves`
    moved: _A  # [MOVES]
    moved_to: _A
    carried: _A  # [CARRIES]
    carried_to: _A


class Head(NamedTuple, Generic[_A]):
    settings: _A  # [N, 4] int64: position, round, seed, ranking; ranking −1: padding
    wanted_from: _A  # [N] int32
    temperature: _A  # [N] fp32


def body_sizes(batch: Batch, group: int) -> BodySizes:
    return rounded_body(batch.size, len(batch.outline.row_begin), group)


@lru_cache(maxsize=1024)
def rounded_body(tokens: int, rows: int, group: int) -> BodySizes:
    tokens = round_up(tokens)
    rows = next(size for size in (16, 64, 256, tokens + 256) if rows <= size)
    return BodySizes(tokens, rows, most_tiles(tokens, rows, group))


def head_sizes(batch: Batch, configs: Sequence[DecodeConfig]) -> HeadSizes:
    drawing = any(config.temperature > 0 for config in configs)
    return HeadSizes(rounded_head(len(batch.wanted.source)), drawing)


def round_up(count: int, *, finely: int = 256) -> int:
    """finely: up to here in small steps."""
    step = 32 if count <= finely else 64 if count <= 1024 else 256
    return max(32, -(-count // step) * step)


def rounded_head(wanted: int) -> int:
    """The head is short to capture and long to run, so it has more sizes than the layers."""
    return round_up(wanted, finely=512)


def body_buffer(sizes: BodySizes, *, pinned: bool = False) -> Tensor:
    """Nothing in it yet: no tile is in use, and nothing to be settled."""
    buffer = torch.zeros(sum(_lengths(sizes)), dtype=torch.int32, pin_memory=pinned)
    body = cut_body(buffer, sizes)
    for part in (body.tile_row, body.moved, body.carried):
        part.fill_(-1)
    return buffer


def head_buffer(sizes: HeadSizes, *, pinned: bool = False) -> Tensor:
    buffer = torch.zeros(10 * sizes.wanted, dtype=torch.int32, pin_memory=pinned)
    cut_head(buffer, sizes).settings[:, 3] = -1
    return buffer


def cut_body(buffer: Tensor, sizes: BodySizes) -> Body[Tensor]:
    return Body(*torch.split(buffer, _lengths(sizes)))


def cut_head(buffer: Tensor, sizes: HeadSizes) -> Head[Tensor]:
    """The settings first, so that they are aligned."""
    count = sizes.wanted
    settings, wanted_from, temperature = torch.split(buffer, [8 * count, count, count])
    return Head(
        settings.view(torch.int64).view(-1, 4), wanted_from, temperature.view(torch.float32)
    )


class BodyArrays:
    """The same cuts of a buffer on the host, in which there is nothing yet."""

    def __init__(self, buffer: Tensor, sizes: BodySizes) -> None:
        self.arrays: Body[IntArray] = Body(*(part.numpy() for part in cut_body(buffer, sizes)))
        # What they tell, besides tokens
        self.outline: Outline | None = None
        self.has_moves = False

    def fill(self, batch: Batch, moves: Moves[IntArray] | None, group: int) -> None:
        """Only with what has changed, since the device waits for it; moves None: none to settle.

        What is about to be written is forgotten first: it may be interrupted.
        """
        self.arrays.tokens[: batch.size] = batch.tokens
        if self.outline is not batch.outline:
            self.outline = None
            fill_outline(self.arrays, batch.outline, group)
            self.outline = batch.outline
        if moves is not None or self.has_moves:
            self.has_moves = True
            fill_moves(self.arrays, moves or _NO_MOVES)
            self.has_moves = moves is not None


def head_arrays(buffer: Tensor, sizes: HeadSizes) -> Head[IntArray]:
    return Head(*(part.numpy() for part in cut_head(buffer, sizes)))


def rows_of(body: Body[Tensor], table: Tensor) -> Rows:
    of_rows = body.begin, body.length, body.start, body.cached, body.slot
    return Rows(body.tile_row, body.tile_at, *of_rows, body.blocks, table)


def moves_of(body: Body[Tensor]) -> Moves[Tensor]:
    return Moves(body.moved, body.moved_to, body.carried, body.carried_to)


def fill_moves(to: Body[IntArray], moves: Moves[IntArray]) -> None:
    source, place, carried, slot = moves
    to.moved[: len(source)] = source
    to.moved[len(source) :] = -1
    to.moved_to[: len(source)] = place
    to.carried[: len(carried)] = carried
    to.carried[len(carried) :] = -1
    to.carried_to[: len(carried)] = slot


_NO_MOVES = Moves(*np.zeros((4, 0), np.int64))


def fill_outline(to: Body[IntArray], outline: Outline, group: int) -> None:
    """Behind what is put there, an earlier batch may be left: only unused tiles have to say so."""
    tokens, rows = len(outline.positions), len(outline.row_begin)
    to.positions[:tokens] = outline.positions
    to.blocks[:tokens] = outline.blocks
    to.begin[:rows] = outline.row_begin
    to.length[:rows] = outline.row_length
    to.start[:rows] = outline.row_start
    to.cached[:rows] = outline.row_cached
    to.slot[:rows] = outline.row_slot
    row, at = _tiles(outline.row_length.tobytes(), group)
    to.tile_row[: len(row)] = row
    to.tile_row[len(row) :] = -1
    to.tile_at[: len(row)] = at


def fill_head(to: Head[IntArray], batch: Batch, configs: Sequence[DecodeConfig]) -> None:
    """The same: only the settings of positions that are not wanted have to say so."""
    wanted = batch.wanted
    count = len(wanted.source)
    to.wanted_from[:count] = wanted.source
    to.settings[:count, 0] = wanted.position
    to.settings[:count, 1] = wanted.round
    to.settings[count:, 3] = -1
    end = 0
    for config, of_plan in zip(configs, wanted.counts, strict=True):
        here = slice(end, end := end + of_plan)
        to.settings[here, 2:] = config.seed, RANKINGS[config.ranking]
        to.temperature[here] = config.temperature


@lru_cache(maxsize=256)
def _tiles(row_lengths: bytes, group: int) -> tuple[IntArray, IntArray]:
    """The row of each tile of attention, and its first folded query."""
    tiles = -(-np.frombuffer(row_lengths, np.int64) * group // TILE)  # [R]
    row = np.repeat(np.arange(len(tiles)), tiles)
    first = np.cumsum(tiles) - tiles
    return row, (np.arange(len(row)) - first[row]) * TILE


def _lengths(sizes: BodySizes) -> list[int]:
    return [sizes.tokens] * 3 + [sizes.tiles] * 2 + [sizes.rows] * 5 + [MOVES] * 2 + [CARRIES] * 2
