"""The table of ranks, from what `lopa bench parallel --json` printed."""

from __future__ import annotations

import json
from pathlib import Path

from markdown_sections import machine, table

RECORDS = [Path(__file__).with_name(f"ranks_cpu_{count}.json") for count in (1, 2)]


def sections() -> dict[str, str]:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS]
    heads = ("ranks", "rank", "round ms", "forward", "idle", "all-gather", "commit", "host",
             "(all-gather + commit) / round")  # fmt: skip
    parts = ("round_ms", "forward_ms", "idle_ms", "gather_ms", "commit_ms", "host_ms")
    rows = [
        (
            str(len(run["ranks"])),
            str(number),
            *(f"{rank[part]:.1f}" for part in parts),
            f"{share:.2%}",
        )
        for run in runs
        for number, (rank, share) in enumerate(
            zip(run["ranks"], run["protocol_shares"], strict=True)
        )
    ]
    last = runs[-1]
    said = (
        f"Means of {last['rounds']} rounds; {machine(last['host'])}. {len(last['ranks'])} ranks "
        f"exchanged at most {last['statistics_bytes'] / 1024:.1f} KB of statistics per round."
    )
    return {"ranks": "\n".join([table(heads, rows), "", said])}
