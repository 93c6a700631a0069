"""The inputs of a forward as integer buffers, which CUDA graphs read.

There are two buffers, one for the layers and one for the head. Each is split into the same arrays
on the host and on the device, so one copy moves all of them. Sizes are rounded up, so that few
graphs serve all batches. The rest is padding: no attention tile covers it and no statistic is read
from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.kernels.prefix_attention import far_tokens
from lopa.kernels.triton.attention import TILE, Rows, most_tiles
from lopa.kernels.triton.confidence import RANKINGS
from lopa.kernels.triton.kv_write import PendingKVWrites
from lopa.runner.batch import Batch, BatchMetadata
from lopa.types import IntArray

# Tokens are rounded up: up to so many to a multiple of so many. Behind the last it goes on so.
PADDING = ((256, 32), (1024, 64), (16384, 256))
# Rows are rounded up to one of these.
ROWS = (16, 64, 256)
# Pending writes in a graph, by its rows: two blocks of 32 and some slots where one request runs
_WRITES_PER_ROW, _CARRIES_PER_ROW = 4, 1

_A = TypeVar("_A")


class LayerSizes(NamedTuple):
    """At most so many of each in the inputs of the layers."""

    tokens: int
    rows: int
    tiles: int  # of attention
    far: int = 0  # exactly so many tokens of the prefix are left to cuDNN

    @property
    def writes(self) -> int:
        """Staged tokens that are committed."""
        return self.rows * _WRITES_PER_ROW

    @property
    def carries(self) -> int:
        return self.rows * _CARRIES_PER_ROW

    def fit(self, pending: PendingKVWrites[IntArray]) -> bool:
        source, _, carry_source, _ = pending
        return len(source) <= self.writes and len(carry_source) <= self.carries


class HeadSizes(NamedTuple):
    wanted: int  # at most so many positions
    sampling: bool  # whether any of their tokens is sampled
    never: int = 0  # at most so many tokens that a plan excludes; 0: and none is expected


class LayerInputs(NamedTuple, Generic[_A]):
    """int32 each; BatchMetadata and Rows say what they mean."""

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
    # The fields of PendingKVWrites, which are written before the layers run
    write_source: _A  # [writes]
    slot_mapping: _A
    carry_source: _A  # [carries]
    carry_slot: _A
    used: _A  # [1] tokens that are not padding


class HeadInputs(NamedTuple, Generic[_A]):
    settings: _A  # [N, 4] int64: position, seed, tempered, ranking; ranking −1: padding
    wanted_from: _A  # [N] int32
    temperature: _A  # [N] fp32
    # int32, as Plan says; −1: none. Empty where no plan excludes any token
    expected: _A  # [N]
    never: _A  # [N, sizes.never]


def layer_sizes(batch: Batch, group: int, *, by_cudnn: bool = False) -> LayerSizes:
    """by_cudnn: the far part of one sequence's long prefix."""
    metadata = batch.metadata
    sizes = round_layers(batch.size, len(metadata.row_begin), group)
    if not by_cudnn or len(batch.plans) > 1:
        return sizes
    prefix = min(metadata.row_cached[0], metadata.row_start[0])  # of all rows, whole
    far = far_tokens(int(prefix), sizes.tokens)
    return sizes._replace(far=far) if far else sizes


@lru_cache(maxsize=1024)  # looked up before every launch
def round_layers(tokens: int, rows: int, group: int) -> LayerSizes:
    tokens = round_up(tokens)
    rows = next(size for size in (*ROWS, tokens + ROWS[-1]) if rows <= size)
    return LayerSizes(tokens, rows, most_tiles(tokens, rows, group))


def head_sizes(batch: Batch, configs: Sequence[DecodeConfig]) -> HeadSizes | None:
    """None where nothing is wanted, or the confidence kernel lacks a setting."""
    wanted = len(batch.wanted.source)
    if not wanted or any(c.top_p != 1 or c.top_k or c.needs_fp64 for c in configs):
        return None
    never = max(len(plan.never) for _, plan in batch.plans)
    if any(plan.expected is not None for _, plan in batch.plans):
        never = max(1, never)
    never = 1 << (never - 1).bit_length() if never else 0  # few graphs
    return HeadSizes(round_head(wanted), any(c.temperature > 0 for c in configs), never)


def round_up(count: int, *, finely: int = PADDING[0][0]) -> int:
    """finely: in small steps up to this count."""
    (_, fine), (middle, step), (_, coarse) = PADDING
    step = fine if count <= finely else step if count <= middle else coarse
    return max(fine, -(-count // step) * step)


def round_head(wanted: int) -> int:
    """The head is quick to capture and slow to run, so it has more sizes than the layers."""
    return round_up(wanted, finely=512)


def layer_buffer(sizes: LayerSizes, *, pinned: bool = False) -> Tensor:
    """On the host, empty: no tile is in use and no write is pending."""
    buffer = torch.zeros(sum(_lengths(sizes)), dtype=torch.int32, pin_memory=pinned)
    inputs = split_layers(buffer, sizes)
    for part in (inputs.tile_row, inputs.write_source, inputs.carry_source):
        part.fill_(-1)
    return buffer


def head_buffer(sizes: HeadSizes, *, pinned: bool = False) -> Tensor:
    size = sum(_head_lengths(sizes))
    buffer = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
    split_head(buffer, sizes).settings[:, 3] = -1
    return buffer


def split_layers(buffer: Tensor, sizes: LayerSizes) -> LayerInputs[Tensor]:
    return LayerInputs(*torch.split(buffer, _lengths(sizes)))


def split_head(buffer: Tensor, sizes: HeadSizes) -> HeadInputs[Tensor]:
    """The settings first: they are int64 and have to be aligned."""
    settings, wanted_from, temperature, expected, never = torch.split(buffer, _head_lengths(sizes))
    return HeadInputs(
        settings.view(torch.int64).view(-1, 4),
        wanted_from,
        temperature.view(torch.float32),
        expected,
        never.view(sizes.wanted, sizes.never),
    )


class HostLayerInputs:
    """The inputs of the layers in an empty buffer on the host, as numpy arrays."""

    def __init__(self, buffer: Tensor, sizes: LayerSizes) -> None:
        self.arrays: LayerInputs[IntArray] = LayerInputs(
            *(part.numpy() for part in split_layers(buffer, sizes))
        )
        # What the arrays hold, besides tokens
        self.metadata: BatchMetadata | None = None
        self.has_writes = False

    def fill(self, batch: Batch, writes: PendingKVWrites[IntArray] | None, group: int) -> None:
        """Only what has changed, since the device waits for it; writes None: none is pending.

        The note of what the arrays hold is cleared before they are written: an interrupt
        (Ctrl-C) may leave them half-written.
        """
        self.arrays.tokens[: batch.size] = batch.tokens
        if self.metadata is not batch.metadata:
            self.metadata = None
            fill_metadata(self.arrays, batch.metadata, group)
            self.metadata = batch.metadata
        if writes is not None or self.has_writes:
            self.has_writes = True
            fill_writes(self.arrays, writes or _NO_WRITES)
            self.has_writes = writes is not None


def head_arrays(buffer: Tensor, sizes: HeadSizes) -> HeadInputs[IntArray]:
    return HeadInputs(*(part.numpy() for part in split_head(buffer, sizes)))


def layers_on(device: torch.device, batch: Batch, group: int) -> LayerInputs[Tensor]:
    """For a forward without graphs."""
    sizes = layer_sizes(batch, group)
    on_host = layer_buffer(sizes)
    HostLayerInputs(on_host, sizes).fill(batch, None, group)
    return split_layers(on_host.to(device), sizes)


def head_on(
    device: torch.device, batch: Batch, configs: Sequence[DecodeConfig], sizes: HeadSizes
) -> HeadInputs[Tensor]:
    """For a head without a graph."""
    on_gpu = device.type == "cuda"
    on_host = head_buffer(sizes, pinned=on_gpu)
    fill_head(head_arrays(on_host, sizes), batch, configs)
    # Without waiting for the layers
    return split_head(on_host.to(device, non_blocking=on_gpu), sizes)


def writes_on(device: torch.device, writes: PendingKVWrites[IntArray]) -> PendingKVWrites[Tensor]:
    """In multiples of 16, as in a graph: Triton compiles another kernel for other lengths."""
    lengths = [max(1, -(-len(part) // 16)) * 16 for part in writes]
    on_gpu = device.type == "cuda"
    on_host = torch.full((sum(lengths),), -1, dtype=torch.int32, pin_memory=on_gpu)
    for to, part in zip(torch.split(on_host, lengths), writes, strict=True):
        to[: len(part)] = torch.from_numpy(part)
    # Without waiting for a forward that is in flight
    return PendingKVWrites(*torch.split(on_host.to(device, non_blocking=on_gpu), lengths))


def attention_rows(inputs: LayerInputs[Tensor], table: Tensor) -> Rows:
    rows = inputs.begin, inputs.length, inputs.start, inputs.cached, inputs.slot
    return Rows(inputs.tile_row, inputs.tile_at, *rows, inputs.blocks, table)


def pending_writes(inputs: LayerInputs[Tensor]) -> PendingKVWrites[Tensor]:
    return PendingKVWrites(
        inputs.write_source, inputs.slot_mapping, inputs.carry_source, inputs.carry_slot
    )


def fill_writes(to: LayerInputs[IntArray], writes: PendingKVWrites[IntArray]) -> None:
    source, slot_mapping, carry_source, carry_slot = writes
    to.write_source[: len(source)] = source
    to.write_source[len(source) :] = -1
    to.slot_mapping[: len(source)] = slot_mapping
    to.carry_source[: len(carry_source)] = carry_source
    to.carry_source[len(carry_source) :] = -1
    to.carry_slot[: len(carry_source)] = carry_slot


_NO_WRITES = PendingKVWrites(*np.zeros((4, 0), np.int64))


def fill_metadata(to: LayerInputs[IntArray], metadata: BatchMetadata, group: int) -> None:
    """An earlier batch may be left behind what is written: only unused tiles are marked."""
    tokens, rows = len(metadata.positions), len(metadata.row_begin)
    to.positions[:tokens] = metadata.positions
    to.blocks[:tokens] = metadata.blocks
    to.begin[:rows] = metadata.row_begin
    to.length[:rows] = metadata.row_length
    to.start[:rows] = metadata.row_start
    to.cached[:rows] = metadata.row_cached
    to.slot[:rows] = metadata.row_slot
    row, at = _tiles(metadata.row_length.tobytes(), group)
    to.tile_row[: len(row)] = row
    to.tile_row[len(row) :] = -1
    to.tile_at[: len(row)] = at
    to.used[0] = tokens


def fill_head(to: HeadInputs[IntArray], batch: Batch, configs: Sequence[DecodeConfig]) -> None:
    """As above, only the settings of unused positions have to be marked."""
    wanted = batch.wanted
    count = len(wanted.source)
    to.wanted_from[:count] = wanted.source
    to.settings[:count, 0] = wanted.position
    to.settings[count:, 3] = -1
    end = 0
    for config, of_plan in zip(configs, wanted.counts, strict=True):
        here = slice(end, end := end + of_plan)
        own = config.seed, config.tempers_confidence, RANKINGS[config.ranking]
        to.settings[here, 1:] = own
        to.temperature[here] = config.temperature
    if len(to.expected):
        _fill_excluded(to, batch)


def _fill_excluded(to: HeadInputs[IntArray], batch: Batch) -> None:
    count = len(batch.wanted.source)
    expected = batch.expected
    to.expected[:count] = -1 if expected is None else expected
    to.never[:count] = -1
    end = 0
    for (_, plan), of_plan in zip(batch.plans, batch.wanted.counts, strict=True):
        here = slice(end, end := end + of_plan)
        to.never[here, : len(plan.never)] = plan.never


@lru_cache(maxsize=256)  # keyed by bytes, as arrays have no hash; lengths recur when windows move
def _tiles(row_lengths: bytes, group: int) -> tuple[IntArray, IntArray]:
    """The row of each attention tile, and its first folded query."""
    tiles = -(-np.frombuffer(row_lengths, np.int64) * group // TILE)  # [R]
    row = np.repeat(np.arange(len(tiles)), tiles)
    first = np.cumsum(tiles) - tiles
    return row, (np.arange(len(row)) - first[row]) * TILE


def _head_lengths(sizes: HeadSizes) -> list[int]:
    count = sizes.wanted
    return [8 * count, count, count, count if sizes.never else 0, count * sizes.never]


def _lengths(sizes: LayerSizes) -> list[int]:
    tokens, rows, tiles, _ = sizes
    pending = [sizes.writes] * 2 + [sizes.carries] * 2
    return [tokens] * 3 + [tiles] * 2 + [rows] * 5 + pending + [1]
