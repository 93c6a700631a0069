"""A cut model by the fused kernels, in Triton's interpreter: `make test-parallel`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cases
import pytest
from ranks import Ranks

from lopa import DecodeConfig
from lopa.models import checkpoint
from lopa.models.families import family_named

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Of their own: kernels that were imported for the interpreter stay so."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("name", "branches", "tensors"),
    [("dream", 1, 2), ("dream", 2, 2), ("llada2", 1, 2), ("llada2", 2, 2), ("sdar-moe", 1, 2)],
)
def test_tokens_are_those_of_plain_torch(
    ranks: Ranks, tmp_path: Path, name: str, branches: int, tensors: int
) -> None:
    """In one batch: with branches, sampled, and by each ranking."""
    family = family_named(name)
    # An odd vocabulary, so that its parts differ by one; two layers, one of them dense
    small = {**family.tiny, "vocab_size": 261, "num_hidden_layers": 2}
    checkpoint.write_tiny(replace(family, tiny=small), tmp_path)
    plain = DecodeConfig(
        block_size=4,
        max_new_tokens=8,
        max_rounds=2,
        threshold=0.0,
        attention="full" if name == "dream" else "block",
    )
    asked = [
        cases.Request(str(tmp_path), (3, 4, 5, seed), plain.changed(seed=seed, **more))
        for seed, more in enumerate(
            (
                {"branches": 2},
                {"branches": 1, "temperature": 0.8, "ranking": "margin"},
                {"branches": 1, "ranking": "neg_entropy"},
            )
        )
    ]
    expected = [cases.alone(request) for request in asked]
    found = ranks.run(cases.decode_fused, asked, branches=branches, tensors=tensors)
    assert found == [expected] * (branches * tensors)


def test_a_head_that_is_left_to_torch(ranks: Ranks) -> None:
    request = cases.Request(
        str(cases.DREAM),
        (5, 6, 7),
        DecodeConfig(block_size=4, max_new_tokens=4, max_rounds=2, temperature=0.8, top_p=0.9),
    )
    found = ranks.run(cases.decode_fused, [request], branches=1, tensors=2)
    assert found == [[cases.alone(request)]] * 2
