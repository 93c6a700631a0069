"""Threads and forked children for tests, none of which may hang."""

from __future__ import annotations

import os
import select
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

PATIENCE = 300.0  # seconds: only what hangs takes so long


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each returned or raised, in order."""
    found: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            found[index] = works[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    return found


def in_forked_child(work: Callable[[], str]) -> str:
    """What it returned there."""
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            os.write(there, work().encode())
        except BaseException as error:
            os.write(there, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(there)
    try:
        assert select.select([here], [], [], PATIENCE)[0], "the child hangs"
        return os.read(here, 1 << 16).decode()
    finally:
        os.close(here)
        os.kill(child, signal.SIGKILL)  # it is not waited for yet: the id is its own
        os.waitpid(child, 0)
