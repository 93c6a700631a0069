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


@pytest.mark.parametrize(("branches", "tensors"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["dream", "llada2", "sdar-moe"])
def test_tokens_are_those_of_plain_torch(
    ranks: Ranks, tmp_path: Path, name: str, branches: int, tensors: int
) -> None:
    """In one batch: with branches, sampled, and with a setting that the kernels lack."""
    family = family_named(name)
    # Odd, so that the parts of the vocabulary differ by one
    checkpoint.write_tiny(replace(family, tiny={**family.tiny, "vocab_size": 261}), tmp_path)
    plain = DecodeConfig(
        block_size=4,
        max_new_tokens=8,
        max_rounds=3,
        threshold=0.02,
        attention="full" if name == "dream" else "block",
    )
    asked = [
        cases.Request(str(tmp_path), tuple(range(3, 8 + 4 * index)), config)
        for index, config in enumerate(
            (
                plain.changed(branches=2),
                plain.changed(branches=1, temperature=0.8, ranking="margin"),
                plain.changed(branches=1, ranking="neg_entropy"),
            )
        )
    ]
    alone = [plain.changed(branches=1, temperature=0.8, top_p=0.9)]
    asked_alone = [cases.Request(str(tmp_path), (5, 6, 7), config) for config in alone]
    for some in (asked, asked_alone):
        expected = [cases.alone(request) for request in some]
        found = ranks.run(cases.decode_fused, some, branches=branches, tensors=tensors)
        assert found == [expected] * (branches * tensors)
