"""Simulated speed of `auto` against every fixed number of branches, by given costs of a round.

Nothing is timed: the cost of each round is taken from a measurement of some device, so the result
is the value of the choices alone, the same on any machine. `speed` measures the whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import RoundCost
from lopa.errors import ConfigError
from lopa.evaluation import plots
from lopa.evaluation.sample import Sample
from lopa.studies.speed import interval
from lopa.studies.study import Findings, Setting, Study, Table


def read_costs(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """By model and device, from files of a round cost, of `study speed` or of `bench round`."""
    if not paths:
        raise ConfigError(
            "what does a round cost? Give --cost FILE, as `lopa bench cost`, `lopa study speed` "
            "or `lopa bench round --json` wrote it"
        )
    found = {}
    for path in paths:
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            if "points" in run:
                host, cost = run, RoundCost.of(run)
            elif run.get("study") == "speed":
                host, cost = run["host"], RoundCost.of(run["findings"]["round_cost"])
            else:
                measured = {int(r["tokens"]): r["round_ms"] / 1e3 for r in run["rounds"]}
                host, cost = run["host"], RoundCost.of(sorted(measured.items()))
            kind = host["quantize"] or host["dtype"]
            name = f"{host['model']}, {kind}, {host['device']}"
        except OSError as error:
            raise ConfigError(f"cannot read {path} ({error.strerror})") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{path} is no round cost, and no file of `study speed` or `bench round`"
            ) from None
        found[name] = cost.settings()
    return found


def run(study: Study) -> Findings:
    costs = {name: RoundCost.of(cost) for name, cost in study.costs.items()}
    fixed = {str(k): Setting(f"k = {k}", {"branches": k}) for k in AUTO_BRANCHES}
    autos = {
        name: Setting(f"auto, {name}", {"branches": "auto"}, cost=(name, cost))
        for name, cost in costs.items()
    }
    samples = study.decode([*fixed.values(), *autos.values()])
    return {
        "costs": [
            _compare(name, cost, {**fixed, "auto": autos[name]}, samples, study.seed)
            for name, cost in costs.items()
            if autos[name].name in samples and fixed["0"].name in samples
        ]
    }


def _compare(
    name: str,
    cost: RoundCost,
    settings: dict[str, Setting],
    samples: dict[str, list[Sample]],
    seed: int,
) -> Findings:
    settings = {key: setting for key, setting in settings.items() if setting.name in samples}
    there = [sorted(samples[s.name], key=lambda one: one.problem) for s in settings.values()]
    tokens = np.array([[one.tokens for one in some] for some in there], float)  # [settings, n]
    seconds = np.array([[sum(map(cost, one.forwarded)) for one in some] for some in there])
    rounds = np.array([sum(one.rounds for one in some) for some in there])
    tried = np.array([sum(map(sum, (one.branches for one in some))) for some in there])
    right = [sum(one.correct for one in some) / len(some) for some in there]
    speed = tokens.sum(axis=1) / seconds.sum(axis=1)
    best = int(speed[:-1].argmax())
    return {
        "cost": name,
        "points": cost.points,
        "best": list(settings)[best],
        "ratio": speed[-1] / speed[best],
        "interval": interval(tokens[[best, -1]], seconds[[best, -1]], seed),
        "settings": {
            key: {"tokens_per_second": speed[i], "tpf": tokens[i].sum() / rounds[i],
                  "branches": tried[i] / rounds[i], "accuracy": right[i]}
            for i, key in enumerate(settings)
        },
    }  # fmt: skip


def table(findings: Findings) -> Table:
    fixed = [f"k = {k}" for k in AUTO_BRANCHES]
    heads = ("round cost of", *fixed, "auto", "branches per round", "auto / best fixed")
    rows = []
    for found in findings["costs"]:
        low, high = found["interval"]
        by = found["settings"]
        speeds = [
            f"{by[key]['tokens_per_second']:.0f}, {by[key]['accuracy']:.0%}" if key in by else ""
            for key in (*map(str, AUTO_BRANCHES), "auto")
        ]
        ratio = f"{found['ratio']:.3f} ({low:.3f} … {high:.3f})"
        rows.append((found["cost"], *speeds, f"{by['auto']['branches']:.1f}", ratio))
    return heads, rows


def reading(findings: Findings) -> str:
    ratios = [found["ratio"] for found in findings["costs"]]
    if not ratios:
        return "Not measured."
    return (
        "Cells are tokens per second, simulated, and accuracy. `auto` makes at least "
        f"{min(ratios):.3f} times the tokens per second of the best fixed number."
    )


def plot(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(6.5, 4))
    names = [*map(str, AUTO_BRANCHES), "auto"]
    for found in findings["costs"]:
        by = found["settings"]
        there = [name for name in names if name in by]
        best = by[found["best"]]["tokens_per_second"]
        speeds = [by[name]["tokens_per_second"] / best for name in there]
        part.plot(there, speeds, "o", label=found["cost"])
    part.axhline(1, color="0.6", linewidth=1)
    part.set_xlabel("branches")
    part.set_ylabel("tokens per second / best fixed number's")
    part.grid(axis="y", alpha=0.3)
    part.legend(fontsize=8)
    return figure
