"""What a lost cache can be rebuilt from: the forwards whose keys and values are in it.

Under block attention that is one forward of the committed tokens. Under full attention keys and
values depend on what lay to their right when they were committed, so the winner's row of every
round that committed something is kept, and forwarded once more as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lopa.decoding.decoder import Decoder
from lopa.types import Plan


@dataclass(slots=True)
class ReplayLog:
    plans: list[Plan] = field(default_factory=list)  # one row each; all of them commit that row

    def begin(self, prompt: Sequence[int], decoder: Decoder) -> None:
        """The cache of these tokens was another's: forward them by themselves.

        That is exact under block attention, and as near as any reuse under full attention.
        """
        count = len(prompt)
        blocks = None
        if decoder.config.attention == "block":
            blocks = np.full(count, -1, np.int64)
            if decoder.aligned:
                blocks = np.arange(count, dtype=np.int64) // decoder.config.block_size
        self.plans.append(
            Plan(
                index=1,
                start=0,
                cached=0,
                commit=count,
                rows=np.array([prompt], np.int64),
                row_ends=np.array([count]),
                wanted=np.zeros((1, count), np.bool_),
                block_ids=blocks,
            )
        )

    def add(self, plan: Plan, winner: int) -> None:
        """A round is over: keep what its commit came from."""
        if not plan.commit:
            return
        block = plan.block_ids is not None
        length = plan.commit if block else int(plan.row_ends[winner]) - plan.start
        tokens = plan.rows[winner : winner + 1, :length]
        new = replace(
            plan,
            rows=tokens.copy(),
            row_ends=np.array([plan.start + length]),
            wanted=np.zeros_like(tokens, np.bool_),
            block_ids=plan.block_ids[:length] if plan.block_ids is not None else None,
            constraint=None,
        )
        # What lies within the new window was not read by it, and is overwritten by its commit.
        while self.plans and _covers(new, self.plans[-1]):
            self.plans.pop()
        last = self.plans[-1] if self.plans else None
        if block and last is not None and last.start + last.commit == new.start:
            new = _joined(self.plans.pop(), new)
        self.plans.append(new)


def _covers(new: Plan, old: Plan) -> bool:
    return new.start <= old.start and old.start + old.commit <= new.start + new.commit


def _joined(left: Plan, right: Plan) -> Plan:
    """Two neighbours under block attention as one forward."""
    assert left.block_ids is not None
    assert right.block_ids is not None
    return replace(
        left,
        commit=left.commit + right.commit,
        rows=np.concatenate([left.rows, right.rows], axis=1),
        row_ends=right.row_ends,
        wanted=np.concatenate([left.wanted, right.wanted], axis=1),
        block_ids=np.concatenate([left.block_ids, right.block_ids]),
    )
