"""`lopa race`: who gets which option, and what is reported."""

from __future__ import annotations

import io
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import DUMMY, SHORT, Run
from rich.console import Console

from lopa import LLM, DecodeConfig
from lopa.cli import race as command
from lopa.cli.model import example
from lopa.cli.race import Excerpt, Lane, Track, configurations, verdict
from lopa.cli.watch import OutputView
from lopa.decoding.round_cost import RoundCost
from lopa.engine import cost_measurement
from lopa.errors import ConfigError
from lopa.models.checkpoint import model_config
from lopa.models.questions import WORD_PROBLEM

SMALL = {"max_new_tokens": 8, "block_size": 4}
ALL = ["vanilla", "fast-dllm", "d2f", "lopa"]
DREAM = model_config("dummy:dream-tiny")


def test_json(run: Run) -> None:
    result = run("race", "hello", *SHORT, "--branches", "2", "--json")
    found = json.loads(result.out)
    assert result.err == ""
    assert list(found) == ["prompt", "results", "cost_seconds"]
    assert found["prompt"] == "hello"
    assert [summary["decoder"] for summary in found["results"]] == ALL
    llm = LLM("dummy:dream-tiny")
    for summary in found["results"]:
        settings = summary["settings"]
        alone = llm.generate("hello", DecodeConfig(**settings))
        assert summary["token_ids"] == alone.token_ids  # the same as alone
        assert summary["rounds"] == alone.rounds
        assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])


def test_it_is_short_unless_told_otherwise(run: Run) -> None:
    once = ("--decoders", "d2f", "--max-rounds", "1", "--json", *DUMMY)
    for options, tokens in (
        ((), 96),
        (("--max-new-tokens", "64"), 64),
        (("--preset", "paper"), 512),
    ):
        (result,) = json.loads(run("race", "hello", *once, *options).out)["results"]
        assert result["settings"]["max_new_tokens"] == tokens


def test_the_example_is_shown(run: Run) -> None:
    once = ("--model", "tiny", "--decoders", "d2f", "--max-rounds", "1")
    prompt = json.loads(run("race", *once, "--json").out)["prompt"]
    assert prompt == WORD_PROBLEM
    assert run("race", *once).err.startswith(f"{prompt}\n")


def test_table_and_verdict(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    RoundCost(((64, 0.010), (512, 0.042))).write(tmp_path / "cost.json")
    given = ("--decoders", "d2f,lopa", "--round-cost", str(tmp_path / "cost.json"))
    result = run("race", "hello", *SHORT, *given)
    head, _, *rows = result.out.splitlines()
    assert head.split() == ["decoder", "rounds", "TPF", "tokens/s", "seconds", "text"]
    names = [" ".join(row.split()[:2]) for row in rows if row.startswith((" d2f", " lopa"))]
    assert [name.split()[0] for name in names] == ["d2f", "lopa", "lopa"]
    assert names[1:] == ["lopa k=7", "lopa auto"]
    last = " ".join(result.out.split()).rpartition("tokens/s. ")[2]
    assert "Eight rows cost 4.2 times one on this machine and 2.9 times one on an H200" in last
    assert "times as fast as d2f with its " in last
    assert "(a projection from the recorded cost of its rounds)" in last


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0, 0.8), "lopa k=7 was fastest here, 80.0 tokens/s."),
        ((1.0, 1.0), "lopa k=7 was fastest here, 64.0 tokens/s."),
        ((1.0, 1.02), "lopa k=7 and d2f were equally fast here, 62.7 tokens/s."),
        ((0.5, 1.0), "d2f was fastest here, 128.0 tokens/s."),
    ],
)
def test_a_tie_is_called_one(seconds: tuple[float, float], said: str) -> None:
    configs = DecodeConfig(decoder="d2f", **SMALL), DecodeConfig(branches=7, **SMALL)
    llm = LLM("dummy:dream-tiny")
    outputs = [
        replace(llm.generate("hello", config), tokens=64, seconds=spent)
        for config, spent in zip(configs, seconds, strict=True)
    ]
    assert verdict(outputs, None, is_built_in=True).startswith(f"{said} Eight rows cost 1.5 times")


def test_what_was_measured_for_auto_is_counted(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cost = RoundCost(((64, 0.010), (512, 0.042)))
    monkeypatch.setattr(cost_measurement, "measure", lambda *_: time.sleep(0.25) or cost)
    monkeypatch.setenv("LOPA_CACHE_DIR", str(tmp_path))
    given = ("race", "hello", *SHORT, "--decoders", "lopa")
    rows = [row for row in run(*given).out.splitlines() if row.startswith(" lopa")]
    assert ["+" in row for row in rows] == [False, True]
    assert json.loads(run(*given, "--json").out)["cost_seconds"] == 0  # it is kept


def test_a_prompt_of_its_own(run: Run) -> None:
    given = ("--decoders", "lopa", "--branches", "1", "--max-rounds", "1")
    result = run("race", *SHORT, *given, "--json")
    assert json.loads(result.out)["prompt"] == example("dummy:dream-tiny")


def test_options_go_to_those_who_use_them() -> None:
    given = {"branches": 3, "threshold": 0.5, "steps": 8, "max_new_tokens": 64, "block_size": 16}
    vanilla, d2f, lopa = configurations(["vanilla", "d2f", "lopa"], given, None, DREAM)
    assert vanilla == DecodeConfig(decoder="vanilla", max_new_tokens=64, steps=8)
    assert d2f == DecodeConfig(decoder="d2f", max_new_tokens=64, block_size=16, threshold=0.5)
    assert (lopa.branches, lopa.threshold, lopa.block_size) == (3, 0.5, 16)


def test_window_is_lopas_alone() -> None:
    configs = configurations(
        ALL, {"window": "blocks", "cache": "prefix", "attention": "block"}, None, DREAM
    )
    windows = ["canvas", "blocks", "pipeline", "blocks", "blocks"]
    assert [config.window for config in configs] == windows
    assert [config.cache for config in configs] == ["none", "prefix", "none", "prefix", "prefix"]
    assert [config.branches for config in configs] == [0, 0, 0, 7, "auto"]
    assert configs[2].attention == "block"


def test_a_preset_gives_each_what_it_can_take() -> None:
    configs = configurations(None, {"max_new_tokens": 64}, "humaneval", DREAM)
    assert {config.max_new_tokens for config in configs} == {64}
    assert [config.append_at for config in configs] == [None, None, 0.3, 0.3]
    assert configs[3] == DecodeConfig.preset("humaneval", max_new_tokens=64)


@pytest.mark.parametrize(
    ("decoders", "given", "words"),
    [
        (["vanilla", "d2f"], {"branches": 3}, "branches is used by none of vanilla, d2f"),
        (["d2f"], {"window": "canvas"}, "window is used by none"),
        (["d2f"], {"steps": 3}, "steps is used by none"),
        (["lopa", "nosuch"], {}, "no decoder 'nosuch'"),
        (["lopa", "lopa"], {}, "named twice"),
        (["sdar"], {}, "does not fit dream models"),
        (["lopa"], {"max_new_tokens": 30, "early_stop": False}, "block_size"),
    ],
)
def test_refused(decoders: list[str], given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configurations(decoders, given, None, DREAM)


def test_errors_are_one_line(run: Run) -> None:
    assert run("race", "x", *DUMMY, "--decoders", "d2f", "--branches", "2").code == 2
    assert "empty" in run("race", "-", *DUMMY).error


@pytest.mark.parametrize(("width", "height", "abreast"), [(100, 24, 2), (60, 40, 1)])
def test_track(width: int, height: int, abreast: int) -> None:
    llm = LLM("dummy:dream-tiny")
    sessions = [
        llm.session("hello", config)
        for config in configurations(ALL, {**SMALL, "branches": 2}, None, DREAM)
    ]
    streams = [llm.engine().stream(session) for session in sessions]
    lanes = [
        Lane(session, stream, OutputView.of(session))
        for session, stream in zip(sessions, streams, strict=True)
    ]
    for lane in lanes:
        lane.step()
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(Track(lanes))
    lines = console.export_text().splitlines()
    assert len(lines) < height
    assert lines[0].count("╭") == abreast
    assert sum("tokens/s" in line for line in lines) == 4 // abreast
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]


def test_excerpt() -> None:
    console = Console(file=io.StringIO(), width=10, record=True)
    console.print(Excerpt("[b]word " * 20))
    lines = console.export_text().splitlines()
    assert len(lines) == command._TEXT_LINES
    assert lines[0].rstrip() == "[b]word"
    assert lines[-1].endswith("…")


RECORDS = Path(__file__).parents[2] / "measurements" / "h200"


def test_what_rows_of_a_7b_model_cost_on_an_h200_is_as_recorded() -> None:
    recorded = RoundCost.read(RECORDS / "round_cost_7b_bf16.json")
    for tokens, seconds in command.H200_7B:
        branches = tokens // 64 - 1
        assert seconds == pytest.approx(recorded(tokens, (branches,)), rel=0.01)


def test_what_rows_of_the_built_in_model_cost_on_an_h200_is_as_recorded() -> None:
    """In the mean over rounds of both tasks, where a request is alone."""
    rounds: dict[str, list[float]] = {}
    for path in RECORDS.glob("load_time_*.json"):
        for found in json.loads(path.read_text(encoding="utf-8"))["figures"]:
            if found["at once"] == 1:
                rounds.setdefault(found["k"], []).append(1e-6 * found["round"])
    for tokens, seconds in command.H200_TINY:
        branches = str(tokens // 64 - 1)
        assert len(rounds[branches]) == 4
        assert seconds == pytest.approx(statistics.fmean(rounds[branches]), rel=0.01)
