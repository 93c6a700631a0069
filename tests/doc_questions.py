"""The questions that README and the pages of the documentation put to the built-in model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lopa.models.questions import FUNCTION, WORD_PROBLEM, question
from lopa.tasks.problem import Problem

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "src/lopa/tiny/README.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What each comes to: a question that is not here has to be worked out and added.
ANSWERS = {WORD_PROBLEM: "18"}

_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Where a prompt stands in a command, in a request and in Python.
_PROMPT = re.compile(
    r"""lopa\ (?:generate|race)\ "([^"]+)"
    | "(?:content|prompt)":\ "([^"]+)"
    | \b(?:question|prompt)\ ?=\ "([^"]+)"
    | \.(?:generate|stream|session)\("([^"]+)\"""",
    re.VERBOSE,
)
_CURL = re.compile(r"(/v1/[\w/]+)[^\n]* -d '(\{.*?\})'", re.DOTALL)


def blocks(page: Path) -> list[str]:
    return [block[1] for block in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def prompts(page: Path) -> list[str]:
    """Every prompt in a block of code, and every block that is a question; `…` stands for any."""
    found = []
    for block in blocks(page):
        for match in _PROMPT.finditer(block):
            text = next(group for group in match.groups() if group is not None)
            found.append(text.replace("\\n", "\n"))
        asked = question(block)
        if asked is not None and asked.is_whole:
            found.append(asked.text)
    return [text for text in found if text != "…" and not text.replace(" ", "").isdigit()]


def requests(page: Path) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of every curl command that sends one."""
    return [
        (match[1], json.loads(match[2]))
        for block in blocks(page)
        for match in _CURL.finditer(block)
    ]


def problem(asked: str) -> Problem:
    """A question with what scores its answer."""
    if asked == FUNCTION:
        check = tuple(line for line in asked.splitlines() if line.startswith("assert "))
        return Problem("functions", 0, "eval", "", asked, "", check)
    return Problem("words", 0, "eval", "", asked, "", (ANSWERS[asked],))
