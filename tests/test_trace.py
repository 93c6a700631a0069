from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from lopa import LLM, DecodeConfig, LopaError, trace
from lopa.types import Lookahead, Opinion, Trace


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu")


@pytest.fixture(scope="module")
def made(llm: LLM) -> Trace:
    return llm.generate("Hello", DecodeConfig(max_new_tokens=32)).trace


@pytest.mark.parametrize("decoder", ["vanilla", "fast-dllm", "d2f", "lopa"])
def test_round_trip(llm: LLM, tmp_path: Path, decoder: str) -> None:
    config = DecodeConfig(decoder=decoder, max_new_tokens=32)  # type: ignore[arg-type]
    made = llm.generate("Hello there", config).trace
    path = tmp_path / "run.jsonl"
    trace.write(made, path)
    assert trace.read(path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]
    assert len(path.read_text().splitlines()) == len(made.rounds) + 2


@pytest.mark.parametrize("accept", ["score", "agreed", "exact"])
def test_round_trip_of_drafts_and_refusals(llm: LLM, tmp_path: Path, accept: str) -> None:
    config = DecodeConfig(max_new_tokens=32, block_size=8, threshold=0.5, accept=accept)  # type: ignore[arg-type]
    made = llm.generate("Hello there", config).trace
    trace.write(made, tmp_path / "run.jsonl")
    found = trace.read(tmp_path / "run.jsonl")
    assert found == made
    branches = [branch for record in found.rounds for branch in record.branches]
    drafts = [draft for record in found.rounds for draft in record.spawned]
    assert {len(branch.anchor) - len(branch.lookaheads) for branch in branches} == {0}
    assert any(branch.refused for branch in branches) == (accept != "score")
    assert any(len(draft) > 1 for draft in drafts) == (accept == "exact")
    assert all(isinstance(a, Lookahead) for draft in drafts for a in draft)
    assert all(isinstance(o, Opinion) for branch in branches for o in branch.anchor)


def test_files_of_another_version_are_refused(llm: LLM, tmp_path: Path) -> None:
    made = llm.generate("Hello", DecodeConfig(max_new_tokens=32)).trace
    first, *others = trace.lines(made)
    assert '"version":2' in first.replace(" ", "")
    old = json.dumps({**json.loads(first), "version": 1})
    (tmp_path / "old.jsonl").write_text("\n".join([old, *others]))
    with pytest.raises(LopaError, match="version 1 where 2 is read"):
        trace.read(tmp_path / "old.jsonl")


def test_failed_write_leaves_the_old_file(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = llm.generate("Hello", DecodeConfig(max_new_tokens=32)).trace
    path = tmp_path / "run.jsonl"
    path.write_text("old")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        trace.write(made, path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{}", '{"type": "run"}\n', "not json\n", "[]\n[]\n"])
def test_broken_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(LopaError, match="not a complete lopa trace"):
        trace.read(path)


@pytest.mark.parametrize("bad", [1e15, 10**15, -1, None, "1", True])
@pytest.mark.parametrize(
    ("part", "name"), [("branches", "end"), ("fills", "position"), ("blocks", "start")]
)
def test_numbers_out_of_range(
    made: Trace, tmp_path: Path, part: str, name: str, bad: object
) -> None:
    records = [json.loads(line) for line in trace.lines(made)]
    records[2][part][0][name] = bad
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(LopaError, match=rf"run\.jsonl .*round 2: {name} is missing or out of"):
        trace.read(path)


@pytest.mark.parametrize("before", ["", '{"type": "run", "version": 2, "prompt_ids": '])
def test_nested_files(tmp_path: Path, before: str) -> None:
    path = tmp_path / "nested.jsonl"
    path.write_text(before + "[" * 100_000)
    with pytest.raises(LopaError, match=r"nested\.jsonl is not a complete lopa trace"):
        trace.read(path)


def test_giant_files(tmp_path: Path) -> None:
    path = tmp_path / "giant.jsonl"
    path.touch()
    os.truncate(path, 2**40)  # sparse: it takes no room
    with pytest.raises(LopaError, match=r"giant\.jsonl .*larger than"):
        trace.read(path)


def test_line_separators_in_the_text(llm: LLM, tmp_path: Path) -> None:
    made = llm.generate("Hello", DecodeConfig(max_new_tokens=32, stop="\u2028\u0085x")).trace
    trace.write(made, tmp_path / "run.jsonl")
    assert trace.read(tmp_path / "run.jsonl") == made


def test_links_and_pipes_stay_what_they_are(llm: LLM, tmp_path: Path) -> None:
    made = llm.generate("Hello", DecodeConfig(max_new_tokens=32)).trace
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    trace.write(made, tmp_path / "link.jsonl")
    assert (tmp_path / "link.jsonl").is_symlink()
    assert trace.read(tmp_path / "real.jsonl") == made
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()))
    reader.start()
    trace.write(made, tmp_path / "pipe")
    reader.join()
    assert (tmp_path / "pipe").is_fifo()
    assert trace.parse(found[0].split("\n")) == made


def test_unwritable(llm: LLM, tmp_path: Path) -> None:
    made = llm.generate("Hello", DecodeConfig(max_new_tokens=32)).trace
    with pytest.raises(LopaError, match="cannot write"):
        trace.write(made, tmp_path / "no" / "such" / "run.jsonl")
