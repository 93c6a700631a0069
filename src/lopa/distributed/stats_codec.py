"""What the ranks tell each other in a round: a head of a few words, and packed statistics.

12 bytes a wanted position (token int32, max_prob and ranking fp32), 20 where a decoder compares in
fp64. The ranks of one replica know the same and send a part each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lopa.distributed.row_assignment import RowAssignment
from lopa.types import Plan, Stats

Bytes = npt.NDArray[np.uint8]

# checksum of the decoders' state; commands received so far; when the rank got here (its own clock)
HEAD = np.dtype([("state", "<u8"), ("commands", "<i8"), ("clock", "<f8")])
_LEAST = 1024


@dataclass(slots=True)
class Packing:
    """The layout of one round, the same on every rank."""

    plans: Sequence[Plan]
    assignments: Sequence[RowAssignment]
    ranks: int  # replicas
    parts: int  # ranks a replica
    wide: bool  # confidences in fp64
    counts: list[int] = field(init=False)  # wanted positions, by replica

    def __post_init__(self) -> None:
        counts = np.zeros(self.ranks, np.int64)
        for plan, assignment in zip(self.plans, self.assignments, strict=True):
            np.add.at(counts, assignment.owner, plan.wanted.sum(axis=1))
        self.counts = counts.tolist()

    @property
    def _real(self) -> type[np.floating[Any]]:
        return np.float64 if self.wide else np.float32

    def _slice(self, count: int, part: int) -> slice:
        return slice(part * count // self.parts, (part + 1) * count // self.parts)

    def size(self) -> int:
        """Bytes a rank sends: as many as the one with most to say, rounded up.

        A rank whose decoders went astray wants other positions. It should still send as much as
        the others, so that the checksums can tell.
        """
        most = -(-max(self.counts) // self.parts)
        size = HEAD.itemsize + len(self.plans) + most * (4 + 2 * np.dtype(self._real).itemsize)
        return int(max(_LEAST, 1 << (size - 1).bit_length()))

    def pack(
        self, branch: int, part: int, head: tuple[int, int, float], found: Sequence[Stats | None]
    ) -> Bytes:
        """found: by plan, the statistics of the rows that this replica forwarded."""
        columns: list[list[npt.NDArray[np.generic]]] = [[], [], []]
        late = np.zeros(len(self.plans), np.uint8)  # plans that want another forward
        for index, (plan, assignment) in enumerate(zip(self.plans, self.assignments, strict=True)):
            rows, stats = assignment.rows[branch], found[index]
            if not len(rows):
                continue
            late[index] = stats is None
            own = assignment.owner[rows] == branch
            wanted = plan.wanted[rows[own]]
            if stats is None:
                for column in columns:
                    column.append(np.zeros(int(wanted.sum())))
                continue
            for column, values in zip(
                columns, (stats.token, stats.max_prob, stats.ranking), strict=True
            ):
                column.append(values[own][wanted])
        whole = [np.concatenate([*c, np.empty(0)]) for c in columns]
        here = self._slice(len(whole[0]), part)
        out = np.zeros(self.size(), np.uint8)
        packed = b"".join(
            (
                np.array([head], HEAD).tobytes(),
                late.tobytes(),
                whole[0][here].astype("<i4").tobytes(),
                whole[1][here].astype(self._real).tobytes(),
                whole[2][here].astype(self._real).tobytes(),
            )
        )
        out[: len(packed)] = np.frombuffer(packed, np.uint8)
        return out

    def heads(self, gathered: Bytes) -> npt.NDArray[np.void]:
        """[world] of HEAD."""
        heads: npt.NDArray[np.void] = gathered[:, : HEAD.itemsize].copy().view(HEAD)[:, 0]
        return heads

    def unpack(self, gathered: Bytes) -> list[Stats | None]:
        """gathered: [world, size]. The statistics of every plan, all of its rows."""
        real = np.dtype(self._real)
        end = HEAD.itemsize + len(self.plans)
        late = np.asarray(gathered[:, HEAD.itemsize : end].any(axis=0))
        columns: list[list[npt.NDArray[np.generic]]] = []  # by replica: token, max_prob, ranking
        for branch, count in enumerate(self.counts):
            parts: list[list[npt.NDArray[np.generic]]] = [[], [], []]
            for part in range(self.parts):
                line, at = gathered[branch * self.parts + part], end
                here = self._slice(count, part)
                for column, kind in zip(parts, (np.dtype("<i4"), real, real), strict=True):
                    size = (here.stop - here.start) * kind.itemsize
                    column.append(np.frombuffer(line[at : at + size].tobytes(), kind))
                    at += size
            columns.append([np.concatenate(column) for column in parts])
        taken = [0] * self.ranks
        stats: list[Stats | None] = []
        for plan, assignment, again in zip(self.plans, self.assignments, late, strict=True):
            shape = plan.rows.shape
            token, (max_prob, ranking) = np.zeros(shape, np.int64), np.zeros((2, *shape))
            for branch in range(self.ranks):
                rows = np.flatnonzero(assignment.owner == branch)
                wanted = plan.wanted[rows]
                count = int(wanted.sum())
                here = slice(taken[branch], taken[branch] + count)
                taken[branch] += count
                for array, values in zip((token, max_prob, ranking), columns[branch], strict=True):
                    own = np.zeros(wanted.shape, array.dtype)
                    own[wanted] = values[here]
                    array[rows] = own
            stats.append(None if again else Stats(token, max_prob, ranking))
        return stats
