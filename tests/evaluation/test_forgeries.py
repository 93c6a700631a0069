"""Answers that want to be found right without being right."""

from __future__ import annotations

import re

import pytest
from judge_cases import Case, cases

from lopa.evaluation.judge import judge

FORGERIES = cases("forgeries")


@pytest.mark.parametrize("case", FORGERIES, ids=str)
def test_no_forgery_passes(case: Case) -> None:
    assert not judge(case.answer, case.tests).passed


@pytest.mark.parametrize("case", FORGERIES, ids=str)
def test_the_tests_can_be_passed(case: Case) -> None:
    """By a right answer: it is not the tests that fail the forgeries."""
    if "except" in case.tests or "f() == 2" in case.tests or "f(note)" in case.tests:
        return
    expected = re.search(r"f\(\) == (.+)", case.tests)
    for value in (expected[1] if expected else "1", "[1]", "x[0] if x else 1"):
        if judge(f"def f(*x): return {value}", case.tests).passed:
            return
    pytest.fail("no answer passes")


def test_there_are_many() -> None:
    assert len(FORGERIES) >= 25
