"""Fit the odds that a mask is filled next, for the drafts of `accept="exact"`.

    python measurements/fit_exact_drafts.py [--limit 300] [--seed 7001] [--device cuda]

Decodes problems of the built-in tasks, as many of each, and prints WEIGHTS and BIAS of
decoding/exact_drafts.py. A mask counts as filled if the anchor's next round is above the threshold
with the token that was predicted.
"""

from __future__ import annotations

import argparse

import numpy as np

from lopa import LLM, DecodeConfig
from lopa.decoding import exact_drafts
from lopa.decoding.fill import passes
from lopa.decoding.lookahead import Selection
from lopa.decoding.policy import ExactPolicy
from lopa.decoding.round_view import Anchor, RoundView
from lopa.evaluation import evaluate
from lopa.tasks import ROOM
from lopa.types import Draft, FloatArray

L2 = 1e-5  # of the weights of standardised features, per example
STEPS = 30


class Observed(ExactPolicy):
    """Notes the features of every mask, and whether it was filled."""

    def __init__(self, config: DecodeConfig, examples: list[FloatArray]) -> None:
        super().__init__(config)
        self.examples = examples

    def spawn(self, anchor: Anchor) -> list[Draft]:
        self.offset = anchor.view.offset
        self.found = exact_drafts.candidates(anchor, self.config.threshold)
        return super().spawn(anchor)

    def select(self, view: RoundView, drafts: list[Draft]) -> Selection:
        columns = self.found.columns + self.offset - view.offset
        inside = columns >= 0
        columns = columns[inside]
        filled = passes(view.max_prob[-1, columns], self.config.threshold)
        filled &= view.token[-1, columns] == self.found.token[inside]
        self.examples.append(np.column_stack([self.found.features[inside], filled]))
        return super().select(view, drafts)


def logistic(features: FloatArray, filled: FloatArray) -> tuple[FloatArray, float]:
    """Weights and constant, by Newton's method."""
    mean, spread = features.mean(axis=0), features.std(axis=0)
    x = np.column_stack([(features - mean) / spread, np.ones(len(features))])
    weights = np.zeros(x.shape[1])
    ridge = L2 * len(x) * np.eye(len(weights))
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-x @ weights))
        slope = x.T @ (chance - filled) + ridge @ weights
        curve = (x * (chance * (1 - chance))[:, None]).T @ x + ridge
        weights -= np.linalg.solve(curve, slope)
    own = weights[:-1] / spread
    return own, float(weights[-1] - own @ mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7001)
    parser.add_argument("--device")
    options = parser.parse_args()
    llm = LLM("tiny", device=options.device)
    config = llm.decode_config(max_new_tokens=ROOM, accept="exact", branches=15)
    tasks = []
    for task in ("functions", "words"):
        examples: list[FloatArray] = []
        problems = evaluate.problems(task, "eval", options.limit, options.seed)
        sessions = (
            llm.session(problem.prompt, config, policy=Observed(config, examples))
            for problem in problems
        )
        for _ in llm.engine().run(sessions):
            pass
        tasks.append(np.concatenate(examples))
        print(f"{task}: {len(tasks[-1])} masks, {tasks[-1][:, -1].mean():.1%} filled", flush=True)
    count = min(map(len, tasks))
    rng = np.random.default_rng(options.seed)
    every = np.concatenate([rng.permutation(task)[:count] for task in tasks])
    weights, bias = logistic(every[:, :-1], every[:, -1])
    print(f"WEIGHTS = np.array(({', '.join(f'{w:.2f}' for w in weights)}))\nBIAS = {bias:.2f}")


if __name__ == "__main__":
    main()
