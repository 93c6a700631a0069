"""Filling gaps as docs/decoding.md tells it, with lists and dictionaries, as plain_loop.py does.

The canvas is there from the start: the prompt, masks in the gaps, pinned text behind each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from plain_loop import (
    Found,
    PlainBranch,
    PlainModel,
    PlainRound,
    PlainRun,
    StatsOf,
    best_of,
    branches_after,
    drafts_of,
    fills_of_block,
    masks_in,
    merged_of,
    opinions_of,
    refused_of,
    score_all,
    winner_of,
    with_drafts,
)

from lopa.config import DecodeConfig

Span = tuple[int, int]


def spans_of(prompt: int, region: int, behind: int, most: int) -> list[Span]:
    """The blocks over the gaps: as few as `most` tokens each allow, all equally long.

    Tokens that are missing for that are those right behind the last gap, and where these are too
    few, the last ones of the prompt. Where even these are too few, there are more blocks.
    """
    for count in range(1, region + 1):
        size = next(size for size in range(1, region + 1) if size * count >= region)
        missing = size * count - region
        if size <= most and missing <= behind + prompt:
            first = prompt + region + min(missing, behind) - size * count
            return [(first + i * size, first + (i + 1) * size) for i in range(count)]
    raise AssertionError("blocks of one token always fit")


def _block_of(blocks: list[Span], position: int) -> int:
    return next(n for n, (start, end) in enumerate(blocks) if start <= position < end)


def plain_gaps(
    prompt: list[int],
    canvas: list[int],  # behind the prompt; it ends with pinned text
    stats_of: StatsOf,
    options: DecodeConfig,
    model: PlainModel,
    auto: Sequence[int] = (),
) -> PlainRun:
    tokens = prompt + canvas
    masks = masks_in(tokens, 0, len(tokens), model)
    region, every = masks[-1] + 1 - len(prompt), len(tokens)
    most = region if options.window == "canvas" else options.block_size
    blocks = spans_of(len(prompt), region, every - masks[-1] - 1, most)
    rows = [PlainBranch(tokens)]
    run = PlainRun()
    fresh = True  # the next round is the first of its block
    cached = 0  # pipeline: tokens in the cache
    full = [False] * len(blocks)  # pipeline: fully activated
    while masks_in(rows[-1].tokens, 0, every, model):
        index = len(run.rounds) + 1
        anchor = rows[-1]
        # Blocks without masks left of all others are finished.
        open_blocks = list(blocks)
        while not masks_in(anchor.tokens, *open_blocks[0], model):
            open_blocks.pop(0)
        left, right = open_blocks[0]
        start, commit, end = 0, 0, every
        if options.window == "pipeline":
            start, commit = cached, left - cached
        else:
            open_blocks = open_blocks[:1]
            if options.cache == "prefix":
                start, commit = (0, left) if fresh else (left, 0)
            elif options.cache == "dual":
                start, commit = (0, every) if fresh else (left, right - left)
                end = every if fresh else right
        # By row, since a lookahead may activate a block.
        fulls = []
        for row in rows:
            own = list(full)
            for number, (begin, _) in enumerate(blocks):
                before = [b for b in blocks if b[1] == begin]
                if not before:
                    own[number] = True
                else:
                    size = before[0][1] - before[0][0]
                    decoded = size - len(masks_in(row.tokens, *before[0], model))
                    own[number] |= decoded / size >= (options.activate_at or 0)
            fulls.append(own)
        seen: list[Found] = []
        for row in rows:
            key = tuple(row.tokens[:end])
            here = [p for span in open_blocks for p in masks_in(row.tokens, *span, model)]
            seen.append({p: stats_of(index, key, p) for p in here})
        scored = [(len(f), end, False) for f in seen]
        scores = score_all(rows, seen, options, model)
        refused = refused_of(rows, seen, partial(_block_of, blocks), options)
        winner = winner_of(scores, refused, options)
        merged = merged_of(rows, seen, scores, refused, winner, options, model)
        opinions = opinions_of(rows, seen)
        row, found = rows[winner], seen[winner]
        if options.window == "pipeline":
            chosen = {}
            for number, span in enumerate(blocks):
                here = [p for p in masks_in(row.tokens, *span, model) if p in found]
                fills = dict.fromkeys(set(here) & merged, "merged")
                passed = [p for p in here if found[p][1] > options.threshold]
                fills |= dict.fromkeys(passed, "threshold")
                if not fills and here and fulls[winner][number]:
                    fills = {best_of(here, found): "forced"}
                chosen |= fills
            full, cached = fulls[winner], cached + commit
        else:
            refreshes = options.cache != "none" and fresh
            if refreshes and model.shift and left in found:
                chosen = {left: "forced"}
            else:
                chosen = fills_of_block(found, 0, options, model)
            more = merged - {p for p, kind in chosen.items() if kind == "threshold"}
            if more:
                chosen = {p: kind for p, kind in chosen.items() if kind != "forced"}
                chosen |= dict.fromkeys(more, "merged")
        done = [(p, *found[p][:2], chosen[p]) for p in sorted(chosen)]
        for position, token, *_ in done:
            row.place(position, token, model)
        many = branches_after(index, options, auto)
        drafts = drafts_of(row, found, len(prompt), many, options, model)
        run.rounds.append(
            PlainRound(start, commit, scored, scores, opinions, refused, winner, done, drafts)
        )
        fresh = not masks_in(row.tokens, left, right, model)
        rows = with_drafts(row, drafts, model)
    run.tokens, run.finish = rows[-1].tokens[len(prompt) : len(prompt) + region], "filled"
    return run
