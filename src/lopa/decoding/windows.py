"""Windows: which positions a round forwards, which of them may be filled, what goes to the cache.

A window is told where the anchor's masks are and where each draft places its tokens, and
opens a `Frame` for the round over all rows (lookaheads in rank order, the anchor last). After the
winner is filled it is closed with the winner's row and masks. Every window cuts the new tokens
into equal blocks; the canvas is one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lopa.config import CacheName, DecodeConfig
from lopa.types import BlockState, BlockView, BoolArray


@dataclass(slots=True)
class Frame:
    """What one round looks at, for R rows and the blocks `first` … (per-row end)."""

    start: int
    cached: int
    commit: int
    first: int  # first block that may be filled; rows end at their own last block
    blocks: list[int]  # [R] how many blocks from `first` on may be filled in each row
    row_ends: list[int]  # [R] absolute end of each row
    may_force: BoolArray  # [R, max(blocks)]: fully activated, so a fill may be forced
    fresh: bool = False  # blocks window with a cache: this round recomputes everything


@dataclass(frozen=True, slots=True)
class Layout:
    """How a canvas is cut into blocks."""

    base: int  # where the first block starts
    size: int  # of a block
    count: int  # how many blocks there may be
    tail: int | None = None  # with gaps: pinned tokens behind the last block

    @property
    def end(self) -> int:
        """Of the canvas."""
        return self.base + self.count * self.size + (self.tail or 0)


class RowPeek(NamedTuple):
    """The anchor's row of the next round, before it is planned."""

    length: int  # tokens; 0: nothing is left to do
    is_waiting: bool = False  # it is the first block alone, which waits for the next


class Window(Protocol):
    base: int  # where the first block starts: the end of the prompt, or of its whole blocks
    size: int  # block size
    count: int  # how many blocks there may be

    @property
    def end(self) -> int:
        """Absolute end of the blocks that exist."""

    @property
    def settled(self) -> int:
        """Absolute end of the blocks that are finished."""

    def open(self, masks: list[int], drafts: list[list[int]], has_eos: list[bool]) -> Frame | None:
        """The next round, or None when nothing is left to do.

        masks: [blocks] masks of the anchor by block (those not yet existing count in full), and 1
        where there is none but the block is not finished;
        drafts: [k] blocks in which each draft places its tokens; has_eos: [k + 1] rows that hold
        an EOS token.
        """

    def peek_row(self, masks: list[int], has_eos: bool) -> RowPeek:
        """The row that `open` would give without lookaheads, without opening it."""

    def close(self, frame: Frame, winner: int, masks: list[int]) -> None:
        """Take the winner's row over; masks: [blocks] of the winner after its fills, as above."""

    def block_views(self, frame: Frame, winner: int, masks: list[int]) -> list[BlockView]:
        """The winner's uncached blocks as the round found them; masks: before its fills.

        Asked for after `close`, so it goes by the frame.
        """


class BlockWindow:
    """Semi-autoregressive blocks on a full canvas, with Fast-dLLM's approximate caches.

    `none`: the whole canvas every round. `prefix`: the first round of a block forwards the canvas
    and caches what is left of the block; later rounds forward the block and all behind it.
    `dual`: the first round caches the whole canvas; later rounds forward the block alone and
    overwrite its slots. Plain Dream decodes one block without a cache.
    """

    def __init__(self, layout: Layout, config: DecodeConfig) -> None:
        self.base, self.size, self.count = layout.base, layout.size, layout.count
        self.cache: CacheName = config.cache
        self.current = 0
        self.end = layout.end
        self.fresh = True  # the next round is the first of its block

    @property
    def settled(self) -> int:
        return self.base + self.current * self.size

    def open(self, masks: list[int], drafts: list[list[int]], has_eos: list[bool]) -> Frame | None:
        if self.current == self.count:
            return None
        rows = len(has_eos)
        left = self.base + self.current * self.size
        start, cached, commit, end = 0, 0, 0, self.end
        if self.cache == "prefix":
            start, cached, commit = (0, 0, left) if self.fresh else (left, left, 0)
        elif self.cache == "dual":
            if self.fresh:
                commit = self.end
            else:
                start, cached, commit, end = left, self.end, self.size, left + self.size
        return Frame(
            start=start,
            cached=cached,
            commit=commit,
            first=self.current,
            blocks=[1] * rows,
            row_ends=[end] * rows,
            may_force=np.ones((rows, 1), np.bool_),
            fresh=self.fresh and self.cache != "none",
        )

    def peek_row(self, masks: list[int], has_eos: bool) -> RowPeek:
        frame = self.open(masks, [], [has_eos])
        return RowPeek(0 if frame is None else frame.row_ends[0] - frame.start)

    def close(self, frame: Frame, winner: int, masks: list[int]) -> None:
        self.fresh = not masks[self.current]
        while self.current < self.count and not masks[self.current]:  # some are pinned all over
            self.current += 1

    def block_views(self, frame: Frame, winner: int, masks: list[int]) -> list[BlockView]:
        blocks = range(frame.first, self.count)
        return [
            _block_view(self, b, "active" if b == frame.first else "semi", masks) for b in blocks
        ]


class Pipeline:
    """D2F: blocks are appended and activated while their left neighbours are still decoded.

    Finished blocks leave from the left, so three counters tell every block's state: in the cache,
    finished (to be cached by the next round), existing.

    Where text is pinned behind the last block, every row ends with it, and so all blocks exist from
    the start.
    """

    def __init__(self, layout: Layout, config: DecodeConfig) -> None:
        self.base, self.size, self.count = layout.base, layout.size, layout.count
        self.tail = layout.tail or 0
        self.append_at = config.append_at
        self.activate_at = config.activate_at
        self.existing = 0 if layout.tail is None else self.count
        self.finished = 0
        self.cached = 0  # tokens, the prompt included
        self.activated = [False] * self.count

    @property
    def end(self) -> int:
        return self.base + self.existing * self.size

    @property
    def settled(self) -> int:
        return self.base + self.finished * self.size

    def open(self, masks: list[int], drafts: list[list[int]], has_eos: list[bool]) -> Frame | None:
        size, first, there = self.size, self.finished, self.existing
        # Decoded share of the block to the left of each from `first` on; the prompt is decoded.
        left = [1.0 if b < 0 else (size - masks[b]) / size for b in range(first - 1, there)]
        # Block b is fully activated for good once b − 1 is far enough along.
        activated = [share >= self.activate_at for share in left]
        for block in range(first, there):
            activated[block - first] |= self.activated[block]
        # A block is appended behind one that is far enough along, but not behind an EOS token.
        longer = there + (there < self.count)
        appends = left[-1] >= self.append_at
        existing = [longer if appends and not ended else there for ended in has_eos]
        may_force = np.empty((len(has_eos), len(activated)), np.bool_)
        may_force[:] = activated
        for row, placed in enumerate(drafts):
            for block in set(placed) if len(placed) > 1 else placed:
                share = (size - masks[block] + placed.count(block)) / size
                if share >= self.activate_at:
                    may_force[row, block + 1 - first] = True
                if block + 1 == there and share >= self.append_at and not has_eos[row]:
                    existing[row] = longer
        if existing[-1] == first:  # the anchor has no active block left
            return None
        return Frame(
            start=self.cached,
            cached=self.cached,
            commit=self.base + first * size - self.cached,
            first=first,
            blocks=[end - first for end in existing],
            row_ends=[self.base + end * size + self.tail for end in existing],
            may_force=may_force[:, : max(existing) - first],
        )

    def peek_row(self, masks: list[int], has_eos: bool) -> RowPeek:
        there = self.existing
        last = (self.size - masks[there - 1]) / self.size if there else 1.0
        there += there < self.count and last >= self.append_at and not has_eos
        if there == self.finished:
            return RowPeek(0)
        length = self.base + there * self.size + self.tail - self.cached
        return RowPeek(length, there == 1 < self.count)

    def close(self, frame: Frame, winner: int, masks: list[int]) -> None:
        last = frame.first + frame.blocks[winner]
        forced = frame.may_force[winner, : last - frame.first].tolist()
        self.activated[frame.first : last] = forced
        self.existing = last
        self.cached += frame.commit
        while self.finished < last and not masks[self.finished]:
            self.finished += 1

    def block_views(self, frame: Frame, winner: int, masks: list[int]) -> list[BlockView]:
        views = []
        if frame.start == 0 and self.base:
            views.append(BlockView(0, self.base, "to_cache", 0))
        in_cache = max(0, frame.start - self.base) // self.size
        for block in range(in_cache, frame.first):
            views.append(_block_view(self, block, "to_cache", masks))
        forced = frame.may_force[winner, : frame.blocks[winner]].tolist()
        for block, active in enumerate(forced, frame.first):
            views.append(_block_view(self, block, "active" if active else "semi", masks))
        return views


def make_window(layout: Layout, config: DecodeConfig) -> Window:
    kind = Pipeline if config.window == "pipeline" else BlockWindow
    return kind(layout, config)


def layout_behind(prompt: int, aligned: bool, config: DecodeConfig) -> Layout:
    """Blocks behind a prompt. `aligned`: they are counted from position 0, so that the first one
    may begin with the prompt's last tokens."""
    size = config.max_new_tokens if config.window == "canvas" else config.block_size
    if not aligned or config.window == "canvas":
        return Layout(prompt, size, config.blocks)
    overlap = prompt % config.block_size
    count = -(-(overlap + config.max_new_tokens) // config.block_size)
    return Layout(prompt - overlap, size, count)


def layout_of_gaps(prompt: int, region: int, behind: int, config: DecodeConfig) -> Layout:
    """Blocks over the `region` from the first gap to the last, with pinned text `behind` it.

    They are as equal as can be, and no longer than `block_size`. What is missing to whole blocks is
    taken of the text behind, or else of the prompt: its tokens are pinned, and count as filled.
    """
    longest = region if config.window == "canvas" else config.block_size
    for count in range(-(-region // longest), region + 1):
        size = -(-region // count)
        missing = count * size - region
        if missing <= prompt + behind:
            break
    right = min(missing, behind)
    return Layout(prompt - (missing - right), size, count, behind - right)


def _block_view(window: Window, block: int, state: BlockState, masks: list[int]) -> BlockView:
    start = window.base + block * window.size
    return BlockView(start, start + window.size, state, masks[block])
