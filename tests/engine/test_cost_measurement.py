"""`branches="auto"` with a model: the cost of a round is measured once, kept and recorded."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ahead import make_eager

from lopa import LLM, DecodeConfig
from lopa import trace as traces
from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import RoundCost
from lopa.engine import cost_measurement
from lopa.engine.session import Session
from lopa.runner.backend_torch import PendingStats
from lopa.tasks import generate

POINTS = [(32, 0.010), (64, 0.011), (512, 0.030)]
AUTO = DecodeConfig(branches="auto", max_new_tokens=32, block_size=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu")


@pytest.fixture
def _few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measurement, "LEAST_TURNS", 2)
    monkeypatch.setattr(cost_measurement, "ENOUGH", 0.0)
    monkeypatch.setattr(cost_measurement, "STEADY", math.inf)


@pytest.mark.usefixtures("_few_turns")
def test_measured_once_and_recorded(llm: LLM) -> None:
    cost = llm.round_cost
    assert cost is llm.round_cost
    tokens = [t for t, _ in cost.points]
    assert 3 <= len(tokens) < len(cost_measurement.ROUND_SIZES)
    sizes = {w * (branches + 1) * n for w, branches, n in cost_measurement.ROUND_SIZES}
    assert tokens == sorted(sizes)[: len(tokens)]
    assert len(cost.host) == len(AUTO_BRANCHES)
    assert cost.host == tuple(sorted(cost.host))
    assert cost.records == ()  # nothing works while they are made
    assert not cost.in_halves
    seconds = [s for _, s in cost.points]
    assert seconds == sorted(seconds)
    settings = llm.generate("hello", AUTO).trace.settings
    assert settings["round_cost"] == cost.settings()


def test_a_slow_device_measures_less(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measurement, "SECONDS", 0.0)
    monkeypatch.setattr(cost_measurement, "LEAST_GROWTH", 0.0)  # no point stands for those left out
    assert len(cost_measurement.measure(llm.runner, llm.config, llm.decode_config).points) == 3


def test_branches_never_seem_free_on_a_slow_device() -> None:
    flat = [(32, 0.1), (64, 0.4), (128, 0.4)]
    cost = RoundCost(cost_measurement._extrapolated(flat))
    assert cost(256) == pytest.approx(0.6)
    assert cost(512) == pytest.approx(1.0)
    steep = [(32, 0.1), (64, 0.2), (128, 0.3)]  # 0.5 s with twice the tokens, as timed
    assert cost_measurement._extrapolated(steep) == tuple(steep)
    fast = [(32, 0.001), (4096, 0.001)]  # none were left out
    assert cost_measurement._extrapolated(fast) == tuple(fast)


class Played:
    """A size whose rounds took so long, turn by turn."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds


def test_disturbed_turns_do_not_count() -> None:
    """Half of the turns are disturbed, each in another size: the others are of an even machine."""
    small, large = [1.0] * 8, [3.0] * 8
    for turn, of in ((0, small), (3, large), (4, small), (6, large)):
        of[turn] *= 4 + turn
    timed: Any = [Played(small), Played(large)]
    assert sorted(cost_measurement._calm(timed)) == [1, 2, 5, 7]
    assert cost_measurement._spread(timed) == 1.0
    small[1] = 1.6
    assert cost_measurement._spread(timed) == pytest.approx(1.3)
    small[:] = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]  # a machine that gets slower
    large[:] = [3 * seconds for seconds in small]
    assert cost_measurement._calm(timed) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_further_session_adds(is_async: bool) -> None:
    """In milliseconds: of a round 10, of a token 0.1, of a session 2.0, 0.2 and 0.1."""
    forward, own, every_round, record = 2.0, 0.2, 0.5, 0.1
    timed: list[Any] = []
    for window, branches, sessions in cost_measurement.ROUND_SIZES[:6]:
        tokens = window * (branches + 1) * sessions
        host = every_round + own * sessions
        whole = 10.0 + 0.1 * tokens + forward * sessions + host
        timed.append(
            SimpleNamespace(
                tokens=tokens,
                branches=branches,
                sessions=sessions,
                seconds=[1e-3 * whole] * 3,
                host_seconds=[1e-3 * host] * 3,
                record_seconds=[1e-3 * record * sessions] * 3,
            )
        )
    runner: Any = SimpleNamespace(is_async=is_async, padding=(), lanes=1)
    cost = cost_measurement._cost(timed, float, runner)
    points = {tokens: 1e3 * seconds for tokens, seconds in cost.points}
    record *= cost_measurement.RECORDS_OF_ANSWERS
    own *= cost_measurement.HOST_OF_ANSWERS
    every_round *= cost_measurement.HOST_OF_ANSWERS
    assert 1e3 * cost.every_round == pytest.approx(every_round)
    assert points[256] == pytest.approx(10 + 25.6)
    if is_async:  # records are made meanwhile
        growths = cost_measurement.HOST_GROWTH, cost_measurement.RECORDS_GROWTH
        on_host, records = (
            [each * of for of in growth]
            for each, growth in zip((own, record), growths, strict=True)
        )
        assert [1e3 * s for s in cost.host] == pytest.approx([each + forward for each in on_host])
        assert [1e3 * s for s in cost.records] == pytest.approx(records)
    else:
        assert 1e3 * cost.host[0] == pytest.approx(own + record + forward)
        eight = 10 + 51.2 + every_round + 8 * (own + record + forward)
        assert 1e3 * cost(512, [0] * 8) == pytest.approx(eight)


@pytest.mark.parametrize(("few", "more"), [(8, 32), (2, 4)])
def test_what_sessions_that_differ_add(few: int, more: int) -> None:
    """In milliseconds: of a round 0.5, 0.8 more where windows move, of a session 0.2."""
    every_round, moved, own = 0.5, 0.8, 0.2
    timed: list[Any] = []
    for window, branches, sessions in cost_measurement.ROUND_SIZES[:6]:
        tokens = window * (branches + 1) * sessions
        host = every_round + own * sessions
        timed.append(
            SimpleNamespace(
                tokens=tokens,
                branches=branches,
                sessions=sessions,
                seconds=[1e-3 * (10.0 + 0.1 * tokens + host)] * 3,
                host_seconds=[1e-3 * host] * 3,
                record_seconds=[0.0] * 3,
            )
        )
    mixed: list[Any] = [
        SimpleNamespace(
            sessions=count,
            host_seconds=[1e-3 * (every_round + share * moved + own * count)] * 3,
            record_seconds=[1e-3 * 0.1 * count] * 3,
        )
        for count, share in ((few, 1.0 - 0.75 ** (few - 1)), (more, 1.0 - 0.75 ** (more - 1)))
    ]
    runner: Any = SimpleNamespace(is_async=True, padding=(), lanes=1)
    cost = cost_measurement._cost(timed, float, runner, mixed)
    assert 1e3 * cost.records[0] == pytest.approx(0.1 * cost_measurement.RECORDS_OF_ANSWERS)
    more_on_host = cost_measurement.HOST_OF_ANSWERS
    own, moved, every_round = (part * more_on_host for part in (own, moved, every_round))
    assert 1e3 * cost.host[0] == pytest.approx(own)
    assert 1e3 * cost.mixed_round == pytest.approx(moved)
    assert 1e3 * cost.every_round_of(1) == pytest.approx(every_round)
    assert 1e3 * cost.every_round_of(2) == pytest.approx(every_round + moved / 4)
    assert 1e3 * cost(64) == pytest.approx(10 + 6.4 + every_round + own)
    # A KV cache may have room for no more than the fewer of both, or for one: that tells nothing.
    for room in (few, 1):
        mixed[1].sessions = room
        assert cost_measurement._cost(timed, float, runner, mixed).mixed_round == 0.0


def test_a_small_cache_runs_fewer_sessions_that_differ() -> None:
    for tokens, room in ((512, 4), (4096, cost_measurement.CROWD)):
        llm = LLM("dummy:dream-tiny", device="cpu", cache_tokens=tokens)
        crowd = cost_measurement._Mixed(
            llm.runner, llm.config, llm.decode_config, None, cost_measurement.CROWD
        )
        crowd.turn()
        crowd.engine.close()
        assert crowd.sessions == room
        assert len(crowd.host_seconds) == 1


@pytest.mark.usefixtures("_few_turns")
def test_an_asynchronous_runner_is_timed_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = cost_measurement.ROUND_SIZES
    monkeypatch.setattr(cost_measurement, "ROUND_SIZES", (*sizes[:2], sizes[4]))
    monkeypatch.setattr(cost_measurement, "MANY", 2)
    monkeypatch.setattr(cost_measurement, "CROWD", 4)
    llm = LLM("dummy:dream-tiny", device="cpu")
    step = make_eager(llm)
    points = cost_measurement.measure(llm.runner, llm.config, llm.decode_config).points
    assert [t for t, _ in points] == [32, 64, 256]
    # Of every turn one round was begun in the round before it, and was of use.
    assert step.finished >= (2 + cost_measurement.LEAST_TURNS) * len(points)


def test_a_host_that_is_kept_does_not_make_the_device_seem_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third round the host comes late, by when the device has done much of the next."""
    least, late = 0.015, 0.030
    llm = LLM("dummy:dream-tiny", device="cpu")
    step = make_eager(llm)
    launch, record = step.launch, Session.record
    delays = itertools.cycle((late, 0.0, 0.0))

    def launch_slowly(*args: Any) -> PendingStats:
        ready = time.perf_counter() + least
        in_flight = launch(*args)

        def wait() -> Any:
            time.sleep(max(0.0, ready - time.perf_counter()))
            return in_flight.wait()

        return PendingStats(wait)

    def record_late(session: Session, seconds: float) -> Any:
        time.sleep(next(delays))
        return record(session, seconds)

    monkeypatch.setattr(step, "launch", launch_slowly)
    monkeypatch.setattr(Session, "record", record_late)
    timed = cost_measurement._Timed(llm.runner, llm.config, llm.decode_config, None, 64, 0, 1)
    for _ in range(12):
        timed.turn()
    timed.engine.close()
    assert len(timed.seconds) == 12
    assert min(timed.seconds) >= least


def test_forwards_are_counted_without_a_measure() -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    config = DecodeConfig(branches="auto", objective="tpf", max_new_tokens=16, block_size=8)
    output = llm.generate("hello", config)
    assert llm._round_cost is None
    assert output.trace.settings["round_cost"]["points"] == [[1, 1.0]]


def test_the_same_cost_gives_the_same_answer(tmp_path: Path) -> None:
    """With the built-in model, one by one and together; and the trace can be read back."""
    llm = LLM("tiny", device="cpu", round_cost=POINTS)
    assert llm.round_cost == RoundCost(tuple(POINTS))
    prompts = [generate("words", seed, "eval").prompt for seed in (3,)]
    config = DecodeConfig(branches="auto", max_new_tokens=32)
    alone = [llm.generate(prompt, config) for prompt in prompts]
    together = dict(llm.generate_as_completed(prompts, config))
    for index, output in enumerate(alone):
        assert output.token_ids == together[index].token_ids
        tried = [len(r.branches) - 1 for r in output.trace.rounds]
        assert tried[0] == 0
        assert max(tried) <= AUTO_BRANCHES[-1]
        assert max(tried) > 0
    traces.write(alone[0].trace, tmp_path / "trace.jsonl")
    assert traces.read(tmp_path / "trace.jsonl") == alone[0].trace
