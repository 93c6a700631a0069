"""Which replica gets a request: the one where it is expected to be decoded fastest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from lopa.decoding.round_cost import RoundCost
from lopa.serving.expected_rate import expected_rate

ROUND_COST = "round_cost"  # what a replica's rounds cost, in its routing statistics


class ReplicaRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Ray Serve's own compares two at random, by what they run; this one compares all."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One after another, the best first: a replica that is full passes it on."""
        running = {r.replica_id: self._running(r) for r in candidate_replicas}
        costs = [r.routing_stats.get(ROUND_COST) for r in candidate_replicas]
        rates = ranking(costs, list(running.values()))
        order = list(range(len(candidate_replicas)))
        random.shuffle(order)  # of equals any
        order.sort(key=lambda index: -rates[index])
        return [[candidate_replicas[index]] for index in order]

    def _running(self, replica: RunningReplica) -> int:
        """Requests that it has, as far as is known here."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def ranking(costs: Sequence[Any], running: Sequence[int]) -> list[float]:
    """How good each replica is; by what they run alone until all have said what rounds cost."""
    if not all(costs):
        return [-float(count) for count in running]
    found = [RoundCost.of(cost) for cost in costs]
    return [expected_rate(cost, count) for cost, count in zip(found, running, strict=True)]
