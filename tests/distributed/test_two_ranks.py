"""Two processes over gloo: a quick look at everything. `make test-parallel` has the whole matrix.

One test: starting the processes costs more than what they do.
"""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from ranks import Ranks

import goldens
from lopa import DecodeConfig
from lopa.distributed.mesh import Mesh

QUICK = ("01_lopa", "14_d2f_eos_block")
LLADA = {"threshold": 0.02, "max_new_tokens": 16, "block_size": 8}


def test_two_ranks_decode_as_one(two: Ranks) -> None:
    golden = [cases.golden(p) for p in goldens.CASES if p.stem.startswith(QUICK)]
    requests = [request for request, _ in golden]
    # fp64 confidences, every round commits (dual cache), no shift
    dual = DecodeConfig(decoder="fast-dllm", **LLADA)  # type: ignore[arg-type]
    requests.append(cases.Request(str(goldens.LLADA), tuple(range(2, 14)), dual))
    drawn = DecodeConfig(
        branches=2, temperature=1.0, top_p=0.9, top_k=40, max_new_tokens=16, block_size=8, seed=3
    )
    requests.append(cases.Request(str(cases.DREAM), tuple(range(2, 14)), drawn))
    together = [requests[-1]]
    # Gaps: one whose length is given, and one whose lengths are rows for both ranks.
    gaps = DecodeConfig(branches=3, max_new_tokens=9, block_size=4, threshold=0.05)
    for lengths, config in (((7,), gaps.changed(window="blocks")), ((2, 3, 5, 9), gaps)):
        gap = lengths, (6, 7, 8)
        requests.append(cases.Request(str(cases.DREAM), (3, 4, 5), config, gap=gap))
    expected = [tokens for _, tokens in golden] + [cases.alone(r) for r in requests[len(golden) :]]
    assert two.run(cases.decode, requests, branches=2) == [expected] * 2
    mixed = cases.mixtures()[::4]
    expected += [cases.alone(r) for r in mixed]
    assert two.run(cases.decode, requests + mixed, branches=1, tensors=2) == [expected] * 2

    plain = DecodeConfig(branches=0, max_new_tokens=24, block_size=8, threshold=0.05)
    for k, attention in ((0, "full"), (3, "block"), (4, "full"), (1, "full")):
        config = plain.changed(branches=k, attention=attention)
        together.append(cases.Request(str(cases.DREAM), tuple(range(3, 9 + 4 * k)), config))
    expected = [cases.alone(r) for r in together]
    for k, attention in ((3, "full"), (4, "block")):  # the tokens of no branches
        prompt, seen = tuple(range(5, 16)), plain.changed(attention=attention)
        expected.append(cases.alone(cases.Request(str(cases.DREAM), prompt, seen)))
        config = seen.changed(branches=k, accept="exact")
        together.append(cases.Request(str(cases.DREAM), prompt, config))
    assert two.run(cases.decode_together, together, 60, branches=2) == [expected] * 2

    assert two.run(cases.statistics_of_parts, 0, branches=1, tensors=2) == [[], []]
    said = two.run(cases.astray, requests[0], branches=2)
    assert all("the ranks compute different things" in s for s in said)


@pytest.mark.parallel
@pytest.mark.parametrize(
    "settings",
    [
        [
            {"block_size": 8, "branches": 3, "threshold": 0.3},
            {"window": "canvas", "branches": 2, "temperature": 1.0, "top_k": 50},
        ],
        [
            {"block_size": 8, "attention": "block", "branches": 3, "temperature": 1.0},
            {"decoder": "fast-dllm", "block_size": 8},
        ],
    ],
)
def test_answers_that_have_to_fit(two: Ranks, settings: list[dict[str, Any]]) -> None:
    """Those of one rank, by either kind of parallelism."""
    alone = cases.decode_fitting(Mesh(0, 1, 1, torch.device("cpu")), settings)
    assert two.run(cases.decode_fitting, settings, branches=2) == [alone] * 2
    assert two.run(cases.decode_fitting, settings, branches=1, tensors=2) == [alone] * 2
    assert two.run(cases.class_scores_of_parts, 0, branches=1, tensors=2) == [[], []]


def test_branches_auto(two: Ranks) -> None:
    """What rounds cost is one number for all ranks, whatever their clocks say."""
    config = DecodeConfig(branches="auto", max_new_tokens=16, block_size=8)
    fixed = config.changed(branches=2)
    requests = [
        cases.Request(str(cases.DREAM), tuple(range(3, n)), c)
        for n, c in ((9, config), (15, fixed), (21, config))
    ]
    first, second = two.run(cases.decode_auto, requests, branches=2)
    assert first == second
    cost, tokens, branches = first
    assert len(cost["points"]) >= 3
    assert tokens[1] == cases.alone(requests[1])
    assert len(tokens) == 3
    assert max(branches) > 0


def test_bytes_on_the_wire(two: Ranks) -> None:
    """A commit moves the committed keys and values once; under block attention nothing moves."""
    request, _ = cases.golden(goldens.FOLDER / "cases" / "03_lopa_math_k7_b16.json")
    rounds, others = two.run(cases.traffic, request, branches=2)
    assert rounds == others
    # dream_0 … 5: bytes of keys and values a token, and of the remembered hidden state
    config = cases.alone_config(request)
    token = 2 * 4 * config.layers * config.kv_heads * config.head_dim
    moved = 0
    for index, r in enumerate(rounds):
        assert 0 < r["statistics"] < 64 * 1024
        assert r["commits"] <= 1
        if index == 0:  # one row, forwarded by both
            assert r["commits"] == 0
            assert r["committed"] > 0
        elif r["committed"]:
            assert r["commit"] == r["committed"] * token + 4 * config.hidden_size
            moved += 1
        else:
            assert r["commit"] == 0
    assert moved >= 3
    request, _ = cases.golden(goldens.FOLDER / "cases" / "07_lopa_blockattn_k4_b8.json")
    rounds, _ = two.run(cases.traffic, request, branches=2)
    assert any(r["committed"] for r in rounds[1:])
    assert not any(r["commit"] for r in rounds)
