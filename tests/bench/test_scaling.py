from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa.bench.scaling import Link, Scaling
from lopa.cli.main import main
from lopa.errors import ConfigError
from lopa.models.checkpoint import model_config

ROUNDS = [(0, 5.0, 3.0), (1, 6.0, 3.0), (3, 8.0, 4.0), (7, 14.0, 9.0), (14, 25.0, 17.0)]


def measured(**host: Any) -> dict[str, Any]:
    return {
        "host": {"model": "dummy:dream-7b", "device": "x", "dtype": "bfloat16", **host},
        "rounds": [
            {
                "branches": k,
                "window": 64,
                "round_ms": forward + 0.5,
                "forward_ms": forward,
                "floor_ms": floor,
            }
            for k, forward, floor in ROUNDS
        ],
    }


def model(link: Link | None = None) -> Scaling:
    return Scaling(measured(), model_config("dummy:dream-7b"), 64, link or Link())


def test_one_device_is_what_was_measured() -> None:
    point = model().point(7, 15.55, 1, 1)
    assert point.measured
    assert point.round_ms == pytest.approx(14.5)
    assert point.tokens_per_second == pytest.approx(1e3 * 15.55 / 14.5)


def test_more_replicas_forward_fewer_rows() -> None:
    free = Link(1e9, 0.0, 0.0)  # a link that costs nothing
    points = {b: model(free).point(7, 15.55, b, 1) for b in (1, 2, 3, 4, 8, 16)}
    assert not any(points[b].measured for b in (2, 3, 4, 8, 16))
    assert points[4].forward_ms == 6.0
    assert points[3].forward_ms == 7.0  # three rows: between two and four
    assert points[8].forward_ms == points[16].forward_ms == 5.0
    assert points[2].round_ms == pytest.approx(8.5, abs=1e-3)
    dear = model(Link(1.0, 100.0, 1.0))
    assert dear.point(7, 15.55, 8, 1).round_ms > points[8].round_ms + 1.3


def test_only_degrees_that_cut_the_model() -> None:
    points = model().points(7, 15.55, (1, 2), (1, 2, 4, 8))
    assert {p.tensor_parallel for p in points} == {1, 2, 4}  # four key-value heads
    at = {(p.branch_parallel, p.tensor_parallel): p for p in points}
    assert at[1, 2].forward_ms == pytest.approx(14.0 - 4.5)
    assert at[1, 2].reduce_ms > 0


def test_what_cannot_be_said() -> None:
    with pytest.raises(ConfigError, match="fewer than two rounds with a window of 96"):
        Scaling(measured(), model_config("dummy:dream-7b"), 96, Link())
    with pytest.raises(ConfigError, match="20 branches were not measured"):
        model().point(20, 1.0, 1, 1)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rounds.json"
    file.write_text(json.dumps(measured()))
    assert main(["bench", "scaling", str(file)]) == 0
    assert "measured" in capsys.readouterr().out
    assert main(["bench", "scaling", str(file), "--json", "--tpf", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tpf"] == 5
    assert sum(p["measured"] for p in found["points"]) == 1
    picture = tmp_path / "scaling.png"
    pytest.importorskip("matplotlib")
    assert main(["bench", "scaling", str(file), "--picture", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    file.write_text("{}")
    assert main(["bench", "scaling", str(file)]) == 2
    assert "is not the output of `lopa bench round --json`" in capsys.readouterr().err
