"""How much of the answer to a word problem is free wording, not foretold by the question.

Every random choice behind an answer is resampled, one at a time, with all others kept; what counts
is how many of these change the text. Prints one line of JSON.

    python measurements/wording.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

import lopa
from lopa.tasks import words
from lopa.tasks.rng import Rng
from lopa.tasks.words.answer import Answer
from lopa.tasks.words.story import Story, pick_story

TOKENIZER = Path(lopa.__file__).parent / "tiny" / "tokenizer.json"


def worded(story: Story, key: str, resampled: int = -1) -> tuple[str, int]:
    """The answer of a key and the number of its choices, the one at `resampled` taken anew."""
    rng = Rng(key)
    usual, fresh = rng.random, random.Random(f"{key}/{resampled}").random
    choices = 0

    def counted() -> float:
        nonlocal choices
        choices += 1
        value = usual()
        return fresh() if choices - 1 == resampled else value

    rng.random = counted
    return Answer(story, rng).text(), choices


def measure(answers: int, wordings: int, seed: int) -> dict[str, float]:
    """The means over several answers, and the different answers to one problem of three steps."""
    encode = Tokenizer.from_file(str(TOKENIZER)).encode
    choices = changing = tokens = 0
    for index in range(answers):
        key = f"wording/{seed}/{index}"
        story = pick_story(Rng(key), "train")
        text, count = worded(story, key + "/answer")
        choices += count
        changing += sum(worded(story, key + "/answer", i)[0] != text for i in range(count))
        tokens += len(encode(text).ids)
    three_steps = next(s for s in range(seed, seed + 1000) if _steps(s) == 3)
    distinct = {words.generate(three_steps, "train", w).answer for w in range(wordings)}
    return {
        "answers": answers,
        "choices": round(choices / answers, 2),
        "changing_choices": round(changing / answers, 2),
        "tokens": round(tokens / answers, 1),
        "wordings": wordings,
        "distinct": len(distinct),
    }


def _steps(seed: int) -> int:
    return words.generate(seed, "train").answer.count("=")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=150)
    parser.add_argument("--wordings", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(measure(args.answers, args.wordings, args.seed)))


if __name__ == "__main__":
    main()
