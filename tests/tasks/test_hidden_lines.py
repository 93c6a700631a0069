"""Hidden lines: what is hidden, and what counts as filling it."""

from __future__ import annotations

import pytest

from lopa.evaluation.scoring import score_filled, score_step
from lopa.tasks import generate
from lopa.tasks.infill import hide_line


@pytest.mark.parametrize("task", ["words", "functions"])
def test_a_hidden_line_is_one_of_the_answer(task: str) -> None:
    for seed in range(200):
        problem = generate(task, seed, "held-out")
        hidden = hide_line(problem)
        if hidden is None:
            assert len(problem.answer.strip().split("\n")) == 2  # of a function
            continue
        assert hidden.prefix + hidden.line + hidden.suffix == problem.prompt + problem.answer
        assert hidden.prefix.endswith("\n")
        assert hidden.suffix.startswith("\n")
        assert len(hidden.suffix) > 1
        assert "\n" not in hidden.line
        assert hidden.line.strip()
        assert hidden == hide_line(problem)
        if task == "words":
            assert score_filled(problem, hidden, hidden.line)
        else:
            assert hidden.prefix != problem.prompt


def test_functions_are_run_with_the_line_that_fills() -> None:
    for seed in range(6):
        problem = generate("functions", seed, "held-out")
        hidden = hide_line(problem)
        if hidden is not None:
            assert score_filled(problem, hidden, hidden.line)
            assert not score_filled(problem, hidden, "    return [")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("That is 6 * 12 = $72.", True),
        ("So 72: 12 x 6 = 72 drums", True),
        ("First 3 + 3 = 6, then 6*12=72.", True),
        ("(6 + 6) * 6 = 72", True),
        ("144/2 = 72.", True),
        ("6 * 12 = 71", False),
        ("6 * 11 = 72", False),
        ("The cost is $72.", False),
        ("6 * 12 = 72\n1 + 1 = 2", False),
        ("72 / 0 = 72", False),
        ("72 minus 0 = 72 drums", True),
        ("2. 36 + 36 = 72, so it is 72.", True),
        ("6 ** 12 = 72", False),
        ("", False),
    ],
)
def test_a_step_has_to_come_to_its_result(text: str, right: bool) -> None:
    assert score_step("First, the drums cost 6 * 12 = $72.", text) is right
