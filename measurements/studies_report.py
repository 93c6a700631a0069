"""Studies in the docs: tables, readings and pictures, from what the commands wrote.

    python measurements/studies_report.py docs/studies docs/results.md README.md

Each FOLDER/NAME.json goes between the marks <!-- study FOLDER NAME --> and <!-- end -->, its
reading alone between <!-- reading FOLDER NAME --> and <!-- end -->. Nothing between marks is
written by hand. Pictures are drawn beside the figures.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from lopa.evaluation.plots import save
from marks import put, table


def section(found: dict[str, Any], picture: str) -> str:
    study = import_module(f"lopa.studies.{found['study']}")
    lines = ["```", found["command"], "```", "", *table(*study.table(found["findings"]))]
    reading = study.reading(found["findings"])
    shown = f"![{found['study']}]({picture})"
    return "\n".join([*lines, "", measured_on(found), "", reading, "", shown])


def measured_on(found: dict[str, Any]) -> str:
    said = ", ".join(f"{n} {value}" for n, value in found["host"].items() if value is not None)
    return f"{found['problems']} problems of `{found['task']}`, seed {found['seed']}; {said}."


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, pages = Path(sys.argv[1]), [Path(page) for page in sys.argv[2:]]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    for path in sorted(folder.glob("*/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        study = import_module(f"lopa.studies.{found['study']}")
        picture = save(study.draw(found["findings"]), path.with_suffix(""))[0]
        name = f"{path.parent.name} {path.stem}"
        for page, text in texts.items():
            shown = picture.relative_to(page.parent).as_posix() if f"study {name}" in text else ""
            text = put(text, f"study {name}", section(found, shown))
            texts[page] = put(text, f"reading {name}", study.reading(found["findings"]))
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
