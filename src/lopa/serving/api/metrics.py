"""The Prometheus metrics of `/metrics`. A registry per server, so that tests can have several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from lopa.config import AUTO_BRANCHES
from lopa.serving.jobs import Advance, Failed, Finished

if TYPE_CHECKING:
    from lopa.serving.api.request_state import Backend, RequestState

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)


class Metrics:
    """An observer of requests. Gauges are read from the backend when they are asked for."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "lopa_requests", "HTTP requests", ["method", "path", "status"], registry=registry
        )
        self.rejected = Counter(
            "lopa_requests_rejected", "HTTP requests refused with 429", registry=registry
        )
        self.ended_requests = Counter(
            "lopa_answers", "Sequences by why they ended", ["end"], registry=registry
        )
        self.aborted = Counter(
            "lopa_answers_dropped", "Sequences whose client disconnected", registry=registry
        )
        self.replica_jobs = Counter(
            "lopa_replica_jobs", "Sequences submitted to a replica", ["replica"], registry=registry
        )
        self.retried = Counter(
            "lopa_replica_jobs_retried",
            "Sequences submitted again because their replica was lost",
            registry=registry,
        )
        self.tokens = Counter(
            "lopa_tokens_committed", "Tokens of finished sequences", registry=registry
        )
        self.rounds = Counter("lopa_rounds", "Rounds, counted per sequence", registry=registry)
        self.wins = Counter(
            "lopa_branch_wins", "Rounds by rank of the branch that won", ["rank"], registry=registry
        )
        self.tpf = Histogram(
            "lopa_tokens_per_forward",
            "Tokens per forward of finished sequences",
            buckets=_TOKENS,
            registry=registry,
        )
        self.branches = Histogram(
            "lopa_branches",
            "Branches of a round, per sequence",
            buckets=AUTO_BRANCHES,
            registry=registry,
        )
        self.expected_gain = Counter(
            "lopa_expected_gain_tokens",
            "Tokens that auto expected branches to add",
            registry=registry,
        )
        self.round_seconds = _seconds("lopa_round_seconds", "Duration of a round", registry)
        self.queue_seconds = _seconds(
            "lopa_queue_seconds", "Time in the queue, before the first round", registry
        )
        self.first_text_seconds = _seconds(
            "lopa_time_to_first_token_seconds", "From the request to its first final text", registry
        )
        self.request_seconds = _seconds(
            "lopa_answer_seconds", "From the request to the end of a sequence", registry
        )
        self.overhead = _seconds(
            "lopa_api_overhead_seconds",
            "From the last byte of a request to that of its response, less the time in the engine",
            registry,
        )

    def watch(self, backend: Backend) -> None:
        self.registry.register(_BackendGauges(backend))

    def advanced(self, request: RequestState, event: Advance) -> None:
        self.rounds.inc()
        self.round_seconds.observe(event.seconds)
        self.branches.observe(event.branches - 1)
        self.expected_gain.inc(event.expected_gain)
        if event.branches > 1:
            self.wins.labels(str(event.winner_rank) if event.winner_rank else "anchor").inc()

    def ended(self, request: RequestState, event: Finished | Failed) -> None:
        if isinstance(event, Failed):
            self.ended_requests.labels(event.kind).inc()
            return
        self.ended_requests.labels(event.finish).inc()
        self.tokens.inc(event.tokens)
        self.tpf.observe(event.tpf)
        self.queue_seconds.observe(event.queue_seconds)
        self.request_seconds.observe(request.seconds)
        if request.first_text_seconds is not None:
            self.first_text_seconds.observe(request.first_text_seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _seconds(name: str, what: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, what, buckets=_SECONDS, registry=registry)


class _BackendGauges:
    """Read when `/metrics` is asked for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> Iterable[Metric]:
        found = self._backend.gauges()
        for name, what in _GAUGES.items():
            value = found.get(name)
            if isinstance(value, Mapping):
                family = GaugeMetricFamily(f"lopa_{name}", what, labels=["replica"])
                for replica, one in value.items():
                    family.add_metric([replica], float(one))
                yield family
            elif value is not None:
                yield GaugeMetricFamily(f"lopa_{name}", what, value=float(value))


_GAUGES = {
    "ready": "1 when requests are accepted",
    "requests_running": "Sequences that run",
    "requests_waiting": "Sequences that wait",
    "ranks_alive": "Ranks of the engine that are up",
    "replicas": "Replicas that are up",
    "engine_restarts": "Restarts of the engine process",
    "cache_tokens": "Tokens that the cache is reserved for",
    "cache_pages_used": "Pages of the cache in use",
    "cache_pages": "Pages of the cache",
}
