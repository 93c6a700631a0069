"""The application without an engine: who is let in, what is too large, and where pages go."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from lopa.errors import ConfigError
from lopa.serving.api.app import create_app
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import RequestState, Sink
from lopa.serving.api.schemas import ChatRequest, CompletionRequest
from lopa.serving.config import ServeConfig, model_name, read_api_keys
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
    async def check_round(self) -> str:
        return ""

    def gauges(self) -> dict[str, float | None]:
        return {"ready": 1.0}

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def drain(self, seconds: float) -> None: ...


@contextmanager
def serving(**options: Any) -> Iterator[TestClient]:
    metrics = Metrics()
    options.setdefault("allowed_host", ("testserver",))
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
        assert other.status_code == 403
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


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("app.localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("192.168.0.7", True),  # a name can be made to point anywhere, an address cannot
        ("[::1]:8000", True),
        (socket.gethostname(), True),
        ("named.example.", True),
        ("named.example:8000", True),
        ("evil.example", False),
        ("named.example.evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example@localhost", False),
        ("localhost@evil.example", False),
        ("[::1", False),
        ("", False),
        ("local host", False),
        ("*", False),
    ],
)
def test_hosts(host: str, served: bool) -> None:
    with serving(allowed_host=("Named.example",)) as client:
        response = client.get("/v1/models", headers={"Host": host})
    assert response.status_code == (200 if served else 403)
    if not served:
        assert response.json()["error"]["code"] == "unknown_host"


def test_any_host() -> None:
    with serving(allowed_host=("*",)) as client:
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "served"),
    [
        (None, True),
        ("http://localhost:8000", True),  # its own page
        ("https://LOCALHOST:8000", True),  # behind a proxy with TLS
        ("https://page.example", True),  # named
        ("http://localhost:3000", False),
        ("http://localhost", False),
        ("https://page.example.evil.example", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/playground/info"])
def test_origins(origin: str | None, served: bool, path: str) -> None:
    headers = {"Host": "localhost:8000", **({} if origin is None else {"Origin": origin})}
    with serving(cors_origin=("https://page.example",)) as client:
        response = client.get(path, headers=headers)
    assert response.status_code == (200 if served else 403)


def test_bodies_that_are_slow_to_refuse() -> None:
    """A megabyte of wrong items has one error, not a million that take seconds to tell."""
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": [-1] * 200_000}),
        ("completions", {"prompt": [[]] * 200_000}),
        ("completions", {"prompt": "x", **{f"field{i}": 1 for i in range(50_000)}}),
        ("chat/completions", {"messages": [{}] * 200_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": [1] * 200_000}]}),
    ]
    with serving() as client:
        for path, body in wrong:
            assert client.post(f"/v1/{path}", json=body).status_code == 400
    for cls, body in ((CompletionRequest, wrong[0][1]), (ChatRequest, wrong[3][1])):
        with pytest.raises(ValidationError) as caught:
            cls.model_validate(body)
        assert caught.value.error_count() < 10


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
        assert client.get("/playground/info").status_code == 200
        for path in ("/v1/models", "/openapi.json"):
            assert client.get(path).status_code == 401
        key = {"Authorization": "Bearer x"}
        assert "/" not in client.get("/openapi.json", headers=key).json()["paths"]


def test_an_error_of_ours_is_an_answer_too() -> None:
    metrics = Metrics()
    backend: Any = Parrot(metrics)
    backend.submit = lambda jobs, sink: 1 / 0
    app = create_app(backend, metrics, ServeConfig(), "parrot")
    local = "http://localhost"
    with TestClient(app, base_url=local, raise_server_exceptions=False) as client:
        response = client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "ZeroDivision" not in response.text


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \n")
    assert read_api_keys(str(path)) == ("first", "second")
    path.write_text("# none\n\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys(str(path))
    for unreadable in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_api_keys(str(unreadable))


def test_names_never_show_paths(tmp_path: Any) -> None:
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name("Dream-org/Dream-v0-Instruct-7B") == "Dream-org/Dream-v0-Instruct-7B"
