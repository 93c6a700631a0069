"""What the API adds to a request: its time at the client, less its time in the engine.

Requests go one after the other over one connection, to a server of its own with random weights of
a small shape, so that there is little else to measure. Prints one JSON object.

    python measurements/api_overhead.py [--requests 300]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

import httpx

KINDS = {
    "whole": {},
    "stream": {"stream": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--model", default="dummy:dream-tiny")
    options = parser.parse_args()
    command = [sys.executable, "-m", "lopa", "serve", "--port", "0", "--log-format", "json"]
    server = subprocess.Popen(
        [*command, "--model", options.model, "--block-size", "8", "--branches", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert server.stderr is not None
        url = ""
        for line in server.stderr:
            said = json.loads(line)
            url = said.get("url", url)
            if said["event"] == "engine ready":
                break
        rest = threading.Thread(target=server.stderr.read)  # a full pipe would stop the server
        rest.start()
        with httpx.Client(base_url=url, timeout=60) as client:
            found = {kind: measure(client, body, options.requests) for kind, body in KINDS.items()}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        rest.join()
        server.stderr.close()
    print(json.dumps({"model": options.model, "requests": options.requests, **found}))


def measure(client: httpx.Client, more: dict[str, object], count: int) -> dict[str, float]:
    """Milliseconds beyond the engine's: the median and the 95th percentile."""
    body = {"prompt": "Hello", "max_tokens": 8, **more}
    spent = []
    for _ in range(count + 20):
        began = time.perf_counter()
        response = client.post("/v1/completions", json=body)
        seconds = time.perf_counter() - began
        response.raise_for_status()
        text = response.text
        if more:
            ends = [line for line in text.splitlines() if '"lopa"' in line]
            text = ends[-1].removeprefix("data: ")
        figures = json.loads(text)["choices"][0]["lopa"]
        spent.append(1e3 * (seconds - figures["engine_seconds"]))
    spent = sorted(spent[20:])
    return {"median_ms": statistics.median(spent), "p95_ms": spent[int(0.95 * len(spent))]}


if __name__ == "__main__":
    main()
