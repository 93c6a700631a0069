"""The application without an engine: who is let in, what is too large, and where pages go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from lopa.errors import ConfigError
from lopa.serving.api.app import create_app
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import RequestState, Sink
from lopa.serving.config import ServeConfig, model_name
from lopa.serving.jobs import Accepted, Advance, Finished, Job


class Parrot:
    """A backend that answers at once, with what it was asked."""

    ready = True
    state = "ready"

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.jobs: list[Job] = []

    def submit(self, jobs: list[Job], sink: Sink) -> list[RequestState]:
        self.jobs += jobs
        requests = [RequestState(job, i, sink, self.metrics) for i, job in enumerate(jobs)]
        for request in requests:
            request.handle(Accepted(prompt_tokens=1, max_tokens=1))
            request.handle(
                Advance(
                    round=1,
                    text=str(request.job.prompt),
                    filled=1,
                    seconds=0.1,
                    winner_rank=0,
                    branches=1,
                )
            )
            request.handle(
                Finished(
                    finish="eos",
                    tokens=1,
                    rounds=1,
                    tpf=1,
                    branches=0,
                    seconds=0.1,
                    queue_seconds=0,
                    engine_seconds=0,
                )
            )
        return requests

    def abort(self, request: RequestState) -> None: ...
    def requests(self) -> list[RequestState]:
        return []

    async def refresh(self) -> None: ...
    def gauges(self) -> dict[str, float | None]:
        return {"ready": 1.0}

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def drain(self) -> None: ...


@contextmanager
def serving(**options: Any) -> Iterator[TestClient]:
    metrics = Metrics()
    app = create_app(Parrot(metrics), metrics, ServeConfig(**options), "parrot")
    with TestClient(app) as client:
        yield client


def test_loopback_and_closed_to_pages_by_default() -> None:
    assert ServeConfig().host == "127.0.0.1"
    with serving() as client:
        response = client.get("/v1/models", headers={"Origin": "https://example.org"})
        assert "access-control-allow-origin" not in response.headers
    with serving(cors_origin=("https://example.org",)) as client:
        response = client.get("/v1/models", headers={"Origin": "https://example.org"})
        assert response.headers["access-control-allow-origin"] == "https://example.org"
        other = client.get("/v1/models", headers={"Origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers


def test_api_keys() -> None:
    with serving(api_key=("first", "second")) as client:
        for shown in (None, "Bearer no", "first", "Basic first", b"Bearer \xff\xfe"):
            header: Any = {"Authorization": shown} if shown else {}
            for path in ("/v1/models", "/metrics", "/slots", "/v1/nothing"):
                refused = client.get(path, headers=header)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert refused.headers["x-request-id"]
        for key in ("first", "second"):
            found = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert found.status_code == 200
        assert client.get("/health").status_code == 200
    with pytest.raises(ConfigError, match="empty"):
        ServeConfig(api_key=(" ",))
    with pytest.raises(ConfigError, match="name the CORS origins"):
        ServeConfig(api_key=("x",), cors_origin=("*",))


def test_bodies_have_a_limit() -> None:
    with serving(max_body_bytes=1000) as client:
        body = {"prompt": "x" * 900}
        assert client.post("/v1/completions", json=body).status_code == 200
        body = {"prompt": "x" * 1000}
        assert client.post("/v1/completions", json=body).status_code == 413

        def parts() -> Iterator[bytes]:  # of unknown length in all
            for _ in range(20):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        response = client.post("/v1/completions", content=parts(), headers=headers)
        assert response.status_code == 413
        assert "send less" in response.json()["error"]["message"]


def test_the_page_needs_no_key() -> None:
    with serving(api_key=("x",)) as client:
        assert "LoPA playground" in client.get("/").text
        assert client.get("/playground/main.js").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert "/" not in client.get("/openapi.json").json()["paths"]


def test_an_error_of_ours_is_an_answer_too() -> None:
    metrics = Metrics()
    backend: Any = Parrot(metrics)
    backend.submit = lambda jobs, sink: 1 / 0
    app = create_app(backend, metrics, ServeConfig(), "parrot")
    with TestClient(app, raise_server_exceptions=False) as client:
        response = client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "ZeroDivision" not in response.text


def test_names_never_show_paths(tmp_path: Any) -> None:
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name("Dream-org/Dream-v0-Instruct-7B") == "Dream-org/Dream-v0-Instruct-7B"
