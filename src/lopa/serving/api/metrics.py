"""What Prometheus reads at `/metrics`. One registry a server, so that tests can have many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from lopa.serving.jobs import Advance, Failed, Finished

if TYPE_CHECKING:
    from lopa.serving.api.request_state import Backend, Flow

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)


class Metrics:
    """An observer of flows; the state of the engine is read from the backend when asked for."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "lopa_requests", "HTTP requests", ["method", "path", "status"], registry=registry
        )
        self.rejected = Counter(
            "lopa_requests_rejected", "Requests refused for want of room", registry=registry
        )
        self.answers = Counter("lopa_answers", "Answers by their end", ["end"], registry=registry)
        self.dropped = Counter(
            "lopa_answers_dropped", "Answers whose client went away", registry=registry
        )
        self.replica_jobs = Counter(
            "lopa_replica_jobs", "Answers given to a replica", ["replica"], registry=registry
        )
        self.retried = Counter(
            "lopa_replica_jobs_retried",
            "Answers whose replica was lost, given to another",
            registry=registry,
        )
        self.tokens = Counter(
            "lopa_tokens_committed", "Tokens of finished answers", registry=registry
        )
        self.rounds = Counter("lopa_rounds", "Rounds, each answer's counted", registry=registry)
        self.wins = Counter(
            "lopa_branch_wins", "Rounds by the branch that won", ["rank"], registry=registry
        )
        self.tpf = Histogram(
            "lopa_tokens_per_forward",
            "Tokens per forward of finished answers",
            buckets=_TOKENS,
            registry=registry,
        )
        self.round_seconds = _seconds("lopa_round_seconds", "Time of a round", registry)
        self.queue_seconds = _seconds("lopa_queue_seconds", "Wait before the first round", registry)
        self.first_text = _seconds(
            "lopa_time_to_first_token_seconds", "From request to the first final text", registry
        )
        self.answer_seconds = _seconds(
            "lopa_answer_seconds", "From request to the end of an answer", registry
        )

        self.overhead = _seconds(
            "lopa_api_overhead_seconds",
            "From a request's last byte to its answer's, less the time in the engine",
            registry,
        )

    def watch(self, backend: Backend) -> None:
        self.registry.register(_State(backend))

    def advanced(self, flow: Flow, event: Advance) -> None:
        self.rounds.inc()
        self.round_seconds.observe(event.seconds)
        if event.branches > 1:
            self.wins.labels(str(event.rank) if event.rank else "anchor").inc()

    def ended(self, flow: Flow, event: Finished | Failed) -> None:
        if isinstance(event, Failed):
            self.answers.labels(event.kind).inc()
            return
        self.answers.labels(event.finish).inc()
        self.tokens.inc(event.tokens)
        self.tpf.observe(event.tpf)
        self.queue_seconds.observe(event.queue_seconds)
        self.answer_seconds.observe(flow.seconds)
        if flow.first_text is not None:
            self.first_text.observe(flow.first_text)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _seconds(name: str, what: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, what, buckets=_SECONDS, registry=registry)


class _State:
    """Gauges, read at the moment they are asked for."""

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
    "ready": "1 when requests are taken",
    "requests_running": "Answers in the engine's rounds",
    "requests_waiting": "Answers that wait for their turn",
    "ranks_alive": "Processes of the engine that are up",
    "replicas": "Replicas of the engine that may be used",
    "engine_restarts": "Engines that were lost and started again",
    "cache_tokens": "Tokens that the cache is held for",
    "cache_pages_used": "Pages of the cache that are held",
    "cache_pages": "Pages of the cache in all",
}
