"""Every question in README and docs is one that the built-in model answers rightly, every example
runs, and so do the blocks of Python."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from doc_questions import EXAMPLES, PAGES, ROOT, blocks, problem, prompts
from lopa import LLM, DecodeConfig
from lopa.config import AUTO_BRANCHES
from lopa.evaluation.scoring import score
from lopa.models.questions import FUNCTION, WORD_PROBLEM

ASKED = sorted({prompt for page in PAGES for prompt in prompts(page)} | {WORD_PROBLEM, FUNCTION})


def test_they_are_found() -> None:
    where = {page.name for page in PAGES if prompts(page)}
    assert {"README.md", "serving.md", "structured.md", "decoding.md"} <= where
    assert prompts(ROOT / "src/lopa/tiny/README.md") == [WORD_PROBLEM, FUNCTION]


@pytest.mark.engine
def test_they_are_answered_rightly() -> None:
    """With every number of branches that "auto" may take: with any load and on any machine."""
    llm = LLM("tiny", device="cpu")
    cases = [(asked, branches) for asked in ASKED for branches in AUTO_BRANCHES]
    configs = [DecodeConfig(branches=branches, max_new_tokens=128) for _, branches in cases]
    outputs = llm.generate([asked for asked, _ in cases], configs)
    for (asked, branches), output in zip(cases, outputs, strict=True):
        assert score(problem(asked), output.text), (asked, branches, output.text)


@pytest.mark.engine
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {
        "generate": "#### 18\n55 tokens in 6 rounds",
        "stream": "return sum(kept)\n5 rounds, ended by eos",
        "together": "prompt 1, 7 branches: ",
        "infill_and_schema": "'Result': 18}",
        "custom_policy": "#### 18",
    }
    runpy.run_path(str(path))
    assert shown[path.stem] in capsys.readouterr().out


def test_there_are_five_examples() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) == 5
    assert "has five short programs" in text


@pytest.mark.parametrize(
    "page", ["README.md", pytest.param("docs/structured.md", marks=pytest.mark.engine)]
)
def test_blocks_of_python_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = [block for block in blocks(ROOT / page) if block.startswith("from lopa import LLM\n")]
    assert ran
    for block in ran:
        exec(compile(block, page, "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"#### 18", out)
