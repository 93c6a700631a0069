"""Statistics from logits whose vocabulary is spread over ranks, without gathering them.

The same numbers as `lopa.runner.statistics`, up to the order of sums: each rank gives the best and
the sums of its own part, [N, few] a rank, and every rank combines them in the same order. Where the
entropy ranks there is a second sum; where top-p or top-k filter, the cut is found by bisection, one
small sum a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.distributed.mesh import Mesh
from lopa.runner.class_scores import ScoreColumns, perturbed, scores_of
from lopa.runner.statistics import ENTROPY_EPS, gumbel, only_expected
from lopa.types import Automaton


@dataclass(frozen=True, slots=True)
class VocabularyStatistics:
    """A `Statistics`: takes this rank's columns of the logits."""

    mesh: Mesh
    first: int  # id of the first column

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        mask_id: int,
        config: DecodeConfig,
        never: Sequence[int] = (),
        expected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = logits.double() if config.needs_fp64 else logits.float()
        ids = torch.arange(self.first, self.first + logits.shape[1], device=logits.device)
        excluded = torch.isin(ids, torch.tensor([mask_id, *never], device=ids.device))
        plain = keys = logits
        if config.temperature > 0:
            shaped = self._keep_top(logits / config.temperature, config.top_p, config.top_k)
            keys = shaped + gumbel(positions, config.seed, ids)
            if config.tempers_confidence:
                logits = shaped
        keys = keys.masked_fill(excluded, -torch.inf)
        if expected is not None:
            keys = only_expected(keys, expected, ids)
        best, own = keys.max(dim=-1)
        columns = [best, ids[own], _at(logits, own)]
        if config.temperature > 0:  # where the filter leaves nothing but such tokens
            spare, spare_own = plain.masked_fill(excluded, -torch.inf).max(dim=-1)
            columns += [spare, ids[spare_own], _at(logits, spare_own)]
        top = logits.topk(2, dim=-1) if logits.shape[1] > 1 else logits.topk(1, dim=-1)
        highest = top.values[:, 0]
        shifted = (logits - highest[:, None]).exp()  # −inf − −inf: a part without a token left
        total = torch.where(torch.isneginf(highest), 0.0, shifted.sum(dim=-1))
        second = top.values[:, 1] if logits.shape[1] > 1 else torch.full_like(highest, -torch.inf)
        columns += [highest, total, ids[top.indices[:, 0]], second]
        # [parts, N, columns], as fp64: it holds every token id and fp32 exactly.
        parts = self.mesh.gather_parts(torch.stack([c.double() for c in columns], dim=-1))
        *found, highest, total, highest_id, second = parts.unbind(-1)
        # The first part wins a tie: it holds the lower ids.
        winner = found[0].argmax(dim=0)[None]
        token, level = (c.gather(0, winner)[0] for c in found[1:3])
        if config.temperature > 0:
            nothing = torch.isneginf(found[0].amax(dim=0))
            winner = found[3].argmax(dim=0)[None]
            token = torch.where(nothing, found[4].gather(0, winner)[0], token)
            level = torch.where(nothing, found[5].gather(0, winner)[0], level)
        overall = highest.amax(dim=0)
        norm = (total * (highest - overall).exp()).sum(dim=0)
        chance: Callable[[Tensor], Tensor] = lambda x: (x - overall).exp() / norm  # noqa: E731
        token = token.long()
        max_prob = chance(level).to(logits.dtype)
        if config.ranking == "max_prob":
            return token, max_prob, max_prob
        if config.ranking == "margin":
            other = torch.where(highest_id.long() == token, second, highest).amax(dim=0)
            return token, max_prob, max_prob - chance(other).to(logits.dtype)
        at = (overall + norm.log())[:, None].to(logits.dtype)
        probs = (logits - at).exp()
        entropy = (probs * torch.log(probs + ENTROPY_EPS)).sum(dim=-1)
        return token, max_prob, self.mesh.sum_over_parts(entropy)

    def class_scores(
        self, logits: Tensor, positions: Tensor, config: DecodeConfig, automaton: Automaton
    ) -> ScoreColumns:
        """A `FindScores`: takes this rank's columns of the logits."""
        logits = logits.double() if config.needs_fp64 else logits.float()
        keys = None
        if config.temperature > 0:
            keys = perturbed(logits, self._keep_top, positions, config, self.first)
        highest = self._most(logits.amax(dim=-1))
        own = scores_of(logits, keys, highest, config, automaton, self.first)
        columns = [x.double() for x in own if x is not None]
        parts = self.mesh.gather_parts(torch.stack(columns))  # [parts, columns, classes, N]
        key, token, logit, mass, *means = parts.unbind(1)
        # The first part wins a tie: it holds the lower ids.
        winner = key.argmax(dim=0)[None]
        top, token, logit = (x.gather(0, winner)[0] for x in (key, token, logit))
        mean = None
        if means:
            share = (mass - mass.amax(dim=0)).exp()
            mean = (share * means[0]).sum(dim=0) / share.sum(dim=0)
        return ScoreColumns(top, token.long(), logit, mass.logsumexp(dim=0), mean)

    def _keep_top(self, logits: Tensor, top_p: float, top_k: int) -> Tensor:
        """top-p, then top-k: everything else becomes −inf, as on one device."""
        if top_p < 1.0:
            highest = self._most(logits.amax(dim=-1))
            weight = (logits - highest[:, None]).exp()
            total = self.mesh.sum_over_parts(weight.sum(dim=-1))
            logits = self._keep(logits, weight / total[:, None], lambda before: before <= top_p)
        if top_k > 0:
            logits = self._keep(logits, torch.ones_like(logits), lambda before: before < top_k)
        return logits

    def _keep(self, logits: Tensor, weight: Tensor, fits: Callable[[Tensor], Tensor]) -> Tensor:
        """Keep each token if what comes before it, summed over all ranks, fits."""
        order = _ordered(logits)
        cut = self._cut(order, weight, fits)[:, None]
        # Of equals at the cut those with the lowest ids come first.
        equal = order == cut
        above = self.mesh.sum_over_parts(weight.masked_fill(order <= cut, 0.0).sum(dim=-1))
        counts = self.mesh.gather_parts(equal.sum(dim=-1))
        earlier = counts[: self.mesh.tensor_rank].sum(dim=0)[:, None] + equal.cumsum(dim=-1) - 1
        kept = fits(above[:, None] + earlier * weight)
        return logits.masked_fill((order < cut) | (equal & ~kept), -torch.inf)

    def _cut(self, order: Tensor, weight: Tensor, fits: Callable[[Tensor], Tensor]) -> Tensor:
        """[N] the least value such that what lies above it, summed over all ranks, fits."""
        bits = 64 if order.dtype == torch.int64 and weight.dtype == torch.float64 else 32
        low = torch.full_like(order[:, 0], -(2 ** (bits - 1)))
        high = torch.full_like(low, 2 ** (bits - 1) - 1)
        for _ in range(bits):
            # floor((low + high) / 2) without leaving int64
            middle = (low & high) + ((low ^ high) >> 1)
            above = weight.masked_fill(order <= middle[:, None], 0.0).sum(dim=-1)
            good = fits(self.mesh.sum_over_parts(above))
            high = torch.where(good, middle, high)
            low = torch.where(good, low, middle + 1)
        return high

    def _most(self, values: Tensor) -> Tensor:
        return self.mesh.gather_parts(values).amax(dim=0)


def _at(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(-1, columns[:, None])[:, 0]


def _ordered(values: Tensor) -> Tensor:
    """Floats as whole numbers in the same order, −inf included."""
    wide = values.dtype == torch.float64
    bits = (values + 0.0).view(torch.int64 if wide else torch.int32).long()  # −0 becomes 0
    return torch.where(bits < 0, bits ^ (2**63 - 1 if wide else 2**31 - 1), bits)
