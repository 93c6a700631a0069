"""The documentation: links that resolve, and tables that say what the records say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page.relative_to(ROOT)
    for page in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "measurements").glob("*.md"),
        *(ROOT / "recipes").glob("*.md"),
        ROOT / "src/lopa/tiny/README.md",
    )
)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_resolve(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "measurements"))
    import report  # type: ignore[import-not-found]

    for path, text in report.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: python measurements/report.py"


def test_the_reference_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command and every option that its help has."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import cli_pages  # type: ignore[import-not-found]

    text = cli_pages.command_line()
    for command in ("lopa generate", "lopa models check", "lopa bench serve", "lopa study"):
        assert re.search(rf"^#+ {command}$", text, re.MULTILINE)
    assert "| `--merge`, `--no-merge` | Let the winner take along" in text
    assert "lopa[plots]" in text
    for line in text.splitlines():
        assert not line.startswith("|") or re.sub(r"\\\|", "", line).count("|") == 3, line


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of decoding.md, as they stand."""
    text = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/decoding.md", "exec"), {})
    assert capsys.readouterr().out.strip()
