"""The command line in this process, and models for it to load."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from cli_support import Result, Run, write_checkpoint, write_tokenizer

from lopa.cli import progress
from lopa.cli.main import main


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time: what a command says must not depend on it."""
    monkeypatch.setattr(progress, "LINE_AFTER", 1e6)


@pytest.fixture(autouse=True)
def _known_cost(known_cost: None) -> None: ...


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: str, stdin: str | object = "") -> Result:
        source = io.StringIO(stdin) if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", source)
        capfd.readouterr()
        code = main(arguments)
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def ids_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer, with a context of 128."""
    return write_checkpoint(tmp_path_factory.mktemp("ids"))


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("chat"))
    write_tokenizer(folder)
    return folder
