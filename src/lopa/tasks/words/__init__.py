"""Grade-school word problems, answered step by step with the number after `####` at the end."""

from lopa.tasks.problem import Problem
from lopa.tasks.rng import Rng
from lopa.tasks.words.answer import Answer
from lopa.tasks.words.question import Question
from lopa.tasks.words.story import STRUCTURES, pick_story

__all__ = ["NAME", "STRUCTURES", "generate"]

NAME = "words"


def generate(seed: int, split: str, wording: int = 0) -> Problem:
    """The problem of a seed. `wording` selects among different texts of the same answer."""
    rng = Rng(f"{NAME}/{split}/{seed}")
    story = pick_story(rng, split)
    prompt = Question(story, rng).text()
    answer = Answer(story, Rng(f"{NAME}/{split}/{seed}/answer/{wording}")).text()
    return Problem(NAME, seed, split, story.structure, prompt, answer, (str(story.result),))
