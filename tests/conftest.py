"""Keeps tests and what they start on one thread each, and what they measure off the disk.

The tests in a browser are left out unless they are asked for: they need Chromium.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported. torch.set_num_threads would be for one thread of Python alone: others
# would take a thread per core, which spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What rounds cost is kept nowhere: a test that wants it kept says where.
os.environ["LOPA_CACHE_DIR"] = os.devnull


@pytest.fixture
def known_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests keep nothing on disk: every model would measure for seconds what rounds cost."""
    from lopa.decoding.round_cost import RoundCost
    from lopa.engine import cost_measurement

    cost = RoundCost(((8, 0.01), (1024, 0.02)))
    monkeypatch.setattr(cost_measurement, "measure", lambda *_: cost)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw them takes longer than to decode what a test needs."""
    from lopa.evaluation import plots

    def close(figure: Any, _: Path) -> list[Path]:
        plots.require_plots().close(figure)
        return []

    monkeypatch.setattr(plots, "save", close)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--browser", action="store_true", help="run the tests in a browser, too")
    parser.addoption("--screenshots", metavar="FOLDER", help="keep the pictures that they take")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = collection_path.name == "browser" and not config.getoption("--browser")
    return True if left_out else None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.getoption("--browser"):
        terminalreporter.write_line("left out: tests in a browser (make test-browser)")
