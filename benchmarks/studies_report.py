"""The tables of the studies in docs/results.md, from what `lopa study` wrote.

    python benchmarks/studies_report.py docs/studies docs/results.md

Puts each study's command and table between its marks; what is read from them is written by hand.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path


def section(found: dict[str, object]) -> str:
    study = import_module(f"lopa.studies.{found['study']}")
    heads, rows = study.table(found["findings"])
    lines = ["```", str(found["command"]), "```", ""]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    host = found["host"]
    assert isinstance(host, dict)
    said = ", ".join(f"{name} {value}" for name, value in host.items() if value is not None)
    return "\n".join([*lines, "", f"{found['problems']} problems of `{found['task']}`; {said}."])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    page = Path(sys.argv[2])
    text = page.read_text(encoding="utf-8")
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        begin = f"<!-- study {found['study']} -->"
        head, mark, rest = text.partition(begin)
        _, end, tail = rest.partition("<!-- end -->")
        if not mark or not end:
            sys.exit(f"{page} has no {begin} … <!-- end -->")
        text = f"{head}{begin}\n{section(found)}\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
