"""How likely a continuation is to a masked diffusion model.

Such a model gives no product over tokens from left to right. The usual bound is estimated as
LLaDA's evaluation does it: mask a random part of the continuation, add up the log-probabilities of
what is masked, weigh by the whole over the part, and take the mean over mask_samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lopa.engine.llm import LLM


def log_likelihood(
    llm: LLM, before: Sequence[int], after: Sequence[int], *, mask_samples: int, seed: int = 0
) -> tuple[float, bool]:
    """The estimate, and whether the model with everything masked would say just that."""
    dice = np.random.default_rng(seed)
    total = len(after)
    found = []
    for sample in range(mask_samples):
        # Spread evenly over how many are masked, so that few mask_samples cover few and many.
        count = 1 + int((sample + dice.random()) * total / mask_samples)
        places = sorted(dice.permutation(total)[:count].tolist())
        scores = _masked(llm, before, after, places)
        told = scores[torch.arange(count), torch.tensor([after[p] for p in places])]
        found.append(float(told.sum()) * total / count)
    everything = _masked(llm, before, after, range(total))
    greedy = everything.argmax(-1).tolist() == list(after)
    return sum(found) / len(found), greedy


def _masked(
    llm: LLM, before: Sequence[int], after: Sequence[int], places: Sequence[int]
) -> torch.Tensor:
    """Log-probabilities [places, vocab] at the places of the continuation, which are masked."""
    ids = [*before, *after]
    for place in places:
        ids[len(before) + place] = llm.config.mask_id
    logits = llm.forward(ids)
    rows = torch.tensor([len(before) + p - llm.config.shift for p in places])
    picked = logits[rows].clone()
    picked[:, llm.config.mask_id] = -torch.inf
    return picked.log_softmax(-1)
