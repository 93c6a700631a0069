"""Replicas on a local Ray cluster: they come and go with the load; lost ones cost no request.

Those that are lost are groups of ranks.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from serving_support import SLOW, Server, data_of, descendants, is_alive, until

from lopa import LLM, DecodeConfig
from lopa.errors import ConfigError, LopaError

pytestmark = pytest.mark.ray

JOBS = "lopa_replica_jobs_total"
LOCAL = {"RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}


def by_replica(server: Server, name: str) -> dict[int, float]:
    """A metric by the process of the replica."""
    pattern = re.compile(rf'{name}\{{replica="[^"]*:(\d+)"\}} (\S+)')
    found = pattern.findall(server.http.get("/metrics").text)
    return {int(pid): float(value) for pid, value in found}


def replicas(server: Server) -> list[int]:
    """Processes of the replicas that are up now."""
    return sorted(by_replica(server, "lopa_ranks_alive"))


def ask(server: Server, number: int) -> str:
    """An answer of a hundred rounds, every other one as a stream."""
    body = {"prompt": f"Hello {number}", "max_tokens": 100, **SLOW}
    if number % 2:
        answer = server.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        *chunks, end = data_of(response.iter_lines())
    assert end == "[DONE]"
    assert "error" not in chunks[-1], chunks[-1]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, on import
def test_a_request_goes_where_it_is_fastest() -> None:
    from lopa.serving.ray.replica_router import ReplicaRouter, ranking

    fast, slow = ({"points": [[64, s], [512, 2 * s]]} for s in (0.001, 0.004))
    busy = {"a": 1, "b": 0, "c": 9}
    router = ReplicaRouter.__new__(ReplicaRouter)
    router._replica_queue_len_cache = busy
    costs = {"a": fast, "b": slow, "c": fast}
    replicas = [
        SimpleNamespace(replica_id=name, routing_stats={"round_cost": cost})
        for name, cost in costs.items()
    ]
    chosen = asyncio.run(router.choose_replicas(replicas))
    assert [one.replica_id for (one,) in chosen] == ["a", "c", "b"]
    assert ranking([fast, None, slow], [3, 0, 1]) == [-3, 0, -1]  # one has not said yet


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[str]:
    """What the model answers that is asked nothing else."""
    config = DecodeConfig(max_new_tokens=100, **SLOW)
    return [llm.generate(f"Hello {number}", config).text for number in range(16)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, on import
def test_how_replicas_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from lopa.serving.config import EngineConfig, ServeConfig
    from lopa.serving.ray import deployment as placing
    from lopa.serving.ray.deployment import app, build, gpus_per_replica

    def replica(application: Any) -> Any:
        return application._bound_deployment.init_args[3]._bound_deployment

    def run(**options: str) -> Any:
        """As `serve run` does."""
        return call_user_app_builder_with_args_if_necessary(app, options)

    resources = {"CPU": 64.0, "GPU": 8.0}
    monkeypatch.setattr(placing.ray, "cluster_resources", lambda: resources)
    ranks = {"branch_parallel": "2", "tensor_parallel": "2"}
    found = replica(run(replicas="2", gpus="4", threshold="0.5", **ranks))
    assert found._deployment_config.num_replicas == 2
    options = found._replica_config
    assert options.placement_group_bundles == [{"CPU": 4.0, "GPU": 4.0}]
    assert options.placement_group_strategy == "STRICT_PACK"
    # Ray shows an actor the devices that it asks for itself.
    assert (options.ray_actor_options["num_cpus"], options.ray_actor_options["num_gpus"]) == (4, 4)
    assert found.init_args[0]["decoding"] == {"threshold": 0.5}
    assert found.init_args[0]["branch_parallel"] == 2
    halves = replica(run(gpus="0.5"))._replica_config
    assert halves.placement_group_bundles == [{"CPU": 1.0, "GPU": 0.5}]

    engine = EngineConfig(model="tiny")
    assert gpus_per_replica(engine) == 1
    assert (
        gpus_per_replica(EngineConfig(model="tiny", llm={"device": "cpu"}, branch_parallel=2)) == 0
    )
    with pytest.raises(ConfigError, match="give --device cuda"):
        gpus_per_replica(EngineConfig(model="tiny", llm={"device": "cuda:1"}))
    del resources["GPU"]
    assert gpus_per_replica(engine) == 0
    with pytest.raises(ConfigError, match="no GPU"):
        gpus_per_replica(EngineConfig(model="tiny", llm={"device": "cuda"}))

    two = EngineConfig(model="tiny", branch_parallel=2)
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": gpus}} for gpus in (1.0, 3.0)]
    monkeypatch.setattr(placing.ray, "nodes", lambda: nodes)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    placing._check_capacity(placing.bundle(two, gpus=2), 1)
    missing = "capacity for 1 of 2 replicas, each with 2 CPU and 2 GPU on one node"
    with pytest.raises(LopaError, match=missing):
        placing._check_capacity(placing.bundle(two, gpus=2), 2)

    scaled = replica(build(ServeConfig(), engine, replicas=1, max_replicas=3))
    scaling = scaled._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30, 600)
    with pytest.raises(ConfigError, match="unknown option banana"):
        run(banana="1")
    with pytest.raises(ConfigError, match="max_queue"):
        run(max_queue="many")
    monkeypatch.setenv("LOPA_API_KEY", "one two")
    assert run()._bound_deployment.init_args[0]["api_key"] == ("one", "two")
    with pytest.raises(ConfigError, match="no fewer"):
        build(ServeConfig(), engine, replicas=2, max_replicas=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_why_replicas_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from lopa.serving.ray import deployment as placing

    said = "3 times in a row\n  File ...\nlopa.errors.LopaError: model x does not exist: give one\n"
    replica = SimpleNamespace(message=said)
    applications = {"lopa": SimpleNamespace(deployments={"replica": replica})}
    monkeypatch.setattr(placing.serve, "status", lambda: SimpleNamespace(applications=applications))
    assert placing._failure_reason(RuntimeError("failed")) == "model x does not exist: give one"
    applications.clear()
    assert placing._failure_reason(RuntimeError("Deploying\nfailed")) == "failed"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_serve_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayActorError

    from lopa.serving.ray import deployment as placing

    def fail(**_: Any) -> None:
        raise RayActorError

    monkeypatch.setattr(placing.serve, "start", fail)
    with pytest.raises(LopaError, match=r"Ray Serve does not come up \(RayActorError\): try again"):
        placing._start("127.0.0.1", 8000)


def test_replicas_come_and_go_with_the_load(chat_folder: Path, alone: list[str]) -> None:
    scaling = ("--replicas", "1", "--max-replicas", "2", "--max-running", "2")
    delays = ("--scale-up-seconds", "1", "--scale-down-seconds", "1")
    often = {"RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"}
    options = ("--model", str(chat_folder), *scaling, *delays)
    with Server(*options, **LOCAL, **often) as server:
        (first,) = replicas(server)
        # They are looked at under the load that keeps two of them up.
        enough = Event()

        def keep_asking(number: int) -> None:
            while not enough.is_set():
                assert ask(server, number) == alone[number]

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(keep_asking, number) for number in range(8)]
            try:
                two = until(lambda: len(found := replicas(server)) == 2 and set(found), server)
                until(lambda: set(by_replica(server, JOBS)) == two, server)
                engines = {pid: descendants(pid) for pid in two}
            finally:
                enough.set()
                for one in asking:
                    one.result()
        assert first in engines
        # And while one of them goes.
        while len(replicas(server)) == 2:
            assert ask(server, 0) == alone[0]
        (left,) = until(lambda: len(found := replicas(server)) == 1 and found, server)
        (gone,) = set(engines) - {left}
        until(lambda: not [pid for pid in (gone, *engines[gone]) if is_alive(pid)])
        assert ask(server, 1) == alone[1]
        assert server.metric("lopa_replica_jobs_retried_total") == 0
        assert server.metric("lopa_replicas") == 1
        # A stop finishes what is running.
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(ask, server, 0)
            until(lambda: any(slot["rounds"] for slot in server.slots()), server)
            assert server.stop() == 0
            assert last.result() == alone[0]


@pytest.fixture(scope="module")
def cluster(chat_folder: Path) -> Iterator[Server]:
    """Two replicas of two ranks."""
    options = ("--replicas", "2", "--branch-parallel", "2", "--max-running", "4")
    with Server("--model", str(chat_folder), *options, **LOCAL) as server:
        yield server
        left = [pid for replica in replicas(server) for pid in (replica, *descendants(replica))]
        assert len(left) >= 5  # a replica, its engine, the nursery and two ranks
    until(lambda: not [pid for pid in left if is_alive(pid)])


def test_what_is_shown_of_replicas(cluster: Server) -> None:
    ranks = by_replica(cluster, "lopa_ranks_alive")
    assert list(ranks.values()) == [2, 2]
    assert cluster.metric("lopa_replicas") == 2
    assert by_replica(cluster, "lopa_engine_restarts") == dict.fromkeys(ranks, 0)
    assert by_replica(cluster, "lopa_cache_tokens") == dict.fromkeys(ranks, 0)
    pages, used = (by_replica(cluster, f"lopa_cache_{name}") for name in ("pages", "pages_used"))
    assert pages.keys() == used.keys() == ranks.keys()
    assert all(0 <= used[pid] < pages[pid] for pid in ranks)
    assert cluster.http.get("/health").json()["state"] == "ready"
    assert cluster.http.get("/health?deep=1").status_code == 200
    assert cluster.http.get("/health", headers={"Host": "evil.example"}).status_code == 403


def test_requests_are_spread_and_none_is_lost(cluster: Server, alone: list[str]) -> None:
    before = replicas(cluster)
    families = {pid: descendants(pid) for pid in before}
    assert [len(family) for family in families.values()] == [4, 4]
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, cluster, number) for number in range(16)]
        until(lambda: len(by_replica(cluster, JOBS)) == 2, cluster)
        until(lambda: sum(slot["rounds"] > 0 for slot in cluster.slots()) >= 4, cluster)
        # One replica goes with all that is its own; of the other, one rank.
        victim, other = before
        rank = families[other][-1]
        for pid in (*families[victim], victim, rank):
            os.kill(pid, signal.SIGKILL)
        texts = [answer.result() for answer in answers]
    assert texts == alone
    assert cluster.metric("lopa_replica_jobs_retried_total") >= 1
    assert not [pid for pid in (*families[victim], victim, rank) if is_alive(pid)]

    # And others take their places.
    def mended() -> bool:
        ranks = by_replica(cluster, "lopa_ranks_alive")
        return list(ranks.values()) == [2, 2] and victim not in ranks and other in ranks

    until(mended, cluster)
    assert by_replica(cluster, "lopa_engine_restarts")[other] == 0  # a rank is no engine
    assert cluster.complete(max_tokens=1).status_code == 200


def test_a_client_that_leaves_is_noticed(cluster: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 500, "stream": True, **SLOW}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # held: it closes the stream when it goes
        next(lines)
        until(lambda: any(by_replica(cluster, "lopa_cache_tokens").values()), cluster)
    until(lambda: cluster.slots() == [], cluster)
    assert cluster.metric("lopa_answers_dropped_total") == 1
    # The engine lets go of it too.
    until(lambda: not any(by_replica(cluster, "lopa_cache_tokens").values()), cluster)


def test_bad_requests_are_told_as_ever(cluster: Server) -> None:
    assert cluster.complete(max_tokens=10**6).status_code == 400
    assert cluster.complete(banana=1).json()["error"]["param"] == "banana"


def test_a_replica_that_is_killed_leaves_nothing(cluster: Server) -> None:
    """Its engine and ranks go by themselves, idle as they are."""
    victim = replicas(cluster)[0]
    family = descendants(victim)
    assert len(family) == 4
    os.kill(victim, signal.SIGKILL)
    until(lambda: not [pid for pid in family if is_alive(pid)])
    assert cluster.complete(max_tokens=1).status_code == 200
