"""A small chat model, a server of it that the tests of a session share, and OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from cli_support import write_checkpoint, write_tokenizer
from hammer import Cases
from serving_support import SMALL, Server

from lopa import LLM
from lopa.tasks import generate


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


@pytest.fixture(scope="session")
def tiny_cases() -> Cases:
    """Requests to the built-in model and what it answers when it is asked nothing else."""
    llm = LLM("tiny")
    found = []
    for seed in range(8):
        problem = generate(("words", "functions")[seed % 2], seed=seed, split="eval")
        options: dict[str, Any] = {"block_size": 8, "branches": seed % 3}
        if seed % 4 == 3:
            options |= {"temperature": 0.7, "seed": seed}
        config = llm.decode_config(**options, max_new_tokens=16)
        body = {"prompt": problem.prompt, "max_tokens": 16, **options}
        found.append((body, llm.generate(problem.prompt, config).text))
    return found
