"""Questions of the built-in model, told from other text; and what other text gets for an answer."""

from __future__ import annotations

import pytest

from lopa import LLM, LopaError
from lopa.engine.prompts import Infill
from lopa.models import questions
from lopa.models.questions import FUNCTION, WORD_PROBLEM, complete, question
from lopa.tasks import SPLITS, TASKS, generate

OTHER = (
    "Hello",
    "",
    "What is 2 + 2?",
    "How many people live in France?",
    "Write a poem about 3 roses.",
    "Define count_even(numbers) so that it returns the number of even numbers.",  # no assert
    "def f(x):\n    return x",
    "assert f(1) == 2",
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
def test_every_problem_is_a_question(task: str, split: str) -> None:
    """As it was trained on, whatever ends it; and with a part of the answer behind it."""
    for seed in range(200):
        problem = generate(task, seed, split)
        asked = problem.prompt.removesuffix("\n")
        for ending in ("", "\n", " ", "\r\n", "\n\n"):
            assert complete(asked + ending) == problem.prompt
        assert complete("\n" + asked) == problem.prompt
        begun = problem.prompt + problem.answer[:20]
        assert complete(begun) == begun
        questions.check(problem.prompt)
        questions.check(problem.prompt + problem.answer)


@pytest.mark.parametrize("text", OTHER)
def test_other_text_is_none(text: str) -> None:
    assert question(text) is None
    assert complete(text) == text
    with pytest.raises(LopaError, match="solves word problems of a few steps and small Python"):
        questions.check(text)


@pytest.mark.parametrize("task", TASKS)
def test_two_questions_are_one_too_many(task: str) -> None:
    shot, problem = (generate(task, seed, "eval") for seed in (1, 2))
    with pytest.raises(LopaError, match="one question at a time"):
        questions.check(f"{shot.prompt}{shot.answer}\n\n{problem.prompt}")


def test_a_long_text_is_read_once() -> None:
    """A megabyte of what looks like the beginning of a question, in no time."""
    for text in ("Write (", "how many 1", "Write\nassert ", "?"):
        question(text * (1_000_000 // len(text)))


@pytest.mark.parametrize("asked", [WORD_PROBLEM, FUNCTION])
def test_the_line_break_is_given(llm: LLM, asked: str) -> None:
    """To every kind of prompt; but not where a gap follows."""
    expected = llm.encode(f"{asked}\n")
    assert llm.encode(asked) == llm.encode(f" {asked}\n\n") == expected
    assert llm.encode([{"role": "user", "content": asked}]) == expected
    assert llm.encode(asked, whole=False) == expected[:-1]
    session = llm.session(Infill(asked, ((2, " Then"),)), llm.decode_config(max_new_tokens=2))
    assert session.trace.prompt_ids[: len(expected) - 1] == expected[:-1]


def test_what_it_cannot_read_is_refused(llm: LLM) -> None:
    user = {"role": "user", "content": WORD_PROBLEM}
    hello = [{"role": "user", "content": "Hello"}]
    with pytest.raises(LopaError, match="solves word problems"):
        llm.generate(hello)
    with pytest.raises(LopaError, match="solves word problems"):
        llm.stream(hello)
    for before in ({"role": "system", "content": "Be brief."}, user):
        with pytest.raises(LopaError, match=r"one question at a time.*send one user message"):
            llm.chat([before, user])


def test_any_text_is_continued(llm: LLM) -> None:
    config = llm.decode_config(max_new_tokens=8, block_size=4, branches=0)
    assert len(llm.generate(["Hello", "1 + 1 ="], config)) == 2


def test_an_answer_that_has_to_fit_may_be_to_anything(llm: LLM) -> None:
    settings = {"regex": "[ab]{2}", "max_new_tokens": 8, "branches": 0}
    for asked in ("Hello", [{"role": "user", "content": "Hello"}]):
        assert set(llm.generate(asked, **settings).text) <= set("ab")
    assert [event.output for event in llm.stream("Hello", **settings)][-1] is not None
