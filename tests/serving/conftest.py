"""A small chat model, a server of it that the tests of a session share, and OpenAI's client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serving_support import SMALL, Server

from lopa import LLM

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_support import write_checkpoint, write_tokenizer


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, bytes and ChatML; a context of 512."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model") / "bytes", max_position_embeddings=512
    )
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def llm(chat_folder: Path) -> LLM:
    return LLM(chat_folder)


@pytest.fixture(scope="session")
def server(chat_folder: Path) -> Iterator[Server]:
    with Server("--model", str(chat_folder), *SMALL) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
