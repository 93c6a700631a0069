"""What do the ranking of lookaheads and the selection of a winner add, each on its own?"""

from __future__ import annotations

from functools import partial
from typing import Any

from lopa.evaluation import plots
from lopa.evaluation.sample import figures
from lopa.studies.study import Findings, Study, Table
from lopa.studies.variants import RandomPositions, RandomWinner

_VARIANTS = ("no lookahead", "random winner", "random positions", "LoPA")


def answers(study: Study) -> int:
    return len(_VARIANTS) * len(study.problems)


def run(study: Study) -> Findings:
    full = study.config()
    runs: dict[str, tuple[Any, Any]] = {
        "no lookahead": (study.config(branches=0), None),
        "random winner": (full, partial(RandomWinner, seed=study.seed)),
        "random positions": (full, partial(RandomPositions, seed=study.seed)),
        "LoPA": (full, None),
    }
    return {"variants": {n: figures(study.decode(n, *runs[n])) for n in _VARIANTS}}


def table(findings: Findings) -> Table:
    heads = ("variant", "accuracy", "TPF", "× no lookahead")
    plain = findings["variants"]["no lookahead"]["tpf"]
    return heads, [
        (
            name,
            f"{f['accuracy']:.0%} ({f['interval'][0]:.0%} … {f['interval'][1]:.0%})",
            f"{f['tpf']:.2f}",
            f"{f['tpf'] / plain:.2f}",
        )
        for name, f in findings["variants"].items()
    ]


def draw(findings: Findings) -> Any:
    figure, (left, right) = plots.require_plots().subplots(1, 2, figsize=(10, 3.6))
    names = list(findings["variants"])
    found = list(findings["variants"].values())
    left.barh(names, [f["tpf"] for f in found])
    left.set_xlabel("tokens per forward")
    right.barh(names, [100 * f["accuracy"] for f in found])
    right.set_xlabel("accuracy, %")
    for part in (left, right):
        part.invert_yaxis()
    return figure
