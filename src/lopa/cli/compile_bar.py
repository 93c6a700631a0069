"""How far a GPU's kernels are compiled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lopa.cli.terminal import print_note

if TYPE_CHECKING:
    from rich.console import Console

_DELAY_SECONDS = 1.0  # kernels that are on disk are there sooner, and show nothing


class CompileBar:
    """A progress bar on a terminal; elsewhere one line. Nothing where they are soon there."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("compiling kernels for this GPU, once"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: Any = None
        self._terminal = console.is_terminal
        self._started = time.monotonic()
        self._is_noted = False

    def close(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def show(self, done: int, total: int) -> None:
        if self._task is None or not done:
            self.close()
            self._started = time.monotonic()
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=done, total=total)
        if time.monotonic() - self._started < _DELAY_SECONDS or self._is_noted:
            return
        if self._terminal:
            self._progress.start()
        else:
            self._is_noted = True
            from lopa.kernels.compilation import triton_folder

            print_note(f"compiling {total} kernels for this GPU, kept in {triton_folder()}")
