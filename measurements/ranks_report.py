"""What `lopa bench parallel` found, in the docs.

    python measurements/ranks_report.py docs/results.md FILE …

The files are its `--json`. The table goes between the mark <!-- ranks --> and its end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from marks import put_in, table

HEADS = ("ranks", "rank", "round ms", "forward", "idle", "all-gather", "commit", "host", "protocol")


def rows(run: dict[str, Any]) -> list[list[str]]:
    parts = ("round_ms", "forward_ms", "idle_ms", "gather_ms", "commit_ms", "host_ms")
    return [
        [
            str(len(run["ranks"])),
            str(number),
            *(f"{rank[part]:.2f}" for part in parts),
            f"{share:.2%}",
        ]
        for number, (rank, share) in enumerate(
            zip(run["ranks"], run["protocol_shares"], strict=True)
        )
    ]


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    page, *files = map(Path, sys.argv[1:])
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    lines = table(HEADS, [row for run in runs for row in rows(run)])
    sizes = [
        f"{len(run['ranks'])} ranks, {run['rounds']} rounds: at most "
        f"{run['statistics_bytes'] / 1024:.1f} KB of statistics in one, "
        f"{run['commits']} broadcasts of {run['commit_bytes'] / 1024:.0f} KB in all."
        for run in runs
        if len(run["ranks"]) > 1
    ]
    said = f"Means in ms; {runs[0]['host']['device']}, torch {runs[0]['host']['torch']}."
    put_in(page, "ranks", "\n".join([*lines, "", " ".join([said, *sizes])]))


if __name__ == "__main__":
    main()
