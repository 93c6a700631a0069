"""Human-written solutions, mixed into training with --data FOLDER.

Only the files named here are read, so neither a benchmark nor a validation or test split can
slip in. Every 25th problem of GSM8K's training split is left out as well, with everything
derived from it: the validation file of unseen problems is made of those.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

from lopa.errors import LopaError

FILES = ("gsm8k_train", "gsm8k_perturb_train", "svamp", "mawps")
_HELD_OUT = 25  # every so many problems
_MARKS = re.compile(r"<<[^<>]*>>")
_SPACES = re.compile(r"[ \t]+")


def read(folder: Path, most: int) -> list[tuple[str, str]]:
    """(prompt, answer) of at most so many usable rows; LopaError when there is no file to read."""
    paths = [folder / f"{name}.jsonl.gz" for name in FILES]
    present = [path for path in paths if path.is_file()]
    if not present:
        wanted = ", ".join(path.name for path in paths)
        raise LopaError(f"--data {folder}: none of {wanted} is there; give their folder")
    pairs = []
    for path in present:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for index, line in enumerate(lines):
                row = json.loads(line)
                if path.name.startswith("gsm8k") and row.get("src", index) % _HELD_OUT == 0:
                    continue
                pair = _pair(row)
                if pair is not None:
                    pairs.append(pair)
    if len(pairs) > most:
        pairs = random.Random(0).sample(pairs, most)
    return pairs


def _pair(row: dict[str, Any]) -> tuple[str, str] | None:
    question = _SPACES.sub(" ", str(row["question"])).strip() + "\n"
    if "equation" not in row:
        return question, _SPACES.sub(" ", _MARKS.sub("", row["answer"])).strip()
    # One equation and a number: written out the way the other answers are.
    result = float(row["answer"])
    if not result.is_integer():
        return None
    equation = re.sub(r"(\d)\.0\b", r"\1", str(row["equation"])).partition("=")
    sides = [side.strip() for side in (equation[0], equation[2]) if side.strip()]
    side = max(sides, key=len, default="")
    side = side[1:-1].strip() if re.fullmatch(r"\([^()]*\)", side) else side
    if not side or re.search(r"[a-zA-Z]", side):
        return None
    return question, f"{side} = {int(result)}\n#### {int(result)}"
