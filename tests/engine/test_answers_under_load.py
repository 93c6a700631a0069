"""Whether an answer depends on what else is decoded: of exact and of fixed branches it does not."""

from __future__ import annotations

from typing import Any

import pytest

from lopa import LLM, DecodeConfig
from lopa.decoding.auto_branches import AutoBranches
from lopa.decoding.round_cost import RoundCost
from lopa.engine.session import Session

# Alone a request gets many branches, among others few: behind 256 tokens they are dear.
COST = RoundCost(((8, 0.010), (256, 0.011), (4096, 1.0)))
BASE: dict[str, Any] = {"max_new_tokens": 16, "block_size": 8}
OTHERS = 64


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", dtype="float32", round_cost=COST.settings())


def session(llm: LLM, seed: int, **settings: Any) -> Session:
    prompt = [3 + (7 * seed + 5 * i) % 200 for i in range(4 + seed % 9)]
    return llm.session(prompt, DecodeConfig(**BASE, **settings))


def run(llm: LLM, sessions: list[Session]) -> None:
    for _ in llm.engine(max_running=len(sessions)).run(iter(sessions)):
        pass


def branches(of: Session) -> list[int]:
    return [len(record.branches) - 1 for record in of.trace.rounds]


def auto_of(of: Session) -> AutoBranches:
    assert of.decoder.auto is not None
    return of.decoder.auto


def test_alone_and_among_others(llm: LLM) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "none": {"branches": 0},
        "fixed": {"branches": 3},
        "score": {"branches": 5, "accept": "score"},
        "exact": {"branches": "auto", "accept": "exact"},
        "auto": {"branches": "auto"},
    }
    alone = {name: session(llm, 1, **settings) for name, settings in kinds.items()}
    for one in alone.values():
        run(llm, [one])
    among = {name: session(llm, 1, **settings) for name, settings in kinds.items()}
    others = [session(llm, 2 + i, branches="auto") for i in range(OTHERS)]
    run(llm, [*others[: OTHERS // 2], *among.values(), *others[OTHERS // 2 :]])

    for name in ("none", "fixed", "score", "exact"):
        assert among[name].trace.token_ids == alone[name].trace.token_ids, name
    for name in ("none", "fixed", "score"):
        assert branches(among[name]) == branches(alone[name]), name
    assert alone["exact"].trace.token_ids == alone["none"].trace.token_ids
    for name in ("exact", "auto"):  # the load did make a difference
        assert sum(branches(among[name])) < sum(branches(alone[name])), name
    assert all(other.output is not None for other in others)

    # With the branches that it had among others, an answer of auto comes out again alone.
    again = session(llm, 1, **kinds["auto"])
    auto_of(again).known = branches(among["auto"])
    run(llm, [again])
    assert branches(again) == branches(among["auto"])
    assert again.trace.token_ids == among["auto"].trace.token_ids
    assert again.output is not None
    assert again.output.mean_branches == pytest.approx(
        sum(branches(again)) / len(again.trace.rounds)
    )


def test_the_first_rounds_as_they_were_and_then_as_offered(llm: LLM) -> None:
    """As after a restart: the rounds that were reported are known, those behind them are not."""
    whole = session(llm, 1, branches="auto")
    run(llm, [whole])
    begun = session(llm, 1, branches="auto")
    auto_of(begun).known = branches(whole)[:3]
    run(llm, [begun])
    assert begun.trace.token_ids == whole.trace.token_ids
    assert branches(begun) == branches(whole)
    fewer = session(llm, 1, branches="auto")
    auto_of(fewer).known = [0, 1, 1]
    run(llm, [fewer])
    assert branches(fewer)[:3] == [0, 1, 1]
    assert max(branches(fewer)[3:]) > 1
