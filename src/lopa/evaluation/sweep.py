"""A sweep: one benchmark under every combination of some settings' values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lopa.config import DecodeConfig
from lopa.engine.llm import LLM
from lopa.errors import ConfigError
from lopa.evaluation.aup import aup
from lopa.evaluation.benchmark import Benchmark
from lopa.evaluation.evaluate import Tick, answer
from lopa.evaluation.sample import Sample, Samples, figures, mean_by_round
from lopa.option_help import FIELDS

Axes = Mapping[str, Sequence[Any]]  # setting → the values it takes


def parse_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    """branches=0,1,3 threshold=0.8,0.9 → the values by setting."""
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        name = name.replace("-", "_")
        if name not in FIELDS or name in ("stop", "schema", "regex"):
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
    """What to run: the same exercises for every combination of the axes."""

    benchmark: Benchmark
    axes: Axes
    config: Callable[[Mapping[str, Any]], DecodeConfig]  # of a combination

    @property
    def answers(self) -> int:
        """How many there are when it is done."""
        return len(combinations(self.axes)) * len(self.benchmark.exercises)

    def done(self, samples: Samples) -> int:
        """How many there are by now."""
        return sum(len(self._samples(samples, options)) for options in combinations(self.axes))

    def _samples(self, samples: Samples, options: Mapping[str, Any]) -> list[Sample]:
        return samples.of(setting_name(options), len(self.benchmark.exercises))

    def run(self, llm: LLM, samples: Samples, batch_size: int, tick: Tick) -> None:
        """Decode what is not there yet."""
        for options in combinations(self.axes):
            answer(
                llm,
                self.benchmark,
                self.config(options),
                samples,
                setting=setting_name(options),
                batch_size=batch_size,
                tick=tick,
            )

    def report(self, samples: Samples) -> dict[str, Any]:
        """Figures by setting, and the AUP of each curve along the first axis."""
        points = []
        for options in combinations(self.axes):
            those = self._samples(samples, options)
            points.append({"options": options, **figures(those), "by_round": mean_by_round(those)})
        return {
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
