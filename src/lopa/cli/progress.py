"""How far a command is, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from lopa.cli.terminal import print_note, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

BAR_AFTER = 0.5  # seconds: what is done sooner shows nothing
LINE_AFTER = 2.0
# Seconds between two lines: a tenth of what has passed, but at least and at most so many.
LINE_SECONDS = (5.0, 60.0)
_TICK = 0.1  # seconds between two looks at the clock


class Progress:
    """A context that says what is being done, and how far it is.

    Without a title nothing is shown before the first `update`: something else, such as a download,
    may show its own. Nothing is shown once all is done, until the next `update`.
    """

    def __init__(self, title: str = "", unit: str = "") -> None:
        self._console = stderr_console()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._bar: Bar | None = None
        self._task: Any = None
        self._begin(title, unit)

    def _begin(self, title: str, unit: str) -> None:
        self._title, self._unit = title, unit
        self._done = 0
        self._total: int | None = None
        self._since = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show nothing any more."""
        self._closed.set()
        self._thread.join()
        self._hide()

    def _hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(
        self, done: int, total: int | None = None, *, title: str = "", unit: str = ""
    ) -> None:
        """So many are done; another title begins anew. total: None where it is not known."""
        with self._lock:
            was_done = self._total is not None and self._done >= self._total
            if was_done or (title and title != self._title):
                self._begin(title or self._title, unit or self._unit)
            self._done, self._total = done, total

    def _watch(self) -> None:
        while not self._closed.wait(_TICK):
            with self._lock:
                if self._title and (self._total is None or self._done < self._total):
                    self._show(time.monotonic())
                else:
                    self._hide()

    def _show(self, now: float) -> None:
        if self._console.is_terminal:
            if self._bar is None and now - self._since > BAR_AFTER:
                self._bar, self._task = self._make_bar()
            if self._bar is not None:
                self._bar.update(
                    self._task,
                    description=self._title,
                    completed=self._done,
                    total=self._total,
                    count=self._count(),
                )
            return
        least, most = LINE_SECONDS
        pause = min(max(least, (now - self._since) / 10), most)
        if self._last_line == self._since:  # the first one
            pause = LINE_AFTER
        if now - self._last_line >= pause:
            self._last_line = now
            count = self._count()
            print_note(f"{self._title}: {count + ', ' if count else ''}{now - self._since:.0f} s")

    def _count(self) -> str:
        if not self._done and self._total is None:
            return ""
        of = "" if self._total is None else f" of {self._total}"
        return f"{self._done}{of} {self._unit}".rstrip()

    def _make_bar(self) -> tuple[Bar, Any]:
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        task = bar.add_task(self._title, total=None, count="")
        bar.start()
        return bar, task


def start_torch() -> None:
    """Import it, which takes seconds, and say so: before anything that imports it."""
    if "torch" not in sys.modules:
        with Progress("starting torch"):
            import torch  # noqa: F401
