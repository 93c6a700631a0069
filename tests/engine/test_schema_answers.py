"""Answers to made-up schemas and regexes fit, whatever the model says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from schema_cases import check_regexes, check_schemas, random_model

from lopa import LLM
from lopa.distributed.parallel_llm import ParallelLLM
from lopa.engine.base_llm import BaseLLM

SHARE = int(os.environ.get("LOPA_SCHEMA_SHARE", "1"))  # one of so many is decoded


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(random_model(tmp_path_factory.mktemp("random")), device="cpu", dtype="float32")


def test_a_few(random: LLM) -> None:
    assert check_schemas(random, range(6)) >= 4
    assert check_regexes(random, range(4), offset=5) >= 2


@pytest.mark.schemas
@pytest.mark.parametrize("first", range(0, 300, 25)[::SHARE])
def test_schemas_on_random_weights(random: LLM, first: int) -> None:
    assert check_schemas(random, range(first, first + 25), offset=first) >= 18


@pytest.mark.schemas
@pytest.mark.parametrize("first", range(0, 200, 50)[::SHARE])
def test_regexes_on_random_weights(random: LLM, first: int) -> None:
    assert check_regexes(random, range(first, first + 50), offset=first) >= 38


@pytest.mark.schemas
@pytest.mark.parametrize("first", range(0, 24, 12))
def test_the_built_in_model(first: int) -> None:
    llm = LLM("tiny", device="cpu", dtype="float32")
    assert check_schemas(llm, range(first, first + 12), offset=first + 7) >= 8
    assert check_regexes(llm, range(first // 2, first // 2 + 6), offset=first + 3) >= 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseLLM]:
    folder: Path = random_model(tmp_path_factory.mktemp("random"))
    with ParallelLLM(folder, branch_parallel=2, device="cpu", dtype="float32") as llm:
        yield llm


@pytest.mark.schemas
def test_two_ranks(ranks: BaseLLM) -> None:
    assert check_schemas(ranks, range(18), offset=1) >= 12
    assert check_regexes(ranks, range(9)) >= 6
