"""Rows of a benchmark from files, and requests that are refused before anything is loaded."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from lopa.errors import ConfigError
from lopa.evaluation.protocol import PROTOCOLS
from lopa.evaluation.public import benchmark
from lopa.evaluation.rows import read_rows

ROWS = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def test_formats(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.jsonl").write_text(LINES + "\n")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    for path in tmp_path.iterdir():
        assert read_rows(path, "gsm8k", ("question", "answer")) == ROWS


@pytest.mark.harness
@pytest.mark.filterwarnings("ignore")
def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet", "gsm8k", ("question", "answer")) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("absent.jsonl", None, "cannot read"),
        ("a.jsonl", "", "holds no rows"),
        ("a.jsonl", "{", "no JSON, JSON Lines or Parquet"),
        ("a.json", "{}", "it is no list"),
        ("a.jsonl", "1\n", "row 1 has no question"),
        ("a.jsonl", LINES + '{"question": "3 + 3?"}\n', "row 3 has no answer; gsm8k needs"),
        ("a.jsonl.gz", "not gzipped", "cannot read"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | None, named: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=named):
        read_rows(tmp_path / name, "gsm8k", ("question", "answer"))


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("humaneval", {"shots": 1}, "without examples"),
        ("mbpp", {"shots": 4}, "has 3 examples"),
        ("gsm8k", {"limit": 0}, "limit must be at least 1"),
        ("gsm8k", {"shots": 2}, "need more rows"),
        ("mbpp", {"shots_data": "rows"}, "examples are rows"),
    ],
)
def test_bad_requests(tmp_path: Path, name: str, options: dict[str, object], named: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(dict.fromkeys(PROTOCOLS[name].fields, "x")) + "\n")
    if "shots_data" in options:
        options = {"shots_data": rows}
    with pytest.raises(ConfigError, match=named):
        benchmark(name, chat=False, data=rows, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("gsm8k", "lm_eval", "harness"), ("mbpp+", "evalplus", "evalplus")],
)
def test_missing_packages(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'lopa\[{extra}\]'"):
        benchmark(name, chat=False)
