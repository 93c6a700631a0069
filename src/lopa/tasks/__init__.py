"""The built-in tasks by name.

Splits: `train`; `eval`, the structures of training with other content; `held-out`, structures
that occur in neither. A content (structure, numbers, names) belongs to exactly one split, so no
evaluation problem can be met in training, whatever the seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lopa.tasks import functions, words
from lopa.tasks.problem import Problem

SPLITS: tuple[str, ...] = ("train", "eval", "held-out")
ROOM = 160  # new tokens: what an answer may need


@dataclass(frozen=True, slots=True)
class Task:
    """A problem generator `(seed, split, wording)`. `lopa.evaluation.scoring` scores answers."""

    name: str
    structures: tuple[str, ...]
    generate: Callable[[int, str, int], Problem]


TASKS: dict[str, Task] = {
    words.NAME: Task(words.NAME, words.STRUCTURES, words.generate),
    functions.NAME: Task(functions.NAME, functions.STRUCTURES, functions.generate),
}


def generate(task: str, seed: int, split: str, wording: int = 0) -> Problem:
    """The problem of a seed: the same in every process and Python version.

    `wording` changes the text of the reference answer and nothing else. Raises KeyError for an
    unknown task and ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return TASKS[task].generate(seed, split, wording)
