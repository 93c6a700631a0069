"""Files of samples: cut short, damaged, and with more answers than are asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopa.cli.main import main
from lopa.errors import LopaError
from lopa.evaluation.sample import Sample, SampleFile

pytestmark = pytest.mark.usefixtures("known_cost", "no_pictures")

SMALL = ("--model", "dummy:dream-tiny", "--max-new-tokens", "8", "--block-size", "4", "--json")


def sample(problem: int, text: str = "größer 你好") -> Sample:
    return Sample(
        *("", problem, True, text, 4, 4, 2, 1.0, 0.5, "eos"),
        by_round=(2, 2),
        branches=(0, 0),
        forwarded=(8, 8),
    )


def written(path: Path, count: int = 3) -> bytes:
    SampleFile(path, {"seed": 0}).add([sample(i) for i in range(count)])
    return path.read_bytes()


def test_a_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    data = written(path)
    for end in range(len(data)):
        path.write_bytes(data[:end])
        file = SampleFile(path, {"seed": 0})
        kept = max(data[:end].count(b"\n") - 1, 0)
        assert file.of("", 3) == [sample(i) for i in range(kept)]
        file.add([sample(i) for i in range(kept, 3)])
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    "line", [b'{"text": "\xe4\xbd', b"[]", b"{}", b"", b"[" * 100_000, b'{"setting": ""}']
)
def test_a_damaged_line_within_the_file(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    first, second, *others = written(path).split(b"\n")
    damaged = b"\n".join([first, second, line, *others])
    path.write_bytes(damaged)
    with pytest.raises(LopaError, match=r"samples\.jsonl, line 3 is no sample") as caught:
        SampleFile(path, {"seed": 0})
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"run": {}}\n'])
def test_another_file_is_not_touched(tmp_path: Path, text: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with pytest.raises(LopaError, match="holds another run"):
        SampleFile(path, {"seed": 0})
    assert path.read_text() == text


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(LopaError, match="is not a file"):
        SampleFile(tmp_path, {})


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "words", "--samples", "{folder}/samples.jsonl"),
        ("eval", "words", "--sweep", "branches=0,1", "--out", "{folder}"),
        ("study", "branches", "--out", "{folder}"),
    ],
)
def test_only_what_is_asked_for_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    path = tmp_path / "samples.jsonl"
    words = [word.format(folder=tmp_path) for word in command]

    def run(limit: int) -> tuple[object, list[bytes]]:
        assert main([*words, *SMALL, "--limit", str(limit)]) == 0
        found = json.loads(capsys.readouterr().out)
        return found.get("findings", found), path.read_bytes().splitlines()

    _, many = run(2)
    path.unlink()
    few, lines = run(1)
    path.write_bytes(b"\n".join([lines[0], *many[1:]]) + b"\n")
    again, after = run(1)
    assert after == [lines[0], *many[1:]]  # nothing is decoded, and nothing is lost
    for found in (few, again):
        assert isinstance(found, dict)
        assert {p["problems"] for p in found.get("points", [found])} == {1}
        assert {p["rounds"] for p in found.get("points", [found])} == {
            p["rounds"] for p in (few.get("points", [few]) if isinstance(few, dict) else [])
        }
