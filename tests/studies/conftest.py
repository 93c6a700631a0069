"""Spares studies of dummy models what takes seconds and is not about them."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _known_cost(known_cost: None) -> None: ...


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decode that is timed begins with one; among all that tests import it takes 0.2 s."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
