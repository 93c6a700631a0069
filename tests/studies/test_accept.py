"""The figures of the studies of how a branch is accepted, on made-up samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lopa.studies import accept, exact


def samples(*answers: tuple[str, bool]) -> list[Any]:
    """Of problems 0, 1, …: (text, whether it is correct), in no order."""
    numbered = list(enumerate(answers))
    found = [SimpleNamespace(problem=i, text=text, correct=right) for i, (text, right) in numbered]
    return found[::-1]


def test_differences_are_paired() -> None:
    base = samples(("a", True), ("b", False), ("c", True), ("d", True))
    other = samples(("a", True), ("x", True), ("y", False), ("z", False))
    found = accept._paired(accept._ordered(other), accept._ordered(base))
    assert found["difference"] == pytest.approx(-0.25)
    assert found["same_answers"] == 0.25
    # Steps 0, 1, −1, −1: their deviation by hand.
    spread = (0.25**2 + 1.25**2 + 2 * 0.75**2) ** 0.5 / 4
    low, high = found["difference_interval"]
    assert (low, high) == pytest.approx((-0.25 - 1.96 * spread, -0.25 + 1.96 * spread))
    same = accept._paired(base, base)
    assert (same["difference"], same["difference_interval"]) == (0.0, [0.0, 0.0])


def arm(tpf: float, difference: float, same_answers: float) -> dict[str, Any]:
    reach = [difference - 0.01, difference + 0.01]
    paired = {"difference": difference, "difference_interval": reach, "same_answers": same_answers}
    return {"tpf": tpf, "accuracy": 0.5, "interval": [0.4, 0.6], **paired}


def test_what_a_table_says() -> None:
    findings = {"arms": {accept.D2F: arm(2.0, 0.0, 1.0), accept.SHOWN: arm(5.0, -0.02, 0.5)}}
    heads, rows = accept.table(findings)
    assert all(len(row) == len(heads) for row in rows)
    assert rows[1][2:] == ("-2.0 (-3.0 … -1.0)", "5.00", "2.50", "50.0%")
    assert accept.reading(findings) == (
        "agreed, k = 7: 2.50 times D2F's TPF, accuracy -2.0 points (-3.0 … -1.0)."
    )
    assert accept.reading({"arms": {accept.D2F: arm(2.0, 0.0, 1.0)}}) == "Not measured."


def test_whether_answers_are_the_same() -> None:
    arms = {accept.D2F: arm(2.0, 0.0, 1.0), "exact, k = 3": arm(3.0, 0.0, 1.0)}
    reading = exact.reading({"arms": arms})
    assert reading == "All answers are the same. exact, k = 3: 1.50 times D2F's TPF."
    arms["exact, k = 7"] = arm(2.5, 0.0, 0.9)
    assert exact.reading({"arms": arms}).startswith(
        "Answers differ with exact, k = 7. exact, k = 3"
    )
