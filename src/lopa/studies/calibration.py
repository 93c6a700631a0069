"""Does a branch's score tell how many tokens it will bring, and which score tells it best?

All scores are computed on the same rounds, those of the settings given. *Within* a round: over its
branches, the score against the tokens that each would bring now if it won. *Ahead*: over rounds,
the winner's score against the tokens of the round after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from lopa.config import DecodeConfig, ScoreName
from lopa.decoding import lookahead
from lopa.decoding.decoder import Decoder
from lopa.evaluation import plots
from lopa.evaluation.sample import figures
from lopa.sequence import Round, Stats
from lopa.studies.ranks import spearman
from lopa.studies.study import Findings, Study, Table

_SCORES: tuple[ScoreName, ...] = get_args(ScoreName)


class Observed(Decoder):
    """Keeps, for every round, the scores of all branches by definition, and what each brings."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scores: list[dict[str, list[float]]] = []
        self.brought: list[list[int]] = []
        self.winners: list[int] = []
        self._configs = {name: _scored_by(self.config, name) for name in _SCORES}

    def advance(self, stats: Stats) -> Round:
        plan, frame = self._plan, self._frame
        assert plan is not None
        assert frame is not None
        _, view = self._columns(plan, frame)
        masks = plan.wanted[:, view]
        found: dict[str, list[float]] = {
            name: lookahead.score(
                masks,
                masks.sum(axis=1),
                stats.max_prob[:, view],
                stats.ranking[:, view],
                self.ahead,
                self.window.size,
                config,
            ).tolist()
            for name, config in self._configs.items()
        }
        rows = range(len(plan.rows))
        self.brought.append([self._brought(row, plan, stats, frame, view) for row in rows])
        self.scores.append(found)
        record = super().advance(stats)
        self.winners.append(record.winner)
        return record


def answers(study: Study) -> int:
    return len(study.problems)


def run(study: Study) -> Findings:
    made: list[Observed] = []

    def make(*arguments: Any, **options: Any) -> Decoder:
        made.append(Observed(*arguments, **options))
        return made[-1]

    samples = study.decode("observed", study.config(), make)
    found: Findings = {"rounds": sum(len(d.brought) for d in made), **figures(samples)}
    return found | {"scores": {name: _predicts(name, made) for name in _SCORES}}


def _predicts(name: str, decoders: list[Observed]) -> Findings:
    within, best = [], []
    now: list[float] = []
    later: list[float] = []
    for d in decoders:
        for scores, tokens in zip(d.scores, d.brought, strict=True):
            if len(tokens) < 2:
                continue
            rank = spearman(scores[name], tokens)
            if rank is not None:
                within.append(rank)
            best.append(tokens[scores[name].index(max(scores[name]))] / max(1, *tokens))
        for i in range(len(d.brought) - 1):
            now.append(d.scores[i][name][d.winners[i]])
            later.append(d.brought[i + 1][d.winners[i + 1]])
    return {
        "within": sum(within) / len(within) if within else None,  # mean over rounds
        "rounds_within": len(within),
        "of_best": sum(best) / len(best) if best else None,  # tokens, as a share of the most
        "ahead": spearman(now, later),
        "rounds_ahead": len(now),
    }


def table(findings: Findings) -> Table:
    heads = ("score", "within a round", "tokens of its choice / most", "the round after")
    return heads, [
        (name, *(_number(f[key]) for key in ("within", "of_best", "ahead")))
        for name, f in findings["scores"].items()
    ]


def draw(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(7, 4))
    names = list(findings["scores"])
    for offset, (key, label) in enumerate(
        (("within", "tokens now, over the branches"), ("ahead", "the round after, over rounds"))
    ):
        values = [findings["scores"][name][key] or 0.0 for name in names]
        part.bar([i + 0.4 * offset for i in range(len(names))], values, width=0.38, label=label)
    part.set_xticks([i + 0.2 for i in range(len(names))], names)
    part.set_ylabel("rank correlation of the score with")
    part.axhline(0, color="black", linewidth=0.6)
    part.legend()
    return figure


def _scored_by(config: DecodeConfig, name: ScoreName) -> DecodeConfig:
    neutral: Any = None  # a score's own options are settled anew
    return replace(
        config,
        score=name,
        score_window=neutral,
        score_fraction=neutral,
        creation_weight=neutral,
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
