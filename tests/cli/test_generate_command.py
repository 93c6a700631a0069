"""`lopa generate`: what goes to which stream, prompts of every kind, traces."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from cli_support import DUMMY, SHORT, Run

from lopa import LLM, DecodeConfig, trace
from lopa.cli import model
from lopa.cli.terminal import visible
from lopa.decoding.round_cost import RoundCost
from lopa.engine import cost_measurement
from lopa.engine.scheduler import Scheduler
from lopa.models.questions import WORD_PROBLEM

KEYS = [
    "text",
    "token_ids",
    "rounds",
    "tpf",
    "tpf_paper",
    "mean_branches",
    "tokens",
    "seconds",
    "tokens_per_second",
    "tokens_per_second_paper",
    "finish",
    "decoder",
    "settings",
    "cost_seconds",
]


@pytest.fixture(scope="module")
def expected() -> str:
    config = DecodeConfig(max_new_tokens=8, block_size=4)
    return LLM("dummy:dream-tiny").generate("hello", config).text


def test_text_on_stdout_statistics_on_stderr(run: Run, expected: str) -> None:
    result = run("generate", "hello", *SHORT)
    assert result.code == 0
    assert result.out == expected + "\n"
    assert re.match(r"lopa auto \(\d+\.\d branches\) · ", result.err)
    assert result.err.count("\n") == 1


def test_a_terminal_sees_it_grow_made_visible(
    run: Run, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    assert run("generate", "hello", *SHORT).out == visible(expected) + "\n"


@pytest.mark.parametrize("more", [(), ("--watch",)])
def test_json(run: Run, expected: str, more: tuple[str, ...]) -> None:
    result = run("generate", "hello", *SHORT, "--json", *more)
    found = json.loads(result.out)
    assert list(found) == KEYS
    assert found["text"] == expected
    assert result.out.count("\n") == 1
    assert ("round    1" in result.err) == bool(more)


def test_a_run_is_repeated_by_what_rounds_cost(run: Run, tmp_path: Path) -> None:
    """By the clock of a busy machine the number of rounds would differ from run to run."""
    rounds = {}
    for name, last in (("cheap", 0.011), ("dear", 10.0)):
        path = tmp_path / f"{name}.json"
        RoundCost(((8, 0.010), (1024, last))).write(path)
        command = ("generate", "hello", *SHORT, "--max-new-tokens", "24", "--branches", "auto")
        runs = [run(*command, "--round-cost", str(path), "--json") for _ in range(2)]
        first, second = (json.loads(result.out) for result in runs)
        assert first["token_ids"] == second["token_ids"]
        assert first["rounds"] == second["rounds"]
        assert first["cost_seconds"] == 0
        rounds[name] = first["rounds"]
    assert rounds["cheap"] != rounds["dear"]


def test_measuring_counts_in_the_time(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(*_: object) -> RoundCost:
        time.sleep(0.25)
        return RoundCost(((8, 0.01), (1024, 0.02)))

    monkeypatch.setattr(cost_measurement, "measure", measure)
    monkeypatch.setenv("LOPA_CACHE_DIR", str(tmp_path))
    command = ("generate", "hello", *SHORT, "--branches", "auto")
    found = re.search(r" · (\S+) s \((\S+) of them to measure rounds, once\)", run(*command).err)
    assert found is not None
    total, measured = map(float, found.groups())
    assert total > measured >= 0.25
    assert "measure" not in run(*command).err  # it is kept
    command = ("generate", "hello", *SHORT, "--branches", "auto", "--objective", "tpf", "--json")
    assert json.loads(run(*command).out)["cost_seconds"] == 0


def test_watched_output_is_the_same(run: Run, expected: str) -> None:
    result = run("generate", "hello", *SHORT, "--watch")
    assert result.out == expected + "\n"
    assert result.err.startswith("round    1  ")


def test_prompt_from_stdin(run: Run, expected: str) -> None:
    assert run("generate", "-", *SHORT, stdin="hello\n").out == expected + "\n"


def test_token_ids_for_a_model_without_tokenizer(run: Run, ids_model: Path) -> None:
    short = ("--model", str(ids_model), *SHORT[2:])
    first = run("generate", "1, 2 3", *short)
    assert first.code == 0
    config = DecodeConfig(max_new_tokens=8, block_size=4)
    expected = LLM(ids_model).generate([1, 2, 3], config).token_ids
    assert [int(word) for word in first.out.split()] == expected
    assert run("generate", "1 2,3", *short, "--watch").out == first.out
    assert "token ids" in run("generate", "hello", *short).error


def test_chat_template(run: Run, chat_model: Path) -> None:
    short = ("--model", str(chat_model), *SHORT[2:], "--json")
    plain = json.loads(run("generate", "hello", *short).out)
    chat = json.loads(run("generate", "hello", *short, "--chat").out)
    assert chat["token_ids"] != plain["token_ids"]
    assert "no chat template" in run("generate", "hello", *SHORT, "--chat").error


def test_trace(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("old")
    found = json.loads(run("generate", "hello", *SHORT, "--json", "--trace", str(path)).out)
    read = trace.read(path)
    assert read.token_ids == found["token_ids"]
    assert len(read.rounds) == found["rounds"]
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_trace_is_refused_before_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "step", lambda _: pytest.fail("it ran"))
    for path in (tmp_path, tmp_path / "no" / "run.jsonl", Path("/proc/run.jsonl")):
        result = run("generate", "hello", *SHORT, "--trace", str(path))
        assert str(path) in result.error
        assert result.code == 2


def test_an_interrupted_run_leaves_no_trace(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Scheduler) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "step", interrupt)
    assert run("generate", "hello", *SHORT, "--trace", str(tmp_path / "t")).code == 130
    assert list(tmp_path.iterdir()) == []


def test_visible() -> None:
    assert visible("a\x1b[2J\x00\x7f\x9b\u202e\tb\n", "↵") == "a␛[2J␀␡\\u009b\\u202e\tb↵"
    assert visible("é 你 👩\u200d🔬") == "é 你 👩\u200d🔬"
    visible("\udcff").encode()


def test_answers_that_fit(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}'
    )
    options = (*DUMMY, "--max-new-tokens", "16")
    assert json.loads(run("generate", "hello", *options, "--schema", str(schema)).out)["a"] in (
        1,
        22,
    )
    assert re.fullmatch(
        r"[a-c]{3}", run("generate", "hello", *options, "--regex", "[a-c]{3}").out[:-1]
    )
    assert "at least 8" in run("generate", "hello", *SHORT[:2], "--max-new-tokens", "3", "--schema",
                               str(schema)).error  # fmt: skip
    assert "cannot read" in run("generate", "hello", *options, "--schema", "no-such-file").err
    assert (
        "give one"
        in run("generate", "hello", *options, "--schema", str(schema), "--regex", "a").error
    )
    schema.write_text("{")
    assert "JSON" in run("generate", "hello", *options, "--schema", str(schema)).error


def test_suffix(run: Run) -> None:
    given = run("generate", "ab", *SHORT, "--suffix", "cd", "--gap-tokens", "5", "--json")
    found = json.loads(given.out)
    assert found["finish"] == "filled"
    assert found["gap_tokens"] == [5]
    assert found["gaps"] == [found["text"]]
    assert len(found["token_ids"]) == 5
    assert run("generate", "ab", *SHORT, "--suffix", "cd", "--gap-tokens", "5").out == (
        found["text"] + "\n"
    )
    chosen = json.loads(
        run("generate", "ab", *SHORT, "--suffix", "cd", "--gap-tokens", "3,6", "--json").out
    )
    assert chosen["gap_tokens"][0] in (3, 6)
    searched = json.loads(run("generate", "ab", *SHORT, "--suffix", "cd", "--json").out)
    assert 1 <= searched["gap_tokens"][0] <= 8


def test_suffix_is_watched_and_traced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run("generate", "ab", *SHORT, "--suffix", "cd", "--watch", "--trace", str(path))
    found = trace.read(path)
    assert found.pinned_ids == [list(b"cd")]
    assert found.finish == "filled"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gap-tokens", "4"), "goes with --suffix"),
        (("--suffix", "b", "--gap-tokens", "x"), "whole numbers"),
        (("--suffix", ""), "empty"),
        (("--suffix", "b", "--attention", "block"), "use attention full"),
    ],
)
def test_bad_suffix(run: Run, options: tuple[str, ...], said: str) -> None:
    assert said in run("generate", "a", *SHORT, *options).error


# -- the built-in model -----------------------------------------------------------------------


def test_an_example(run: Run) -> None:
    result = run("generate", "--example", "--max-new-tokens", "96")
    assert result.err.startswith(f"{WORD_PROBLEM}\n")
    assert result.out.endswith("#### 18\n")
    assert result.out == run("generate", WORD_PROBLEM, "--max-new-tokens", "96").out


def test_examples_by_their_seeds() -> None:
    first, second = (model.example("tiny", seed) for seed in (1, 2))
    assert "How many" in first
    assert first != second
    assert model.example("dummy:dream-tiny", 1) == model.example("dummy:dream-tiny", 2)


def test_an_example_is_in_place_of_a_prompt(run: Run) -> None:
    for given in ((), ("hello", "--example")):
        assert "give a prompt, or --example" in run("generate", *given, *SHORT).error


def test_it_says_what_it_can_do(run: Run) -> None:
    for given in ((), ("--chat",)):
        assert "solves word problems" in run("generate", "Hello", "--model", "tiny", *given).error
    assert "solves word problems" in run("race", "Hello", "--model", "tiny").error
