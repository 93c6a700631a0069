"""Every decoder as docs/decoding.md tells it, branch by branch, with lists and dictionaries.

Slow and literal on purpose, and made of nothing from `lopa.decoding`: the vectorised decoder is
checked against it on random statistics. `options` is a DecodeConfig, whose names the rules have.
Where the documentation is silent, a comment says what the rule is. How many branches "auto" takes
is the one thing that is not told here: `auto` has the numbers, by round. A branch accepted as
`exact` changes nothing but the number of rounds: those runs are the ones without branches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from lopa.config import DecodeConfig

# (round, tokens of the row, position) → (token, max_prob, ranking)
StatsOf = Callable[[int, tuple[int, ...], int], tuple[int, float, float]]
# What a row's forward says of each of its masks.
Found = dict[int, tuple[int, float, float]]


@dataclass(frozen=True)
class PlainModel:
    """What of a model the rules depend on."""

    mask: int
    eos: Collection[int]
    shift: bool = True
    aligned: bool = False  # blocks are counted from position 0, not from the end of the prompt


@dataclass(frozen=True)
class Draft:
    """A lookahead: a token placed ahead of its turn."""

    position: int
    token: int
    ranking: float
    max_prob: float


@dataclass
class PlainBlock:
    start: int
    end: int
    state: str  # active, to_cache, in_cache
    full: bool  # fully activated


@dataclass
class PlainBranch:
    tokens: list[int]
    blocks: list[PlainBlock] = field(default_factory=list)
    eos: bool = False  # one was placed: not those of the prompt
    draft: Draft | None = None  # the anchor has none

    def place(self, position: int, token: int, model: PlainModel) -> None:
        self.tokens[position] = token
        self.eos = self.eos or token in model.eos


@dataclass
class PlainRound:
    start: int  # first position forwarded
    commit: int  # tokens from there that go to the cache
    rows: list[tuple[int, int, bool]]  # of each branch: masks that may be filled, end, EOS in it
    scores: list[float]
    opinions: list[tuple[int, float]]  # of each lookahead: what the anchor predicts there
    refused: set[int]  # branches that may not win
    winner: int
    fills: list[tuple[int, int, float, str]]  # position, token, max_prob, kind
    spawned: list[Draft]
    asked: int | None = None  # positions that statistics are asked for; None: the masks


@dataclass
class PlainRun:
    tokens: list[int] = field(default_factory=list)  # the new ones, of all blocks there are
    finish: str = ""
    rounds: list[PlainRound] = field(default_factory=list)


# -- what all decoders share ------------------------------------------------------------------


def masks_in(tokens: Sequence[int], start: int, end: int, model: PlainModel) -> list[int]:
    return [p for p in range(start, end) if tokens[p] == model.mask]


def score_all(
    rows: list[PlainBranch], seen: list[Found], options: DecodeConfig, model: PlainModel
) -> list[float]:
    """Of each branch, by its own masks; the anchor is the last."""
    scores = []
    for row, found in zip(rows, seen, strict=True):
        if options.score == "fills":
            # The tokens it would bring now: those that pass the threshold. An EOS does not count,
            # nor does a fill that would be forced.
            score = 0.0
            for token, max_prob, _ in found.values():
                if max_prob > options.threshold and token not in model.eos:
                    score += max_prob
            if row.draft is not None:
                # The lookahead token itself counts as one, but not where it has no rival and the
                # anchor is not asked.
                if len(rows) > 2 or options.accept == "agreed":
                    score += 1
                score *= row.draft.max_prob**options.creation_weight
        else:
            # The mean over the least confident masks, at least one; 1 where none is left.
            worst = sorted(ranking for _, _, ranking in found.values())
            worst = worst[: max(1, int(len(worst) * options.score_fraction))]
            score = sum(worst) / len(worst) if worst else 1.0
            creation = 1.0 if row.draft is None else row.draft.ranking
            weight = options.creation_weight
            score = weight * creation + (1 - weight) * score
        scores.append(score)
    return scores


def opinions_of(rows: list[PlainBranch], seen: list[Found]) -> list[tuple[int, float]]:
    """The token that the anchor predicts where each branch has placed its own, and how likely."""
    return [seen[-1][row.draft.position][:2] for row in rows if row.draft is not None]


def refused_of(
    rows: list[PlainBranch],
    seen: list[Found],
    block_of: Callable[[int], int],
    options: DecodeConfig,
) -> set[int]:
    """Accept `agreed`: the branches that may not win.

    Those whose token is not the one that the anchor predicts there in the same round, or whose
    probability there is not above `agreement`. In a block behind that of the anchor's first mask
    it is `agreement_ahead`.
    """
    refused: set[int] = set()
    if options.accept != "agreed":
        return refused
    first = block_of(min(seen[-1]))
    for number, row in enumerate(rows):
        if row.draft is None:
            continue  # the anchor itself always may
        token, max_prob, _ = seen[-1][row.draft.position]
        is_ahead = block_of(row.draft.position) > first
        least = options.agreement_ahead if is_ahead else options.agreement
        if token != row.draft.token or max_prob <= least:
            refused.add(number)
    return refused


def winner_of(scores: list[float], refused: set[int], options: DecodeConfig) -> int:
    """The first of the best that may win: ties go to the best-ranked lookahead, last of all to the
    anchor.

    By `fills`, where the anchor is not asked, a lookahead without rivals must bring more than the
    anchor: a tie is the anchor's.
    """
    if options.score == "fills" and options.accept == "score" and len(scores) == 2:
        return 0 if scores[0] > scores[1] else 1
    best = len(scores) - 1
    for number in reversed(range(len(scores))):
        if number not in refused and scores[number] >= scores[best]:
            best = number
    return best


def merged_of(
    rows: list[PlainBranch],
    seen: list[Found],
    scores: list[float],
    refused: set[int],
    winner: int,
    options: DecodeConfig,
    model: PlainModel,
) -> set[int]:
    """Accept `agreed` with `merge`: where the winner is filled on the word of other branches.

    From the winner on, in the order of their scores, each branch that may win joins if it fits
    those that have joined before it. When the anchor wins nobody joins.
    """
    if not options.merge or rows[winner].draft is None:
        return set()

    def predicts(number: int, position: int, token: int) -> bool:
        """At a mask of its own, with a probability above `agreement`."""
        if position not in seen[number]:
            return False
        expected, max_prob, _ = seen[number][position]
        return expected == token and max_prob > options.agreement

    def confident(number: int) -> dict[int, int]:
        """Its predictions above the threshold, without EOS tokens."""
        return {
            position: token
            for position, (token, max_prob, _) in seen[number].items()
            if max_prob > options.threshold and token not in model.eos
        }

    def fits(number: int, other: int) -> bool:
        """They predict each other's lookahead token, and the branch expects no other token where
        the one before it is confident."""
        mine, its = rows[number].draft, rows[other].draft
        assert mine is not None
        assert its is not None
        if not predicts(number, its.position, its.token):
            return False
        if not predicts(other, mine.position, mine.token):
            return False
        for position, token in confident(other).items():
            if position in seen[number] and seen[number][position][0] != token:
                return False
        return True

    others = [n for n in range(len(rows) - 1) if n != winner and n not in refused]
    joined, added = [winner], set()
    for number in sorted(others, key=lambda n: (-scores[n], n)):
        if not all(fits(number, other) for other in joined):
            continue
        for position, token in confident(number).items():
            if all(predicts(other, position, token) for other in joined):
                added.add(position)
        draft = rows[number].draft
        assert draft is not None
        added.add(draft.position)  # an EOS too, where lookaheads may place one
        joined.append(number)
    return added


def drafts_of(
    row: PlainBranch,
    found: Found,
    prompt: int,
    many: int,
    options: DecodeConfig,
    model: PlainModel,
) -> list[Draft]:
    """Where the next round looks ahead, from the winner as it is after its fills."""
    left = [p for p in found if row.tokens[p] == model.mask]
    if not options.lookahead_eos:
        # None that would end the text, and none behind an EOS. The first EOS counts, even if
        # there are masks to the left of it; those of the prompt do not.
        left = [p for p in left if found[p][0] not in model.eos]
        ends = [p for p in range(prompt, len(row.tokens)) if row.tokens[p] in model.eos]
        if ends:
            left = [p for p in left if p < ends[0]]
    # The floor itself is allowed. What is refused takes no branch away from the others.
    left = [p for p in left if found[p][1] >= options.lookahead_floor]
    ranked = sorted(left, key=lambda p: (-found[p][2], p))
    return [Draft(p, found[p][0], found[p][2], found[p][1]) for p in ranked[:many]]


def branches_after(index: int, options: DecodeConfig, auto: Sequence[int]) -> int:
    """How many lookaheads a round may place for the next."""
    return auto[index - 1] if options.branches == "auto" else options.branches


def with_drafts(row: PlainBranch, drafts: list[Draft], model: PlainModel) -> list[PlainBranch]:
    """The rows of the next round: a copy for each lookahead, and the anchor last."""
    row.draft = None
    rows = []
    for draft in drafts:
        branch = copy.deepcopy(row)
        branch.place(draft.position, draft.token, model)
        branch.draft = draft
        rows.append(branch)
    return [*rows, row]


def reason_to_stop(
    row: PlainBranch, prompt: int, options: DecodeConfig, model: PlainModel
) -> str | None:
    """Early stop: everything left of the first EOS is filled.

    Where blocks are counted from position 0 the last of them may go beyond what was asked for;
    then it is enough that so much is filled.
    """
    if not options.early_stop:
        return None
    filled = 0
    for token in row.tokens[prompt:]:
        if token == model.mask:
            break
        if token in model.eos:
            return "eos"
        filled += 1
    return "length" if model.aligned and filled >= options.max_new_tokens else None


def best_of(positions: list[int], found: Found) -> int:
    """The best ranked; of equals the first."""
    return max(positions, key=lambda p: (found[p][2], -p))


def first_block(prompt: list[int], size: int, model: PlainModel) -> int:
    """Where it begins: with the last tokens of the prompt, if blocks are counted from 0."""
    return len(prompt) - len(prompt) % size if model.aligned else len(prompt)


def blocks_for(prompt: list[int], options: DecodeConfig, model: PlainModel) -> int:
    """What was asked for in whole blocks: rounded down, but up if they are counted from 0."""
    size = options.block_size
    if not model.aligned:
        return options.max_new_tokens // size
    tokens = len(prompt) % size + options.max_new_tokens
    return tokens // size + (tokens % size > 0)


# -- the pipeline: d2f, lopa ------------------------------------------------------------------


def plain_pipeline(
    prompt: list[int],
    stats_of: StatsOf,
    options: DecodeConfig,
    model: PlainModel,
    auto: Sequence[int] = (),
) -> PlainRun:
    """LoPA on D2F's pipeline; without branches it is D2F."""
    size = options.block_size
    base = first_block(prompt, size, model)
    most = blocks_for(prompt, options, model)
    # Lookaheads in rank order, the anchor last.
    rows = [PlainBranch(prompt[:base], [PlainBlock(0, base, "to_cache", True)])]
    run = PlainRun()

    def decoded(row: PlainBranch, block: PlainBlock) -> float:
        masks = masks_in(row.tokens, block.start, block.end, model)
        length = block.end - block.start
        return (length - len(masks)) / length if length else 1.0

    def end(row: PlainBranch, reason: str) -> PlainRun:
        run.tokens, run.finish = row.tokens[len(prompt) :], reason
        return run

    for index in range(1, 10**6):
        for row in rows:
            last = row.blocks[-1]
            if len(row.blocks) <= most and not row.eos and decoded(row, last) >= options.append_at:
                row.blocks.append(PlainBlock(last.end, last.end + size, "active", False))
                # An aligned first block begins with what is left of the prompt.
                row.tokens += (prompt[last.end :] + [model.mask] * size)[:size]
            for left, right in zip(row.blocks, row.blocks[1:], strict=False):
                if decoded(row, left) >= options.activate_at:
                    right.full = True
        anchor = rows[-1]
        if all(b.state != "active" for b in anchor.blocks):
            return end(anchor, "eos" if anchor.eos else "length")
        start = sum(b.end - b.start for b in anchor.blocks if b.state == "in_cache")
        commit = sum(b.end - b.start for b in anchor.blocks if b.state == "to_cache")

        seen: list[Found] = []
        for row in rows:
            key = tuple(row.tokens)
            found: Found = {}
            for block in row.blocks:
                if block.state == "active":
                    for p in masks_in(row.tokens, block.start, block.end, model):
                        found[p] = stats_of(index, key, p)
            seen.append(found)
        scored = [(len(f), len(r.tokens), r.eos) for r, f in zip(rows, seen, strict=True)]
        scores = score_all(rows, seen, options, model)
        refused = refused_of(rows, seen, lambda p: (p - base) // size, options)
        winner = winner_of(scores, refused, options)
        merged = merged_of(rows, seen, scores, refused, winner, options, model)
        opinions = opinions_of(rows, seen)
        row, found = rows[winner], seen[winner]

        fills = []
        for block in row.blocks:
            if block.state == "active":
                here = masks_in(row.tokens, block.start, block.end, model)
                passed = [p for p in here if found[p][1] > options.threshold]
                chosen = dict.fromkeys(set(here) & merged, "merged")
                chosen |= dict.fromkeys(passed, "threshold")
                if not chosen and here and block.full:
                    chosen = {best_of(here, found): "forced"}
                fills += [(p, *found[p][:2], chosen[p]) for p in sorted(chosen)]
        for position, token, *_ in fills:
            row.place(position, token, model)
        many = branches_after(index, options, auto)
        drafts = drafts_of(row, found, len(prompt), many, options, model)
        run.rounds.append(
            PlainRound(start, commit, scored, scores, opinions, refused, winner, fills, drafts)
        )

        reason = reason_to_stop(row, len(prompt), options, model)
        if reason is not None:
            return end(row, reason)
        for block in row.blocks:
            if block.state == "to_cache":
                block.state = "in_cache"
            elif block.state == "active":
                if masks_in(row.tokens, block.start, block.end, model):
                    break
                block.state = "to_cache"
        rows = with_drafts(row, drafts, model)
    raise AssertionError("the plain loop did not end")


# -- one block after the other: fast-dllm and lopa; one block in all: vanilla and lopa ----------


def plain_blocks(
    prompt: list[int],
    stats_of: StatsOf,
    options: DecodeConfig,
    model: PlainModel,
    auto: Sequence[int] = (),
) -> PlainRun:
    """Fast-dLLM's blocks, or the canvas, which is one block. The caches only say what a round
    forwards and keeps."""
    size = options.max_new_tokens if options.window == "canvas" else options.block_size
    every = len(prompt) + options.max_new_tokens
    rows = [PlainBranch(prompt + [model.mask] * options.max_new_tokens)]
    run = PlainRun()
    index = 0
    for left in range(len(prompt), every, size):
        step = 0  # rounds that this block has had
        while masks_in(rows[-1].tokens, left, left + size, model):
            index += 1
            start, commit, end = 0, 0, every
            if options.cache == "prefix" and step == 0:
                commit = left
            elif options.cache == "prefix":
                start = left
            elif options.cache == "dual" and step == 0:
                commit = every
            elif options.cache == "dual":
                start, commit, end = left, size, left + size

            seen: list[Found] = []
            for row in rows:
                key = tuple(row.tokens[:end])
                here = masks_in(row.tokens, left, left + size, model)
                seen.append({p: stats_of(index, key, p) for p in here})
            scored = [(len(f), end, r.eos) for r, f in zip(rows, seen, strict=True)]
            scores = score_all(rows, seen, options, model)
            refused = refused_of(rows, seen, lambda p: 0, options)  # a block at a time
            winner = winner_of(scores, refused, options)
            merged = merged_of(rows, seen, scores, refused, winner, options, model)
            opinions = opinions_of(rows, seen)
            row, found = rows[winner], seen[winner]

            refreshes = options.cache != "none" and step == 0
            if refreshes and model.shift and left in found:
                chosen = {left: "forced"}  # later forwards cannot predict it
            else:
                chosen = fills_of_block(found, step, options, model)
            # What the rule passes by itself is no merging. A block that is filled with anything
            # else forces nothing, not even its best (Fast-dLLM's rule has it beside others).
            more = merged - {p for p, kind in chosen.items() if kind == "threshold"}
            if more:
                chosen = {p: kind for p, kind in chosen.items() if kind != "forced"}
                chosen |= dict.fromkeys(more, "merged")
            fills = [(p, *found[p][:2], chosen[p]) for p in sorted(chosen)]
            for position, token, *_ in fills:
                row.place(position, token, model)
            many = branches_after(index, options, auto)
            drafts = drafts_of(row, found, len(prompt), many, options, model)
            run.rounds.append(
                PlainRound(start, commit, scored, scores, opinions, refused, winner, fills, drafts)
            )
            run.tokens, run.finish = row.tokens[len(prompt) :], "eos" if row.eos else "length"
            reason = reason_to_stop(row, len(prompt), options, model)
            if reason is not None:
                run.finish = reason
                return run
            rows = with_drafts(row, drafts, model)
            step += 1
    return run


def fills_of_block(
    found: Found, step: int, options: DecodeConfig, model: PlainModel
) -> dict[int, str]:
    """The positions that a round fills, with the kind of each."""
    if not found:  # the lookahead took the last mask
        return {}
    if options.factor is not None:
        # Walk from the most probable on; the second and later must reach 1 − factor / (k + 1).
        ranked = sorted(found, key=lambda p: (-found[p][1], p))
        accepted = 0
        for k, position in enumerate(ranked, start=1):
            accepted = k - 1
            if k > 1 and found[position][1] < 1 - options.factor / (k + 1):
                break
        # The published walk accepts at least one, and ends on the last in any case.
        if accepted in (0, len(ranked) - 1):
            accepted += 1
        return dict.fromkeys(ranked[:accepted], "threshold")
    if options.steps is not None:
        steps = options.steps // options.blocks
        if model.shift:
            count = dream_count(len(found), step, steps)
        else:
            block = options.max_new_tokens // options.blocks
            count = even_count(block, step, steps)
        ranked = sorted(found, key=lambda p: (-found[p][2], p))
        return dict.fromkeys(ranked[:count], "count")
    best = best_of(list(found), found)
    if options.window == "canvas":  # D2F's rule, on a block that is fully activated
        passed = [p for p in found if found[p][1] > options.threshold]
        return dict.fromkeys(passed, "threshold") or {best: "forced"}
    passed = [p for p in found if found[p][1] >= options.threshold]
    return {best: "forced"} | dict.fromkeys(passed, "threshold")


def dream_count(masks: int, step: int, steps: int) -> int:
    """Dream's: a share of the masks that there are now, in torch's float32; the last takes all."""
    if step >= steps - 1:
        return masks
    times = torch.linspace(1, 1e-3, steps + 1)
    share = 1 - times[step + 1] / times[step]
    return int(torch.tensor(masks, dtype=torch.float32) * share)


def even_count(block: int, step: int, steps: int) -> int:
    """LLaDA's and SDAR's: a whole block shared evenly, the first steps taking what is over."""
    if step >= steps:
        return block
    return block // steps + (1 if step < block % steps else 0)


# -- sdar -------------------------------------------------------------------------------------


def plain_sdar(
    prompt: list[int],
    stats_of: StatsOf,
    options: DecodeConfig,
    model: PlainModel,
    auto: Sequence[int] = (),
) -> PlainRun:
    """One block after the other, each cached by the first round of the next. No block follows an
    EOS."""
    size = options.block_size
    base = first_block(prompt, size, model)
    row = PlainBranch(list(prompt))
    run = PlainRun(finish="length")
    index = cached = 0
    for number in range(blocks_for(prompt, options, model)):
        left = base + number * size
        if row.eos:
            return run
        row.tokens += [model.mask] * (left + size - len(row.tokens))
        step = 0
        while here := masks_in(row.tokens, left, left + size, model):
            index += 1
            key = tuple(row.tokens)
            found = {p: stats_of(index, key, p) for p in here}
            quota = even_count(size, step, options.steps or size)
            passed = [p for p in here if found[p][1] > options.threshold]
            if options.order == "sequential":
                chosen = dict.fromkeys(here[:quota], "threshold")  # nothing counts as forced
            elif len(passed) >= quota:
                chosen = dict.fromkeys(passed, "threshold")
            else:
                ranked = sorted(here, key=lambda p: (-found[p][2], p))
                chosen = {p: "threshold" if p in passed else "forced" for p in ranked[:quota]}
            fills = [(p, *found[p][:2], chosen[p]) for p in sorted(chosen)]
            scored = [(len(found), len(row.tokens), row.eos)]
            scores = score_all([row], [found], options, model)
            run.rounds.append(
                PlainRound(cached, left - cached, scored, scores, [], set(), 0, fills, [])
            )
            for position, token, *_ in fills:
                row.place(position, token, model)
            cached = left
            step += 1
            run.tokens, run.finish = row.tokens[len(prompt) :], "eos" if row.eos else "length"
            reason = reason_to_stop(row, len(prompt), options, model)
            if reason is not None:
                run.finish = reason
                return run
    return run


# -- llada2 -----------------------------------------------------------------------------------


def plain_llada2(
    prompt: list[int],
    stats_of: StatsOf,
    options: DecodeConfig,
    model: PlainModel,
    auto: Sequence[int] = (),
) -> PlainRun:
    """LLaDA2.0's loop; with an edit_threshold LLaDA2.1's. Blocks as in SDAR's."""
    size, limit = options.block_size, options.edit_threshold
    base = first_block(prompt, size, model)
    row = PlainBranch(list(prompt))
    run = PlainRun(finish="length")
    index = cached = 0
    for number in range(blocks_for(prompt, options, model)):
        left = base + number * size
        if row.eos and (limit is None or options.early_stop):
            return run
        row.tokens += [model.mask] * (left + size - len(row.tokens))
        step = free = 0
        while True:
            here = masks_in(row.tokens, left, left + size, model)
            if not here:
                free += 1
                if limit is None or free > options.edit_rounds:
                    break
            index += 1
            key = tuple(row.tokens)
            placed = [p for p in range(max(left, len(prompt)), left + size) if p not in here]
            seen = {
                p: stats_of(index, key, p) for p in (here if limit is None else [*here, *placed])
            }
            if limit is None:
                total = max(1, min(options.steps or 32, options.max_new_tokens // options.quota))
                quota = even_count(size, step, total)
            else:
                quota = options.quota
            passed = [p for p in here if seen[p][1] > options.threshold]
            chosen = dict.fromkeys(passed, "threshold")
            if len(passed) < quota:
                ranked = sorted(here, key=lambda p: (-seen[p][2], p))
                chosen = {p: "threshold" if p in passed else "forced" for p in ranked[:quota]}
            fills = [(p, *seen[p][:2], chosen[p]) for p in sorted(chosen)]
            edits = []
            if limit is not None:
                for p in placed:
                    token, max_prob, _ = seen[p]
                    if token != row.tokens[p] and max_prob > limit:
                        edits.append((p, token, max_prob, "edited"))
            found = {p: seen[p] for p in here}
            scored = [(len(found), len(row.tokens), row.eos)]
            scores = score_all([row], [found], options, model)
            run.rounds.append(
                PlainRound(
                    cached,
                    left - cached,
                    scored,
                    scores,
                    [],
                    set(),
                    0,
                    fills + edits,
                    [],
                    len(seen),
                )
            )
            for position, token, *_ in fills + edits:
                row.tokens[position] = token
            row.eos = any(token in model.eos for token in row.tokens[len(prompt) :])
            cached = left
            step += 1
            run.tokens, run.finish = row.tokens[len(prompt) :], "eos" if row.eos else "length"
            if limit is None:
                reason = reason_to_stop(row, len(prompt), options, model)
                if reason is not None:
                    run.finish = reason
                    return run
            elif not here and not edits:
                break
        if limit is not None:  # before that a token may change
            reason = reason_to_stop(row, len(prompt), options, model)
            if reason is not None:
                run.finish = reason
                return run
    return run
