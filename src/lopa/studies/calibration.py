"""What does a branch's score predict, and how confident must a lookahead token be?

Scores: all definitions are computed on the same rounds, those of the settings given. *Within* a
round: over its branches, the score against the tokens that each would fill now if it won. *Ahead*:
over rounds, the winner's score against the tokens of the next round. And each definition decodes
the problems itself.

Floors: the problems again under each floor on a lookahead token's probability, by the score `mean`.
The one with the most tokens per forward weighted by accuracy, as AUP weights it, is the guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from lopa.config import DecodeConfig, ScoreName
from lopa.evaluation import plots
from lopa.evaluation.aup import weighed
from lopa.evaluation.sample import Sample, figures
from lopa.studies.spearman import spearman
from lopa.studies.study import Findings, Setting, Study, Table
from lopa.studies.wording import accuracy, number

SCORES: tuple[ScoreName, ...] = get_args(ScoreName)
FLOORS = (0.1, 0.2, 0.3, 0.5)
UNWEIGHED = "fills, α 0"


def run(study: Study) -> Findings:
    free = {"accept": "score", "lookahead_floor": 0.0}
    plain = Setting("no lookahead", {"branches": 0})
    by_score = {name: free | _scored_by(name) for name in SCORES}
    seen = Setting("mean", by_score["mean"], "observed")
    others = [Setting(name, by_score[name]) for name in SCORES if name != "mean"]
    unweighed = Setting(UNWEIGHED, {**by_score["fills"], "creation_weight": 0.0})
    floors = [Setting(f"floor {f:g}", {**by_score["mean"], "lookahead_floor": f}) for f in FLOORS]
    samples = study.decode([plain, seen, *others, unweighed, *floors])
    found = {name: figures(some) for name, some in samples.items()}
    notes = [sample.notes for sample in samples["mean"] if sample.notes is not None]
    by_floor = {"0": found["mean"]}
    by_floor |= {f"{f:g}": found[f"floor {f:g}"] for f in FLOORS if f"floor {f:g}" in found}
    return {
        "rounds": sum(sample.rounds for sample in samples["mean"]),
        "plain": found["no lookahead"],
        "scores": {name: _predicts(name, notes) | {"decoded": found[name]} for name in SCORES},
        "unweighed": found[UNWEIGHED],
        "floors": by_floor,
        "placed": _placed(samples["mean"]),
        "guard": guard(by_floor, found["no lookahead"]),
    }


def _scored_by(name: ScoreName) -> dict[str, Any]:
    """A score with its own usual weight of the lookahead token."""
    return {
        "score": name,
        "creation_weight": DecodeConfig(accept="score", score=name).creation_weight,
    }


def guard(by_floor: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """The floor with the most tokens per forward, each setting's weighed by its accuracy."""
    best = max(f["accuracy"] for f in (plain, *by_floor.values()))
    return float(max(by_floor, key=lambda f: _worth(by_floor[f], best)))


def _worth(figures: Mapping[str, Any], best: float) -> float:
    return float(figures["tpf"] * weighed(100 * figures["accuracy"], 100 * best))


def _predicts(name: str, notes: Sequence[Mapping[str, Any]]) -> Findings:
    within, best = [], []
    now: list[float] = []
    later: list[float] = []
    for note in notes:
        for scores, tokens in zip(note["scores"], note["brought"], strict=True):
            if len(tokens) < 2:
                continue
            rank = spearman(scores[name], tokens)
            if rank is not None:
                within.append(rank)
            best.append(tokens[scores[name].index(max(scores[name]))] / max(1, *tokens))
        for i in range(len(note["brought"]) - 1):
            now.append(note["scores"][i][name][note["winners"][i]])
            later.append(note["brought"][i + 1][note["winners"][i + 1]])
    return {
        "within": sum(within) / len(within) if within else None,  # mean over rounds
        "rounds_within": len(within),
        "of_best": sum(best) / len(best) if best else None,  # tokens, as a share of the most
        "ahead": spearman(now, later),
        "rounds_ahead": len(now),
    }


def _placed(samples: Sequence[Sample]) -> list[Findings]:
    """Answers, and right ones, by the least confident lookahead token that won."""
    edges = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.01)
    groups: list[list[bool]] = [[] for _ in edges[1:]]
    for sample in samples:
        won = [p for p in (sample.notes or {}).get("placed", ()) if p is not None]
        if won:
            groups[sum(min(won) >= edge for edge in edges) - 1].append(sample.correct)
    return [
        {"from": low, "to": min(high, 1.0), "answers": len(group), "correct": sum(group)}
        for low, high, group in zip(edges, edges[1:], groups, strict=False)
    ]


def table(findings: Findings) -> Table:
    heads = (
        "score or floor",
        "rank correlation, this round",
        "tokens / best branch",
        "rank correlation, next round",
        "accuracy",
        "TPF",
    )
    rows: list[tuple[str, ...]] = [("no lookahead", "", "", "", *_decoded(findings["plain"]))]
    for name, f in findings["scores"].items():
        told = (number(f[key]) for key in ("within", "of_best", "ahead"))
        rows.append((f"score {name}", *told, *_decoded(f["decoded"])))
    rows.append((f"score {UNWEIGHED}", "", "", "", *_decoded(findings["unweighed"])))
    for floor, f in findings["floors"].items():
        if float(floor):
            rows.append((f"floor {floor}", "", "", "", *_decoded(f)))
    return heads, rows


def _decoded(figures: Mapping[str, Any]) -> tuple[str, str]:
    return accuracy(figures), f"{figures['tpf']:.2f}"


def reading(findings: Findings) -> str:
    mean, fills = (number(findings["scores"][name]["of_best"]) for name in ("mean", "fills"))
    floor = f"Best floor: {findings['guard']:g}." if len(findings["floors"]) > 1 else ""
    return (
        f"The branch that `mean` chooses fills {mean} of the tokens of the round's best branch, "
        f"the one that `fills` chooses {fills}. {floor or 'Floors were not measured.'}"
    )


def plot(findings: Findings) -> Any:
    figure, (left, right) = plots.require_plots().subplots(1, 2, figsize=(10.5, 4.2))
    names = list(findings["scores"])
    for offset, (key, label) in enumerate(
        (("within", "tokens of this round, over branches"), ("ahead", "of the next, over rounds"))
    ):
        values = [findings["scores"][name][key] or 0.0 for name in names]
        left.bar([i + 0.4 * offset for i in range(len(names))], values, width=0.38, label=label)
    left.set_xticks([i + 0.2 for i in range(len(names))], names)
    left.set_ylabel("rank correlation of the score with")
    left.axhline(0, color="black", linewidth=0.6)
    left.legend(**plots.LEGEND)
    floors = findings["floors"]
    right.plot([f["tpf"] for f in floors.values()], _percent(floors.values()), "o-", label="floors")
    for floor, f in floors.items():
        place = (f["tpf"], 100 * f["accuracy"])
        right.annotate(floor, place, (4, 4), textcoords="offset points", fontsize=8)
    plain = findings["plain"]
    right.plot([plain["tpf"]], [100 * plain["accuracy"]], "s", label="no lookahead")
    right.set_xlabel("tokens per forward")
    right.set_ylabel("accuracy, % (numbers: floor)")
    right.grid(alpha=0.3)
    right.legend(**plots.LEGEND)
    return figure


def _percent(figures: Any) -> list[float]:
    return [100 * f["accuracy"] for f in figures]
