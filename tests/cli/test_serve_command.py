"""`lopa serve` as it is called: its options, their twins, and errors in one line."""

from __future__ import annotations

import socket
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_support import DUMMY, Run
from typer.main import get_command

from lopa.cli.main import app
from lopa.option_help import FIELDS
from lopa.serving.config import EngineConfig, ServeConfig


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServeConfig, EngineConfig]]:
    import lopa.serving.api.server

    calls: list[tuple[ServeConfig, EngineConfig]] = []
    monkeypatch.setattr(lopa.serving.api.server, "serve", lambda *given: calls.append(given))
    return calls


def test_defaults_are_those_of_the_settings(run: Run, called: list[Any]) -> None:
    assert run("serve").code == 0
    config, engine = called[0]
    assert config == ServeConfig()
    assert engine == EngineConfig(model="tiny")


def test_options_and_their_twins(
    run: Run, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPA_API_KEY", "one two")
    monkeypatch.setenv("LOPA_PORT", "1")
    monkeypatch.setenv("LOPA_BRANCHES", "3")
    monkeypatch.setenv("LOPA_MODEL", "dummy:dream-tiny")
    assert run("serve", "--port", "2", "--max-queue", "0", "--dtype", "float32").code == 0
    config, engine = called[0]
    assert config == ServeConfig(port=2, max_queue=0, api_key=("one", "two"))
    assert engine.model == "dummy:dream-tiny"
    assert (engine.decoding, engine.llm) == ({"branches": 3}, {"dtype": "float32"})


def test_ranks_and_their_twins(
    run: Run, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPA_BRANCH_PARALLEL", "3")
    monkeypatch.setenv("LOPA_TENSOR_PARALLEL", "4")
    monkeypatch.setenv("LOPA_RANK_TIMEOUT", "5")
    assert run("serve", "--tensor-parallel", "2").code == 0
    _, engine = called[0]
    assert (engine.branch_parallel, engine.tensor_parallel, engine.rank_timeout) == (3, 2, 5.0)
    assert engine.ranks == 6
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert "run it without torchrun" in run("serve").error
    assert len(called) == 1


def test_replicas_are_groups_of_ranks(
    run: Run, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    stand_in: Any = ModuleType("lopa.serving.ray.deployment")  # Ray is an extra
    stand_in.serve_replicas = lambda *given, **options: calls.append((*given, options))
    monkeypatch.setitem(sys.modules, "lopa.serving.ray.deployment", stand_in)
    monkeypatch.setenv("LOPA_SCALE_DOWN_SECONDS", "60")
    many = ("--replicas", "2", "--max-replicas", "3", "--branch-parallel", "2")
    assert run("serve", *many, "--scale-up-seconds", "5").code == 0
    config, engine, options = calls[0]
    assert config == ServeConfig(scale_up_seconds=5, scale_down_seconds=60)
    assert engine.ranks == 2
    assert options == {"replicas": 2, "max_replicas": 3}
    assert "go with --max-replicas" in run("serve", *many[:2], "--scale-up-seconds", "5").error
    assert called == []


def test_the_documentation_has_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    serve: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    defaults = {field.name: field.default for field in fields(ServeConfig)}
    shared = {"model", "adapter", "device", "dtype", "quantize", "preset", "help", *FIELDS}
    shared |= {"round_cost"}
    for parameter in serve.params:
        if parameter.name not in shared:
            flag, value = max(parameter.opts, key=len), defaults.get(parameter.name)
            shown = "" if value in (None, ()) else str(value)
            assert f"| `{flag}` | `LOPA_{parameter.name.upper()}` | {shown} |" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "70000"), "port must be between"),
        (("--max-queue", "-1"), "max_queue must be at least 0"),
        (("--max-running", "0"), "max_running must be at least 1"),
        (("--max-request-tokens", "0"), "max_request_tokens must be at least 2"),
        (("--log-format", "xml"), "log_format must be one of plain, json"),
        (("--api-key", ""), "an API key is empty"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
    ],
)
def test_wrong_options(run: Run, arguments: tuple[str, ...], words: str) -> None:
    assert words in run("serve", *DUMMY, *arguments).error


def test_a_port_that_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --host or --port" in run("serve", *DUMMY, "--port", port).error


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "no-such-model"), 1, "no-such-model does not exist"),
        ((*DUMMY, "--decoder", "d2f", "--branches", "3"), 2, "branches is not used"),
    ],
)
def test_what_the_engine_finds_wrong_ends_the_server(
    run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = run("serve", "--port", "0", "--log-format", "json", *arguments)
    assert words in result.error
    assert result.code == code
