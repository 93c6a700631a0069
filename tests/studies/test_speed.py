"""The study of speed with a model that says how long it took: ratios, and who is timed on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME
from lopa.evaluation.evaluate import problems
from lopa.evaluation.sample import SampleFile
from lopa.studies import speed
from lopa.studies.study import Study

SECONDS = {0: 1.0, 1: 0.8, 3: 1.2, 7: 2.0, 15: 4.0, "auto": 0.82}  # an answer of 40 tokens


class Said:
    """In place of the model."""

    round_cost = EVERY_ROUND_THE_SAME

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.calls: list[Any] = []

    def generate(self, prompt: str, config: DecodeConfig) -> Any:
        self.calls.append(config.branches)
        one = SimpleNamespace(branches=[None, None])
        longer = 1 + len(prompt) % 7  # some problems take longer, under every setting
        return SimpleNamespace(
            tokens=40,
            seconds=SECONDS[config.branches] * longer,
            rounds=10,
            text="",
            trace=SimpleNamespace(rounds=[one] * 10),
        )


def run(device: str, count: int, folder: Path) -> tuple[Said, Any]:
    model = Said(device)
    study = Study(
        model,  # type: ignore[arg-type]
        problems("words", "eval", count, 0),
        DecodeConfig().settings(),
        0,
        SampleFile(folder / "samples.jsonl", {}),
    )
    return model, speed.run(study)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ratios_and_who_is_timed_to_the_end(device: str, tmp_path: Path) -> None:
    count = speed.TRIAL + 5
    asked = problems("words", "eval", count, 0)
    model, found = run(device, count, tmp_path)
    settings = found["settings"]
    for k in (*AUTO_BRANCHES, "auto"):
        # Two thirds of the best fixed number's speed are too little, 0.8 are not.
        is_near = k in (0, 1, "auto")
        assert settings[str(k)]["problems"] == (count if is_near else speed.TRIAL)
        assert settings[str(k)]["auto"] == pytest.approx(SECONDS[k] / SECONDS["auto"])
        shares = [1 + len(p.prompt) % 7 for p in asked[: settings[str(k)]["problems"]]]
        mean = sum(shares) / len(shares)
        assert settings[str(k)]["answer_seconds"] == pytest.approx(SECONDS[k] * mean)
        again = 2 if device == "cuda" else 1  # kernels are made first
        timed = settings[str(k)]["problems"] * again
        assert model.calls.count(k) == timed + (k == "auto")  # and once to load
    assert settings["0"]["branches"] == 1.0
    assert settings["0"]["accuracy"] == 0.0
    assert speed.best_fixed(found) == "1"
    assert "0.976 times" in speed.reading(found)


def test_few_problems_are_timed_under_all(tmp_path: Path) -> None:
    model, found = run("cpu", 3, tmp_path)
    assert {one["problems"] for one in found["settings"].values()} == {3}
    firsts = model.calls[1::6]
    assert len(set(firsts)) == 3  # another one begins with every problem
