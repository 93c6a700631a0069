"""Tokens are the same for every degree of parallelism, in fp32: `make test-parallel`."""

from __future__ import annotations

import cases
import pytest
from ranks import Ranks

import goldens
from lopa import LLM, DecodeConfig
from lopa.tasks import generate

pytestmark = pytest.mark.parallel

DEGREES = [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)]  # branch × tensor
# More rows than ranks, fewer, and a number that no group divides.
BUILT_IN = [(7, "full", {}), (2, "block", {}), (1, "full", {"temperature": 0.8})]


@pytest.fixture(scope="module")
def built_in() -> list[cases.Request]:
    encode = LLM("tiny", device="cpu").encode
    return [
        cases.Request(
            "tiny",
            tuple(encode(generate("words", seed=index, split="eval").prompt)),
            DecodeConfig(branches=k, attention=attention, max_new_tokens=48, block_size=16, **more),  # type: ignore[arg-type]
        )
        for index, (k, attention, more) in enumerate(BUILT_IN)
    ]


@pytest.mark.parametrize(("branches", "tensors"), DEGREES)
def test_goldens(four: Ranks, branches: int, tensors: int) -> None:
    golden = [cases.golden(path) for path in goldens.CASES]
    expected = [tokens for _, tokens in golden]
    found = four.run(cases.decode, [r for r, _ in golden], branches=branches, tensors=tensors)
    assert found == [expected] * (branches * tensors)


@pytest.mark.parametrize(("branches", "tensors"), [(3, 1), (1, 2), (2, 2)])
def test_built_in_model(
    four: Ranks, built_in: list[cases.Request], branches: int, tensors: int
) -> None:
    expected = [cases.alone(request) for request in built_in]
    found = four.run(cases.decode, built_in, branches=branches, tensors=tensors)
    assert found == [expected] * (branches * tensors)


@pytest.mark.parametrize(
    ("branches", "tensors", "budget"),
    [(2, 1, 60), (3, 1, 10_000), (4, 1, 60), (1, 2, 60), (2, 2, 10_000)],
)
def test_many_at_once(four: Ranks, branches: int, tensors: int, budget: int) -> None:
    """Continuous batching: the rows of all sequences are shared out together."""
    requests = []
    for k, attention in ((0, "full"), (3, "block"), (4, "full"), (1, "full"), (2, "block")):
        config = DecodeConfig(
            branches=k,
            attention=attention,  # type: ignore[arg-type]
            max_new_tokens=24,
            block_size=8,
            threshold=0.05,
        )
        requests.append(cases.Request(str(cases.DREAM), tuple(range(3, 9 + 4 * k)), config))
    for decoder in ("vanilla", "fast-dllm"):
        config = DecodeConfig(decoder=decoder, max_new_tokens=32)  # type: ignore[arg-type]
        requests.append(cases.Request(str(cases.DREAM), (5, 6, 7), config))
    expected = [cases.alone(request) for request in requests]
    found = four.run(cases.decode_together, requests, budget, branches=branches, tensors=tensors)
    assert found == [expected] * (branches * tensors)


@pytest.mark.parametrize("tensors", [2, 3])
def test_statistics_of_a_cut_vocabulary(four: Ranks, tensors: int) -> None:
    found = four.run(cases.statistics_of_parts, tensors, branches=1, tensors=tensors)
    assert found == [[]] * tensors


def test_other_families_cut(four: Ranks) -> None:
    """Norms of queries and keys, a tied or separate head, blocks counted from 0."""
    requests = []
    for name in ("llada_a", "sdar_a", "fastdllm2_a"):
        options = (("mask_token_id", 198), ("eos_token_id", 199))
        llm = LLM(goldens.MODELS / name, device="cpu", dtype="float32", **dict(options))
        size = llm.config.trained_block or 8
        config = llm.decode_config(max_new_tokens=4 * size)
        prompt = tuple(range(2, 2 + 2 * size))
        requests.append(cases.Request(str(goldens.MODELS / name), prompt, config, options))
    expected = [cases.alone(request) for request in requests]
    for branches, tensors in ((2, 1), (1, 2), (2, 2)):
        found = four.run(cases.decode, requests, branches=branches, tensors=tensors)
        assert found == [expected] * (branches * tensors)


@pytest.mark.parametrize(("branches", "tensors"), [(3, 1), (1, 2), (2, 2)])
def test_mixtures(four: Ranks, branches: int, tensors: int) -> None:
    """Experts cut over ranks, with editing and without, one at a time and together."""
    requests = cases.mixtures()
    expected = [cases.alone(request) for request in requests]
    for work, more in ((cases.decode, ()), (cases.decode_together, (10_000,))):
        for name in {request.model for request in requests}:
            own = [i for i, request in enumerate(requests) if request.model == name]
            found = four.run(
                work, [requests[i] for i in own], *more, branches=branches, tensors=tensors
            )
            assert found == [[expected[i] for i in own]] * (branches * tensors)


def test_quantised(four: Ranks) -> None:
    """Layers are quantised after they are cut: replicas agree exactly, parts nearly."""
    config = DecodeConfig(branches=3, max_new_tokens=32, block_size=8, threshold=0.05)
    request = cases.Request(str(cases.DREAM), tuple(range(3, 20)), config, (("quantize", "int8"),))
    assert four.run(cases.decode, [request], branches=2) == [[cases.alone(request)]] * 2
    for branches, tensors in ((1, 2), (2, 2)):
        for whole, parts in four.run(cases.quantised, "tiny", branches=branches, tensors=tensors):
            assert 0 < parts < 1.5 * whole


def test_a_rank_that_went_astray_is_named(four: Ranks) -> None:
    request, _ = cases.golden(goldens.CASES[0])
    said = four.run(cases.astray, request, branches=4)
    assert all(s.startswith("rank 1 computes something else than the others") for s in said)
