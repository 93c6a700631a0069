"""Write every generated table of the documentation from the records in the repository.

    python measurements/report.py             # the tables
    python measurements/report.py --plots     # the pictures too (needs lopa[plots])
    python measurements/report.py --check     # write nothing, fail where a table is out of date

A table stands between `<!-- NAME -->` and `<!-- end -->`; nothing there is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import accept_report
import checkpoints_report
import experts_report
import precision_report
import ramp_report
import ranks_report
import rounds_report
import scaling_report
import studies_report
import tradeoff_report
from markdown_sections import fill

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/checkpoints.md",
    "docs/results.md",
    "docs/studies/README.md",
    "src/lopa/tiny/README.md",
)
REPORTS = (
    accept_report,
    checkpoints_report,
    experts_report,
    precision_report,
    ramp_report,
    ranks_report,
    rounds_report,
    scaling_report,
    studies_report,
    tradeoff_report,
)


def pages() -> dict[Path, str]:
    """Every page as it should be."""
    sections = {name: text for report in REPORTS for name, text in report.sections().items()}
    paths = [ROOT / page for page in PAGES]
    return {path: fill(path.read_text(encoding="utf-8"), sections) for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plots", action="store_true", help="pictures too")
    parser.add_argument("--check", action="store_true", help="fail where a table is out of date")
    options = parser.parse_args()
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            sys.exit(f"{path} is out of date: python measurements/report.py")
        path.write_text(text, encoding="utf-8")
    if options.plots:
        studies_report.plot()
        tradeoff_report.plot(ROOT / "docs" / "tradeoff.png")
        scaling_report.plot(ROOT / "docs" / "scaling.png")


if __name__ == "__main__":
    main()
