"""Two replicas on a local Ray cluster: requests are spread, and a lost replica loses none."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving_support import Server, data_of, is_alive, until

from lopa import LLM, DecodeConfig
from lopa.errors import ConfigError

pytestmark = pytest.mark.ray

SLOW: dict[str, Any] = {
    "decoder": "d2f",
    "threshold": 1.0,
    "block_size": 4,
    "append_at": 1.0,
    "attention": "block",
}


@pytest.fixture(scope="module")
def cluster(chat_folder: Path) -> Iterator[Server]:
    local = {"RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    with Server(
        "--model", str(chat_folder), "--replicas", "2", "--max-running", "4", patience=120, **local
    ) as server:
        yield server
        pids = replicas(server)
    for pid in pids:
        until(lambda pid=pid: not is_alive(pid), 20)  # type: ignore[misc]


def replicas(server: Server) -> dict[int, float]:
    """Jobs by the process of the replica that was given them."""
    pattern = re.compile(r'lopa_replica_jobs_total\{replica="[^"]*:(\d+)"\} (\S+)')
    found = pattern.findall(server.http.get("/metrics").text)
    return {int(pid): float(count) for pid, count in found}


def test_requests_are_spread_and_none_is_lost(cluster: Server, llm: LLM) -> None:
    def ask(number: int) -> str:
        body = {"prompt": f"Hello {number}", "max_tokens": 100, **SLOW}
        if number % 2:
            answer = cluster.post("/v1/completions", **body)
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["choices"][0]["text"]
            return text
        with cluster.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as r:
            *chunks, end = data_of(r.iter_lines())
        assert end == "[DONE]"
        assert "error" not in chunks[-1], chunks[-1]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, number) for number in range(16)]
        until(lambda: len(replicas(cluster)) == 2, 30, cluster)
        until(lambda: sum(slot["rounds"] > 0 for slot in cluster.slots()) >= 4, 30, cluster)
        victim = min(replicas(cluster))
        os.kill(victim, signal.SIGKILL)
        texts = [answer.result() for answer in answers]
    for number, text in enumerate(texts):
        config = DecodeConfig(max_new_tokens=100, **SLOW)
        assert text == llm.generate(f"Hello {number}", config).text
    assert cluster.metric("lopa_engine_restarts") >= 1
    assert not is_alive(victim)

    # And another one takes its place.
    def three() -> bool:
        cluster.complete(max_tokens=1)
        return len(replicas(cluster)) == 3

    until(three, 60, cluster)


def test_a_client_that_leaves_is_noticed(cluster: Server) -> None:
    body = {"prompt": "Hello", "max_tokens": 500, "stream": True, **SLOW}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    until(lambda: cluster.slots() == [], 5, cluster)
    assert cluster.metric("lopa_answers_dropped_total") == 1


def test_bad_requests_are_told_as_ever(cluster: Server) -> None:
    assert cluster.complete(max_tokens=10**6).status_code == 400
    assert cluster.complete(banana=1).json()["error"]["param"] == "banana"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, on import
def test_how_replicas_are_placed() -> None:
    from lopa.serving.ray import Arguments, app, build
    from lopa.serving.settings import EngineConfig, ServeConfig

    def replica(application: Any) -> Any:
        return application._bound_deployment.init_args[3]._bound_deployment

    found = replica(app(Arguments(replicas=2, gpus=4, threshold="0.5")))  # type: ignore[call-arg]
    config = found._deployment_config
    assert config.num_replicas == 2
    options = found._replica_config
    assert options.placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert options.placement_group_strategy == "STRICT_PACK"
    assert found.init_args[0]["decoding"] == {"threshold": 0.5}
    engine = EngineConfig(model="tiny")
    scaled = replica(build(ServeConfig(), engine, replicas=1, max_replicas=3))
    assert scaled._deployment_config.autoscaling_config.max_replicas == 3
    with pytest.raises(ConfigError, match="unknown option banana"):
        app(Arguments(banana="1"))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="no fewer"):
        build(ServeConfig(), engine, replicas=2, max_replicas=1)
