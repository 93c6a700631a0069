"""A sweep: one task under every combination of some settings' values.

Everything a report says is read from the file of samples, so a sweep that was interrupted and run
again reports the same as one that was not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lopa.config import DecodeConfig
from lopa.engine.llm import LLM
from lopa.errors import ConfigError
from lopa.evaluation import tasks
from lopa.evaluation.aup import aup
from lopa.evaluation.problem import Problem
from lopa.evaluation.sample import SampleFile, figures, make_sample, mean_by_round
from lopa.fields import FIELDS

Axes = Mapping[str, Sequence[Any]]  # setting → the values it takes
Progress = Callable[[int, int], None]


def parse_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    """branches=0,1,3 threshold=0.8,0.9 → the values by setting."""
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        name = name.replace("-", "_")
        if name not in FIELDS or name == "stop":
            raise ConfigError(
                f"cannot sweep {name!r}: give NAME=VALUE,VALUE with a decoding option"
            )
        found = [_value(text) for text in values.split(",")]
        if "" in found or len(set(map(str, found))) < len(found) or name in axes:
            raise ConfigError(f"{word!r}: give each setting once, and each of its values once")
        axes[name] = found
    return axes


def combinations(axes: Axes) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def setting_name(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run: the same problems for every combination of the axes."""

    task: str
    problems: Sequence[Problem]
    axes: Axes
    config: Callable[[Mapping[str, Any]], DecodeConfig]  # of a combination

    def run(
        self, llm: LLM, file: SampleFile, batch_size: int, progress: Progress | None = None
    ) -> None:
        """Decode what is not on file yet."""
        total = len(combinations(self.axes)) * len(self.problems)
        for options in combinations(self.axes):
            name = setting_name(options)
            todo = [i for i in range(len(self.problems)) if (name, i) not in file.samples]
            prompts = [self.problems[i].prompt for i in todo]
            config = self.config(options)
            outputs = llm.generate_together(prompts, config, max_running=batch_size)
            for index, output in outputs:
                number = todo[index]
                correct = tasks.score(self.problems[number], output.text)
                file.add([make_sample(name, number, correct, output)])
                if progress:
                    progress(len(file.samples), total)

    def report(self, file: SampleFile) -> dict[str, Any]:
        """Figures by setting, and the AUP of each curve along the first axis."""
        points = []
        for options in combinations(self.axes):
            samples = file.of(setting_name(options))
            rounds = mean_by_round(samples)
            points.append({"options": options, **figures(samples), "by_round": rounds})
        return {
            "task": self.task,
            "axes": {name: list(values) for name, values in self.axes.items()},
            "points": points,
            "curves": curves(points),
        }


def curves(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points by what they share beside the first axis, with the AUP of each curve.

    All curves are measured by the highest accuracy among all points.
    """
    best = max(100 * p["accuracy"] for p in points)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        shared = dict(list(point["options"].items())[1:])
        groups.setdefault(json.dumps(shared), []).append(point)
    return [
        {
            "shared": json.loads(shared),
            "aup": aup([(p["tpf"], 100 * p["accuracy"]) for p in group], best),
            "problems": min(p["problems"] for p in group),
        }
        for shared, group in groups.items()
    ]


def of_curve(report: Mapping[str, Any], curve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of a curve, in the order of the first axis."""
    shared = curve["shared"].items()
    return [p for p in report["points"] if shared <= p["options"].items()]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
