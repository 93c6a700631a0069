"""The head of a model in kernels: logits of what a round wants, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.kernels.fast_linear import logits
from lopa.kernels.triton.confidence import VocabularyPart, confidence
from lopa.kernels.triton.kv_write import gather
from lopa.kernels.triton.lattice import fill_lattice
from lopa.models.transformer import Transformer
from lopa.runner import graph_inputs
from lopa.runner.batch import Batch
from lopa.runner.device_automaton import lattice_rows, tables_of
from lopa.runner.graph_inputs import HeadInputs, HeadSizes
from lopa.types import Automaton, Plan


class FusedHead:
    """hidden: of a forward, [T, hidden]. carry: by slot, [slots, hidden]."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.part = _vocabulary_part(model)  # None: it has all of it

    def run(
        self, hidden: Tensor, carry: Tensor, inputs: HeadInputs[Tensor], sizes: HeadSizes
    ) -> Tensor:
        """[3, N] int32: token, and the bits of max_prob and ranking."""
        out = torch.empty(3, sizes.wanted, dtype=torch.int32, device=hidden.device)
        wanted = gather(hidden, carry, inputs.wanted_from)
        confidence(
            logits(self.model, wanted),
            inputs.settings,
            inputs.temperature,
            self.model.config.mask_id,
            out,
            sampling=sizes.sampling,
            never=inputs.never if sizes.never else None,
            expected=inputs.expected if sizes.never else None,
            part=self.part,
        )
        return out

    @torch.inference_mode()
    def run_constrained(
        self,
        hidden: Tensor,
        carry: Tensor,
        batch: Batch,
        configs: Sequence[DecodeConfig],
        sizes: HeadSizes,
        to: Tensor,  # [3, N] int32 on the host
    ) -> None:
        """The head of a batch in which answers have to fit."""
        inputs = graph_inputs.head_on(hidden.device, batch, configs, sizes)
        wanted = gather(hidden, carry, inputs.wanted_from)
        found, mask_id = logits(self.model, wanted), self.model.config.mask_id
        out = torch.zeros(3, sizes.wanted, dtype=torch.int32, device=hidden.device)
        end = 0
        by_plan = zip((plan for _, plan in batch.plans), batch.wanted.counts, strict=True)
        for automaton, same in groupby(by_plan, key=_automaton):
            neighbours = list(same)
            begin, end = end, end + sum(count for _, count in neighbours)
            if begin == end:
                continue
            here = slice(begin, end)
            settings, heat = inputs.settings[here], inputs.temperature[here]
            if automaton is None:
                part = torch.empty(3, end - begin, dtype=torch.int32, device=hidden.device)
                confidence(
                    found[here],
                    settings,
                    heat,
                    mask_id,
                    part,
                    sampling=sizes.sampling,
                    never=inputs.never[here] if sizes.never else None,
                    expected=inputs.expected[here] if sizes.never else None,
                )
                out[:, here] = part
            else:
                rows = lattice_rows([plan for plan, _ in neighbours], mask_id, hidden.device)
                tables = tables_of(automaton, hidden.device)
                given = found[here], settings, heat, tables, rows, out, begin
                fill_lattice(*given, sampling=sizes.sampling)
        to.copy_(out, non_blocking=True)


def _vocabulary_part(model: Transformer) -> VocabularyPart | None:
    part, size = model.part, model.config.vocab_size
    if part.count == 1:
        return None
    widest = -(-size // part.count)
    return VocabularyPart(part.held(size).start, part.index, part.count, widest, model.sum_parts)


def _automaton(of_plan: tuple[Plan, int]) -> Automaton | None:
    constraint = of_plan[0].constraint
    return None if constraint is None else constraint.automaton
