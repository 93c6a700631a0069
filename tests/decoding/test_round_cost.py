"""What a round costs: between, beyond and above its points, and on file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, NO_HOST, HostPart, RoundCost
from lopa.errors import ConfigError

POINTS = ((32, 0.010), (64, 0.011), (512, 0.030))
HOST = (0.002, 0.003, 0.004, 0.004, 0.005)  # with 0, 1, 3, 7, 15 branches
RECORDS = (0.0020, 0.0021, 0.0022, 0.0025, 0.0030)


def test_between_and_beyond_its_points() -> None:
    cost = RoundCost(((10, 1.0), (20, 2.0), (40, 3.0)))
    assert [cost(t) for t in (5, 10, 15, 30, 40, 60)] == [1.0, 1.0, 1.5, 2.5, 3.0, 4.0]
    assert EVERY_ROUND_THE_SAME(1) == EVERY_ROUND_THE_SAME(9999) == 1.0


@pytest.mark.parametrize(
    "wrong", [(), ((2, 1.0), (1, 2.0)), ((1, 0.0),), ((0, 1.0),), ((1, float("inf")),)]
)
def test_what_makes_no_sense_is_refused(wrong: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match="tokens rising"):
        RoundCost(wrong)


def test_sessions_cost_the_host_by_their_branches() -> None:
    cost = RoundCost(POINTS, HOST)
    assert cost(64, (0, 1, 3, 7, 15)) == pytest.approx(0.011 + sum(HOST))
    assert cost(64, (2,)) == pytest.approx(0.011 + 0.0035)  # between one and three
    assert cost(64, (40,)) == pytest.approx(0.011 + HOST[-1])
    on_host = HostPart(0.5, 0.0)
    assert cost.of_rounds(np.array([64.0]), on_host, 5)[0] == pytest.approx(0.511)
    with pytest.raises(ConfigError, match="at least 0"):
        RoundCost(POINTS, (*HOST[:4], -1.0))
    with pytest.raises(ConfigError, match="a number for each"):
        RoundCost(POINTS, HOST[:2])
    with pytest.raises(ConfigError, match="a number for each"):
        RoundCost(POINTS, HOST, RECORDS[:2])


def test_records_count_where_they_take_longer_than_the_device() -> None:
    cost = RoundCost(POINTS, HOST, RECORDS)
    assert cost(64, [0] * 5) == pytest.approx(0.011 + 5 * HOST[0])
    assert cost(64, [0] * 10) == pytest.approx(10 * RECORDS[0] + 10 * HOST[0])
    assert cost(64, [7] * 5) == pytest.approx(5 * RECORDS[3] + 5 * HOST[3])
    more = replace(cost, every_round=0.003)  # in any case
    for sessions in (5, 10):
        assert more(64, [0] * sessions) == pytest.approx(cost(64, [0] * sessions) + 0.003)


@given(
    st.integers(1, 6000),
    st.lists(st.integers(0, 20), min_size=1, max_size=40),
    st.booleans(),
    st.booleans(),
)
def test_one_round_costs_what_it_does_among_several(
    tokens: int, branches: list[int], padded: bool, halves: bool
) -> None:
    """The way without arrays gives what they give."""
    padding = ((256, 32), (1024, 64), (4096, 256)) if padded else ()
    records = tuple(part / 5 for part in RECORDS)
    cost = RoundCost(POINTS, HOST, records, padding, halves, every_round=0.0003)
    parts = [np.interp(branches, AUTO_BRANCHES, of).sum() for of in (HOST, records)]
    host = HostPart(*map(float, parts))
    assert cost.host_of_all(branches) == pytest.approx(host)
    found = cost.of_rounds(np.array([float(tokens)]), host, len(branches))
    assert cost(tokens, branches) == pytest.approx(float(found[0]))


@given(st.integers(0, 20))
def test_the_host_of_one_session_goes_straight_between_numbers(branches: int) -> None:
    cost = RoundCost(POINTS, HOST, RECORDS)
    assert cost.host_of(branches) == pytest.approx(cost.host_of_all((branches,)))
    both = cost.host_of_all((branches, branches + 1))
    assert cost.host_of(branches + 0.5) == pytest.approx((both.waited / 2, both.records / 2))


def test_the_share_of_the_host() -> None:
    cost = RoundCost(POINTS, HOST, RECORDS)
    of_one = (HOST[0] + RECORDS[0]) / POINTS[0][1]
    assert cost.host_share(1, [0]) == pytest.approx(of_one)
    assert cost.host_share(1, [0] * 3) == pytest.approx(3 * of_one)
    assert cost.host_share(1, [15]) > cost.host_share(1, [0]) > cost.host_share(4096, [0])
    assert EVERY_ROUND_THE_SAME.host_share(64, [0] * 100) == 0


def test_in_halves_the_host_and_the_device_work_at_once() -> None:
    cost = RoundCost(((1, 0.001), (1001, 0.101)), (0.001,) * 5, (0.001,) * 5, in_halves=True)
    whole, twice = 0.051 + 20 * 0.001, 2 * 0.026
    assert cost(501, [0] * 20) == pytest.approx(twice, rel=0.01)
    assert twice < whole
    assert cost(501, [0] * 30) == pytest.approx(0.051 + 30 * 0.001)  # the host takes longer
    assert cost(501, (0,)) == pytest.approx(0.052)  # one cannot be halved
    # Two rounds cost the host twice what every round does.
    assert replace(cost, every_round=0.01)(501, [0] * 15) == pytest.approx(0.052, rel=0.01)
    assert replace(cost, every_round=0.01)(501, [0] * 20) == pytest.approx(0.051 + 0.03)


def test_a_padded_round_costs_what_its_padded_size_does() -> None:
    plain = RoundCost(POINTS)
    padded = RoundCost(POINTS, padding=((256, 32), (1024, 64), (4096, 256)))
    for tokens in (1, 31, 32, 33, 64, 65, 255, 256, 257, 320, 321, 1000, 1025, 1280, 4096):
        step = 32 if tokens <= 256 else 64 if tokens <= 1024 else 256
        size = -(-tokens // step) * step
        here, there = np.array([float(tokens)]), np.array([float(size)])
        expected = plain.of_rounds(there, NO_HOST, 1)
        assert padded.of_rounds(here, NO_HOST, 1) == pytest.approx(expected)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs" / "cost.json"
    cost = RoundCost(POINTS, HOST, RECORDS, ((256, 32),), in_halves=True, every_round=0.002)
    cost.write(path, model="tiny", device="some GPU")
    assert RoundCost.read(path) == cost
    assert json.loads(path.read_text())["device"] == "some GPU"
    assert RoundCost.of(POINTS) == RoundCost(POINTS)
    assert RoundCost.of(cost) is cost


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[[1]]", '{"points": 3}', '{"points": [[2, 1], [1, 1]]}', '[[1, "x"]]']
)
def test_a_file_without_a_cost_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.json holds no round cost"):
        RoundCost.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        RoundCost.read(tmp_path / "nothing.json")
