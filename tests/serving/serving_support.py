"""A server as its users meet it: a process of its own on a free port, with what it logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

PATIENCE = 180  # seconds after which something hangs: no slow machine takes so long
# By this score the model does not end its text early.
SMALL = ("--branches", "2", "--score", "mean", "--block-size", "8", "--max-new-tokens", "32")
# A token a round in small windows, to the last token asked for: 160 take a second or two.
SLOW: dict[str, Any] = {
    "decoder": "d2f",
    "threshold": 1.0,
    "block_size": 4,
    "append_at": 1.0,
    "attention": "block",
}
# What rounds cost: to measure it takes an engine seconds.
ROUND_COST = Path(__file__).with_name("round_cost.json")


class Server:
    """`lopa serve` with these arguments. A context: on the way out nothing is left running.

    measure: let the engine measure what rounds cost, as it does without being told.
    """

    def __init__(
        self,
        *arguments: str,
        wait: bool = True,
        measure: bool = False,
        **environment: str,
    ) -> None:
        command = [sys.executable, "-m", "lopa", "serve", "--port", "0", "--log-format", "json"]
        if not measure:
            environment = {"LOPA_ROUND_COST": str(ROUND_COST), **environment}
        self.process = subprocess.Popen(
            [*command, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self.lines: list[dict[str, Any]] = []
        self.noise: list[str] = []  # what is no log line
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = until(lambda: self.logged("listening"), self)[0]["url"]
            self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
            if wait:
                self.wait_ready()
        except BaseException:
            self.process.kill()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.noise.append(line)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line["event"] == event]

    @property
    def engine_pid(self) -> int:
        return int(self.logged("engine ready")[-1]["pid"])

    @property
    def ready(self) -> bool:
        return self.http.get("/health").status_code == 200

    def wait_ready(self) -> None:
        until(lambda: self.ready, self)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "Hello", **more: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **more)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 where it has none yet."""
        wanted = "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else ""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{wanted} "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def slots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/slots").json()["slots"]
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it and see to it that it took its engine along; returns its exit code."""
        assert self.process.stderr is not None
        if self.process.stderr.closed:
            return self.process.returncode
        engines = [int(line["pid"]) for line in self.logged("engine ready")]
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.http.close()
        self._reader.join(10)
        self.process.stderr.close()
        for pid in engines:
            until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def until(found: Callable[[], Any], server: Server | None = None) -> Any:
    """Wait for something to be true; returns it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := found():
            return value
        if server is not None and server.process.poll() is not None:
            raise AssertionError(f"the server has gone: {server.noise} {server.lines}")
        time.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE} s: {server.lines if server else ''}")


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(ppid) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def descendants(parent: int) -> list[int]:
    """Children before theirs."""
    own = children(parent)
    return own + [pid for child in own for pid in descendants(child)]


def data_of(lines: Any) -> list[Any]:
    """The events of a stream, its end included as a word."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in found]
