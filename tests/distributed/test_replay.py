from __future__ import annotations

import cases
import numpy as np
import pytest

import goldens
from lopa import LLM
from lopa.distributed.replay import ReplayLog
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.runner.kv_cache import slot_mapping
from lopa.runner.paged import PagedRunner


@pytest.mark.parametrize("path", goldens.CASES, ids=lambda p: p.stem)
def test_a_cache_written_anew_is_the_same(path: goldens.Path) -> None:
    """After every few rounds: the log's replay gives the keys and values there are."""
    request, expected = cases.golden(path)
    llm = LLM(request.model, dtype="float32", device="cpu", **dict(request.options))
    runner = llm.runner
    assert isinstance(runner, PagedRunner)
    session = llm.session(list(request.prompt), request.config)
    slot = runner.open(request.config, session.capacity)
    assert slot is not None
    log, rounds = ReplayLog(), 0
    while (plan := session.plan()) is not None:
        (stats,) = runner.forward([(slot, plan)])
        assert stats is not None
        winner = session.choose(stats)
        runner.commit([(slot, winner)])
        log.add(plan, winner)
        session.record(0.0)
        rounds += 1
        if rounds % 3 == 0 and log.plans and session.output is None:
            again = Session(session.decoder, None, replay=log.plans)
            engine = Scheduler(runner)
            engine.add(again)
            engine._admit()
            cached = max((p.start + p.commit for p in log.plans), default=0)
            tables = [runner._slots[s].table for s in (again.slot, slot)]
            here, there = (slot_mapping(table, 0, cached) for table in tables)
            for kept in (runner.kv_cache.keys, runner.kv_cache.values):
                np.testing.assert_allclose(kept[:, here], kept[:, there], atol=2e-5)
            engine.close()
    assert session.output is not None
    assert session.output.token_ids == expected
    if request.config.attention == "block":
        assert len(log.plans) == 1
