"""What the ranks exchange in a round: a header of a few words, and packed statistics.

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
HEADER = np.dtype([("state", "<u8"), ("commands", "<i8"), ("clock", "<f8")])
_LEAST = 1024


@dataclass(slots=True)
class Packing:
    """The layout of one round, the same on every rank."""

    plans: Sequence[Plan]
    assignments: Sequence[RowAssignment]
    replicas: int
    parts: int  # ranks of a replica
    wide: bool  # confidences in fp64
    owner: IntArray = field(init=False)  # [N] of all plans: the replica that tells of a position
    counts: list[int] = field(init=False)  # wanted positions, by replica

    def __post_init__(self) -> None:
        pairs = zip(self.plans, self.assignments, strict=True)
        self.owner = np.concatenate([s.owner.repeat(p.wanted.sum(axis=1)) for p, s in pairs])
        self.counts = np.bincount(self.owner, minlength=self.replicas).tolist()

    @property
    def _entry(self) -> np.dtype[np.void]:
        """Of one position."""
        real = "<f8" if self.wide else "<f4"
        return np.dtype([("token", "<i4"), ("max_prob", real), ("ranking", real)])

    def _slice(self, count: int, part: int) -> slice:
        return slice(part * count // self.parts, (part + 1) * count // self.parts)

    def size(self) -> int:
        """Bytes a rank sends: as many as the one with most to say, rounded up.

        A rank whose decoders diverged wants other positions. It should still send as much as
        the others, so that the checksums can tell.
        """
        most = -(-max(self.counts) // self.parts)
        size = HEADER.itemsize + len(self.plans) + most * self._entry.itemsize
        return int(max(_LEAST, 1 << (size - 1).bit_length()))

    def pack(
        self, replica: int, part: int, header: tuple[int, int, float], found: Sequence[Stats | None]
    ) -> Bytes:
        """found: by plan, the statistics of what `RowAssignment.rows_of` gave this replica."""
        unfinished = np.zeros(len(self.plans), np.uint8)  # plans that want another forward
        entries = np.zeros(self.counts[replica], self._entry)
        end = 0
        for index, (plan, assignment) in enumerate(zip(self.plans, self.assignments, strict=True)):
            here = slice(end, end := end + int(plan.wanted[assignment.owner == replica].sum()))
            stats = found[index]
            if stats is None:
                unfinished[index] = len(assignment.rows[replica]) > 0
                continue
            for name, values in stats._asdict().items():
                entries[name][here] = values
        entries = entries[self._slice(len(entries), part)]
        packed = np.array([header], HEADER).tobytes() + unfinished.tobytes() + entries.tobytes()
        out = np.zeros(self.size(), np.uint8)
        out[: len(packed)] = np.frombuffer(packed, np.uint8)
        return out

    def headers(self, gathered: Bytes) -> npt.NDArray[np.void]:
        """[world] of HEADER."""
        headers: npt.NDArray[np.void] = gathered[:, : HEADER.itemsize].copy().view(HEADER)[:, 0]
        return headers

    def unpack(self, gathered: Bytes) -> list[Stats | None]:
        """gathered: [world, size]. The statistics of every plan, all of its rows."""
        end = HEADER.itemsize + len(self.plans)
        unfinished = np.asarray(gathered[:, HEADER.itemsize : end].any(axis=0))
        whole = Stats(np.empty(len(self.owner), np.int64), *np.empty((2, len(self.owner))))
        for rank, line in enumerate(gathered):
            replica, part = divmod(rank, self.parts)
            own = np.flatnonzero(self.owner == replica)[self._slice(self.counts[replica], part)]
            entries = np.frombuffer(line, self._entry, len(own), end)
            for name, array in whole._asdict().items():
                array[own] = entries[name]
        ends = np.cumsum([plan.wanted.sum() for plan in self.plans])[:-1]
        pieces = zip(*(np.split(array, ends) for array in whole), strict=True)
        found = zip(unfinished, pieces, strict=True)
        return [None if again else Stats(*piece) for again, piece in found]
