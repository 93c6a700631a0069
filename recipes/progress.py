"""Where a run stands: a bar on a terminal that has rich, otherwise a line every few seconds."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    def __init__(self) -> None:
        self._bar: Any = None
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, Progress, TextColumn
            except ImportError:
                return
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"))
            self._task = self._bar.add_task("", total=1.0)

    def update(self, share: float, text: str) -> None:
        """`share` of the budget is gone."""
        if self._bar is None:
            self.say(text)
        else:
            self._bar.start()  # once it is, this does nothing
            self._bar.update(self._task, completed=share, description=text)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
