"""What the ranks tell each other in a round: a head of a few words, and packed statistics.

12 bytes a wanted position (token int32, max_prob and ranking fp32), 20 where a decoder compares in
fp64. The ranks of one replica know the same and send a part each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lopa.distributed.row_assignment import RowAssignment
from lopa.types import IntArray, Plan, Stats

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
    owner: IntArray = field(init=False)  # [N] of all plans: the replica that tells of a position
    counts: list[int] = field(init=False)  # wanted positions, by replica

    def __post_init__(self) -> None:
        pairs = zip(self.plans, self.assignments, strict=True)
        self.owner = np.concatenate([s.owner.repeat(p.wanted.sum(axis=1)) for p, s in pairs])
        self.counts = np.bincount(self.owner, minlength=self.ranks).tolist()

    @property
    def _entry(self) -> np.dtype[np.void]:
        """Of one position."""
        real = "<f8" if self.wide else "<f4"
        return np.dtype([("token", "<i4"), ("max_prob", real), ("ranking", real)])

    def _slice(self, count: int, part: int) -> slice:
        return slice(part * count // self.parts, (part + 1) * count // self.parts)

    def size(self) -> int:
        """Bytes a rank sends: as many as the one with most to say, rounded up.

        A rank whose decoders went astray wants other positions. It should still send as much as
        the others, so that the checksums can tell.
        """
        most = -(-max(self.counts) // self.parts)
        size = HEAD.itemsize + len(self.plans) + most * self._entry.itemsize
        return int(max(_LEAST, 1 << (size - 1).bit_length()))

    def pack(
        self, branch: int, part: int, head: tuple[int, int, float], found: Sequence[Stats | None]
    ) -> Bytes:
        """found: by plan, the statistics of the part that `RowAssignment.cut` gave this replica."""
        late = np.zeros(len(self.plans), np.uint8)  # plans that want another forward
        told = np.zeros(self.counts[branch], self._entry)
        end = 0
        for index, (plan, assignment) in enumerate(zip(self.plans, self.assignments, strict=True)):
            here = slice(end, end := end + int(plan.wanted[assignment.owner == branch].sum()))
            stats = found[index]
            if stats is None:
                late[index] = len(assignment.rows[branch]) > 0
                continue
            for name, values in stats._asdict().items():
                told[name][here] = values
        told = told[self._slice(len(told), part)]
        packed = np.array([head], HEAD).tobytes() + late.tobytes() + told.tobytes()
        out = np.zeros(self.size(), np.uint8)
        out[: len(packed)] = np.frombuffer(packed, np.uint8)
        return out

    def heads(self, gathered: Bytes) -> npt.NDArray[np.void]:
        """[world] of HEAD."""
        heads: npt.NDArray[np.void] = gathered[:, : HEAD.itemsize].copy().view(HEAD)[:, 0]
        return heads

    def unpack(self, gathered: Bytes) -> list[Stats | None]:
        """gathered: [world, size]. The statistics of every plan, all of its rows."""
        end = HEAD.itemsize + len(self.plans)
        late = np.asarray(gathered[:, HEAD.itemsize : end].any(axis=0))
        whole = Stats(np.empty(len(self.owner), np.int64), *np.empty((2, len(self.owner))))
        for rank, line in enumerate(gathered):
            branch, part = divmod(rank, self.parts)
            own = np.flatnonzero(self.owner == branch)[self._slice(self.counts[branch], part)]
            told = np.frombuffer(line, self._entry, len(own), end)
            for name, array in whole._asdict().items():
                array[own] = told[name]
        ends = np.cumsum([plan.wanted.sum() for plan in self.plans])[:-1]
        pieces = zip(*(np.split(array, ends) for array in whole), strict=True)
        return [None if again else Stats(*piece) for again, piece in zip(late, pieces, strict=True)]
