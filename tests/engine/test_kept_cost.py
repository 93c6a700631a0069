"""What rounds cost is kept on disk, by what it was measured with."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lopa import LLM
from lopa.cache_folder import cache_folder
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.engine import cost_measurement, kept_cost
from lopa.models.files import BUILT_IN
from lopa.studies.recorded_cost import read_costs

COST = RoundCost(((32, 0.010), (64, 0.012)), (0.001,) * 5, (0.002,) * 5, ((512, 8),))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RoundCost]:
    """The measurements that are made, each twice as slow as the one before."""
    found: list[RoundCost] = []

    def measure(*_: object) -> RoundCost:
        points = tuple((t, s * 2 ** len(found)) for t, s in COST.points)
        found.append(replace(COST, points=points))
        return found[-1]

    monkeypatch.setattr(cost_measurement, "measure", measure)
    monkeypatch.setenv("LOPA_CACHE_DIR", str(tmp_path / "cache"))
    return found


def load(**options: str) -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", **options)  # type: ignore[arg-type]


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "round_cost").iterdir())


def test_it_is_measured_once(measured: list[RoundCost], tmp_path: Path) -> None:
    first = load()
    assert not first.knows_round_cost
    assert first.round_cost == COST
    assert first.cost_seconds > 0
    second = load()
    assert second.knows_round_cost
    assert second.round_cost == COST
    assert second.cost_seconds == 0
    assert len(measured) == 1
    (path,) = files(tmp_path)
    assert json.loads(path.read_text())["about"]["model"] == "dummy:dream-tiny"
    ((name, settings),) = read_costs([path]).items()  # a study can be given what is kept
    assert name.startswith("dummy:dream-tiny, float32, cpu")
    assert RoundCost.of(settings) == COST
    assert load(dtype="bfloat16").round_cost == measured[1]
    assert len(files(tmp_path)) == 2
    assert second.measure_round_cost() == measured[2]  # asked for: it takes the place of the first
    assert load().round_cost == measured[2]
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        '{"about": 3}',
        '{"points": [[1, 1.0]]}',
        '{"about": {}, "points": [[1, 1.0]]}',
    ],
)
def test_a_file_that_is_of_no_use_is_replaced(
    measured: list[RoundCost], tmp_path: Path, content: str
) -> None:
    assert load().round_cost == COST
    (path,) = files(tmp_path)
    path.write_text(content)
    assert load().round_cost == measured[1]
    assert load().round_cost == measured[1]
    assert len(measured) == 2


@pytest.mark.parametrize("name", ["torch", "lopa", "weights"])
def test_other_weights_and_versions_are_measured_anew(
    measured: list[RoundCost], tmp_path: Path, name: str
) -> None:
    assert load().round_cost == COST
    (path,) = files(tmp_path)
    raw = json.loads(path.read_text())
    raw["about"][name] = "another"
    path.write_text(json.dumps(raw))
    assert load().round_cost == measured[1]
    assert files(tmp_path) == [path]


def test_a_folder_that_cannot_be_written_is_no_error(
    measured: list[RoundCost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPA_CACHE_DIR", os.devnull)
    assert load().round_cost == COST
    assert load().round_cost == measured[1]


def test_no_measure_is_not_kept(
    measured: list[RoundCost], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cost_measurement, "measure", lambda *_: EVERY_ROUND_THE_SAME)
    assert load().round_cost is EVERY_ROUND_THE_SAME
    assert not (tmp_path / "cache").exists()


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOPA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder("round_cost") == Path("/x/lopa/round_cost")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("round_cost") == Path("~/.cache/lopa/round_cost")


def test_weights_are_known_by_their_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    first = kept_cost.weights_identity(str(tmp_path))
    assert first == kept_cost.weights_identity(str(tmp_path))
    weights.write_bytes(b"12")
    assert kept_cost.weights_identity(str(tmp_path)) not in (first, None)
    assert kept_cost.weights_identity("tiny") == kept_cost.weights_identity(str(BUILT_IN["tiny"]))
    assert kept_cost.weights_identity(str(tmp_path / "gone")) is None
