"""What branches gain: the prior of `branches="auto"` (PRIOR_GAINS in decoding/branch_budget.py).

    python measurements/prior_gains.py [--accept agreed] [--limit 60] [--seed 8] [--device auto]

Every round is decoded with as many branches as auto may take. A line for each task: the tokens that
a round without branches would have brought, and what each number of branches would have brought
over the one before; means over all rounds in which there were so many.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

from lopa import LLM
from lopa.config import AUTO_BRANCHES
from lopa.decoding import branch_budget
from lopa.decoding.branch_budget import BranchBudget
from lopa.evaluation import evaluate
from lopa.tasks import TASKS
from markdown_sections import table


def gains(llm: LLM, task: str, accept: str, limit: int, seed: int) -> list[float]:
    """[choices] of none, and of each choice over the one before."""
    seen: list[Sequence[int]] = []
    learn = BranchBudget.learn

    def note(budget: BranchBudget, tokens: Sequence[int]) -> None:
        if len(tokens) > 1:  # the first round has no branches
            seen.append(tokens)
        learn(budget, tokens)

    BranchBudget.learn = note  # type: ignore[method-assign]
    branch_budget.LEARN_EVERY = 1
    prompts = [problem.prompt for problem in evaluate.problems(task, "train", limit, seed)]
    config = llm.decode_config(branches="auto", objective="tpf", accept=accept, max_new_tokens=160)
    llm.generate(prompts, config, progress=True)
    BranchBudget.learn = learn  # type: ignore[method-assign]
    found = [sum(tokens[0] for tokens in seen) / len(seen)]
    for choice in range(1, len(AUTO_BRANCHES)):
        steps = [tokens[choice] - tokens[choice - 1] for tokens in seen if len(tokens) > choice]
        found.append(sum(steps) / len(steps))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept", default="agreed")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    llm = LLM("tiny", device=options.device)
    heads = ["task", "none", *(f"+ {b - a}" for a, b in pairwise(AUTO_BRANCHES))]
    rows = []
    for task in TASKS:
        found = gains(llm, task, options.accept, options.limit, options.seed)
        rows.append([task, *(f"{value:.2f}" for value in found)])
    print(table(heads, rows))


if __name__ == "__main__":
    main()
