"""From logits to what they say of each class of an automaton's tokens: see `ClassScores`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.runner.lattice import ClassScores
from lopa.runner.segments import NOTHING, Segments
from lopa.runner.statistics import gumbel, keep_top
from lopa.types import Automaton

# A logit counts as at most so much less than the position's largest: exp of it is not 0 in fp64.
LEAST = 700.0
# What top-p and top-k drop is this much worse than anything they keep: a path has as little of it
# as it can.
DROPPED = 1e9


class ScoreColumns(NamedTuple):
    """`ClassScores`, transposed: [classes, N] each."""

    key: Tensor
    token: Tensor  # int64
    logit: Tensor
    mass: Tensor
    mean: Tensor | None

    def at(self, where: slice | Tensor) -> ScoreColumns:
        """Of some positions."""
        mean = None if self.mean is None else self.mean[:, where]
        key, token, logit, mass = (x[:, where] for x in self[:4])
        return ScoreColumns(key, token, logit, mass, mean)

    def in_fp64(self) -> ScoreColumns:
        mean = None if self.mean is None else self.mean.double()
        key, logit, mass = (x.double() for x in (self.key, self.logit, self.mass))
        return ScoreColumns(key, self.token, logit, mass, mean)

    def transposed(self) -> ClassScores:
        """For a host."""
        mean = None if self.mean is None else self.mean.T.numpy()
        key, token, logit, mass = (x.T.numpy() for x in self[:4])
        return ClassScores(key, token, logit, mass, mean)


def joined(scores: Sequence[ScoreColumns]) -> ScoreColumns:
    """One behind the other, on the host."""
    fields = zip(*(s[:4] for s in scores), strict=True)
    key, token, logit, mass = (torch.cat(x, dim=1).cpu() for x in fields)
    means = [s.mean for s in scores if s.mean is not None]
    return ScoreColumns(key, token, logit, mass, torch.cat(means, dim=1).cpu() if means else None)


# logits, positions, config, automaton → scores
FindScores: TypeAlias = Callable[[Tensor, Tensor, DecodeConfig, Automaton], ScoreColumns]


class TokenClasses:
    """The tokens of each class, of a part of the vocabulary: on a device, made once."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Automaton, dict[tuple[int, int, torch.device], Segments]]
        self._made = WeakKeyDictionary()

    def of(self, automaton: Automaton, first: int, count: int, device: torch.device) -> Segments:
        """first, count: which of the tokens. Class 0 has none: nobody asks."""
        made = self._made.setdefault(automaton, {})
        place = first, count, device
        if place not in made:
            classes = automaton.class_of[first : first + count]
            order = classes.argsort(kind="stable")
            ends = np.searchsorted(classes[order], np.arange(automaton.next.shape[1]), "right")
            groups = np.split(order, ends)[: len(ends)]
            groups[0] = groups[0][:0]
            made[place] = Segments(groups, len(classes), device)
        return made[place]


_token_classes = TokenClasses()


def class_scores(
    logits: Tensor,  # [N, vocab]
    positions: Tensor,  # [N]
    config: DecodeConfig,
    automaton: Automaton,
) -> ScoreColumns:
    logits = logits.double() if config.needs_fp64 else logits.float()
    keys = None
    if config.temperature > 0:
        keys = perturbed(logits, keep_top, positions, config, 0)
    highest = logits.amax(dim=-1)
    return scores_of(logits, keys, highest, config, automaton, 0)


def perturbed(
    logits: Tensor,
    keep: Callable[[Tensor, float, int], Tensor],  # top-p and top-k
    positions: Tensor,
    config: DecodeConfig,
    first: int,  # id of the first column
) -> Tensor:
    """Keys of tokens that are sampled."""
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    keys = logits / config.temperature
    if config.top_p < 1.0 or config.top_k > 0:
        keys = keys.double()
        dropped = torch.isneginf(keep(keys, config.top_p, config.top_k))
        keys = keys - dropped * DROPPED
    return keys + gumbel(positions, config.seed, ids)


def scores_of(
    logits: Tensor,  # [N, columns]
    keys: Tensor | None,  # None: the logits
    highest: Tensor,  # [N] the largest logit of all columns, those of other ranks included
    config: DecodeConfig,
    automaton: Automaton,
    first: int,  # id of the first column
) -> ScoreColumns:
    segments = _token_classes.of(automaton, first, logits.shape[1], logits.device)
    # Transposed: a class is a few whole rows
    level = segments.padded((logits - highest[:, None]).clamp_(min=NOTHING).T)
    padded_keys = None if keys is None else segments.padded(keys.clamp(min=NOTHING).T)
    wants_mean = config.ranking == "neg_entropy"
    shape = segments.groups, len(logits)
    key, logit, mass, mean = level.new_full((4, *shape), NOTHING)
    if padded_keys is not None:
        key = key.to(padded_keys.dtype)
    token = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    for groups, members, values in segments.each(level):
        if members.shape[1] == 1:  # a class of one token
            values = values[:, 0]
            key[groups] = values if padded_keys is None else padded_keys[members[:, 0]]
            token[groups] = members + first
            logit[groups] = mass[groups] = mean[groups] = values
            continue
        top, place = values.max(dim=1)
        below = values.sub_(top[:, None]).clamp_(min=-LEAST)
        chance = below.exp()
        total = chance.sum(dim=1)
        mass[groups] = top + total.log()
        if wants_mean:
            mean[groups] = top + chance.mul_(below).sum(dim=1) / total
        if padded_keys is None:
            key[groups] = logit[groups] = top
        else:
            drawn = padded_keys[members]  # [G, size, N]
            key[groups], place = drawn.max(dim=1)
            logit[groups] = top + below.gather(1, place[:, None])[:, 0]
        token[groups] = members.gather(1, place) + first
    logit, mass, mean = (x.clamp_(min=-LEAST) for x in (logit, mass, mean))
    return ScoreColumns(key, token, logit, mass, mean if wants_mean else None)
