from __future__ import annotations

import cases
import numpy as np
import pytest

import goldens
from lopa import LLM
from lopa.distributed.rank_llm import RankSession
from lopa.distributed.replay import History
from lopa.runner.kv_cache import slot_mapping
from lopa.runner.paged import PagedRunner


@pytest.mark.parametrize("path", goldens.CASES, ids=lambda p: p.stem)
def test_a_cache_written_anew_is_the_same(path: goldens.Path) -> None:
    """After every few rounds: the replays of the history give the keys and values there are."""
    request, expected = cases.golden(path)
    llm = LLM(request.model, dtype="float32", device="cpu", **dict(request.options))
    runner = llm.runner
    assert isinstance(runner, PagedRunner)
    session = llm.session(list(request.prompt), request.config)
    history, rounds = History(), 0
    while (plan := session.plan()) is not None:
        session.open()
        (stats,) = runner.forward([(session.slot, plan)])
        assert stats is not None
        winner = session.choose(stats)
        runner.commit([(session.slot, winner)])
        history.add(plan, winner)
        session.take(0.0)
        rounds += 1
        if rounds % 3 == 0 and session.slot >= 0:
            again = RankSession(runner, None, session.decoder, list(request.prompt))
            again.restore(session.decoder, history.plans)
            again.open()
            cached = max((p.start + p.commit for p in history.plans), default=0)
            here, there = (
                slot_mapping(runner._slots[s].table, 0, cached) for s in (again.slot, session.slot)
            )
            for kept in (runner.kv_cache.keys, runner.kv_cache.values):
                np.testing.assert_allclose(kept[:, here], kept[:, there], atol=2e-5)
            again.close()
    assert session.output is not None
    assert session.output.token_ids == expected
    if request.config.attention == "block":
        assert len(history.plans) == 1
