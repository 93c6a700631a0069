"""Options made from DecodeConfig: all of them, with its defaults and no others."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from cli_support import SHORT, Run

from lopa.cli.options import (
    ModelOptions,
    ParallelOptions,
    decode_config,
    default_model,
    default_of,
    waiting_config,
    with_decoding,
    with_model,
    with_parallel,
)
from lopa.config import DecodeConfig
from lopa.models.files import BUILT_IN
from lopa.option_help import FIELDS
from lopa.presets import PRESETS


def test_every_field_has_an_option(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run("generate", "--help").out
    for field in fields(DecodeConfig):
        assert f"--{field.name.replace('_', '-')} " in text
    assert "--no-early-stop" in text
    assert "--no-merge" in text
    assert set(FIELDS) == {field.name for field in fields(DecodeConfig)}


def test_help_shows_the_defaults_in_force() -> None:
    assert default_of("branches") == f"lopa {DecodeConfig().branches}"
    assert default_of("max_new_tokens") == str(DecodeConfig().max_new_tokens)
    sdar, llada2 = (DecodeConfig(decoder=d).threshold for d in ("sdar", "llada2"))
    usual = f"fast-dllm, d2f, lopa {DecodeConfig().threshold}"
    assert default_of("threshold") == f"{usual}; sdar {sdar}; llada2 {llada2}"
    ranking = "vanilla, d2f, lopa neg_entropy; fast-dllm, sdar, llada2 max_prob"
    assert default_of("ranking") == ranking
    assert (default_of("merge"), default_of("accept")) == ("lopa True", "lopa agreed")
    assert default_of("factor") == default_of("max_rounds") == default_of("stop") == ""


def test_only_what_is_given_is_passed_on() -> None:
    seen = {}

    @with_decoding("seed")
    def command(decoding: dict[str, object]) -> None:
        seen.update(decoding)

    names = [field.name for field in fields(DecodeConfig) if field.name != "seed"]
    nothing = dict.fromkeys(names) | {"stop": []}
    command(**nothing)
    assert seen == {}
    command(**{**nothing, "branches": 0, "early_stop": False, "temperature": 0.0})
    assert seen == {"branches": 0, "early_stop": False, "temperature": 0.0}


def test_a_command_receives_its_groups_as_objects() -> None:
    seen = []

    @with_parallel("rank_timeout")
    @with_model("adapter")
    def command(model: ModelOptions, parallel: ParallelOptions, limit: int = 3) -> None:
        seen.append((model, parallel, limit))

    names = set(inspect.signature(command).parameters)
    assert names == {
        *("limit", "model", "device", "dtype", "quantize", "round_cost", "preset"),
        *("branch_parallel", "tensor_parallel"),
    }
    command(**{**dict.fromkeys(names), "device": "cpu", "tensor_parallel": 2, "limit": 4})
    model, parallel, limit = seen[0]
    assert (model.name, model.llm_options, limit) == (default_model(), {"device": "cpu"}, 4)
    assert (parallel.branch_parallel, parallel.ranks) == (None, 2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    model = ModelOptions(model="dummy:dream-tiny", preset=name)
    assert decode_config(model, {}) == DecodeConfig.preset(name)
    assert decode_config(model, {"branches": 3}) == DecodeConfig.preset(name, branches=3)


def test_whoever_waits_has_auto() -> None:
    """Unless a number is given, by the options or a preset; programs have a number."""
    model = ModelOptions(model="dummy:dream-tiny")
    assert waiting_config(model, {}) == DecodeConfig(branches="auto")
    assert waiting_config(model, {"branches": 0}).branches == 0
    assert waiting_config(model, {"objective": "tpf"}).objective == "tpf"
    assert waiting_config(model, {"decoder": "d2f"}) == DecodeConfig(decoder="d2f")
    paper = ModelOptions(model="dummy:dream-tiny", preset="paper")
    assert waiting_config(paper, {}) == DecodeConfig.preset("paper")
    assert decode_config(model, {}) == DecodeConfig()
    assert DecodeConfig().branches == 7
    block_causal = ModelOptions(model="dummy:sdar-8b")
    assert waiting_config(block_causal, {}).decoder == "sdar"
    assert waiting_config(block_causal, {"decoder": "lopa"}).branches == "auto"


# One run for each decoder, together giving every option once.
@pytest.mark.parametrize(
    "given",
    [
        {
            "decoder": "lopa",
            "max_new_tokens": 8,
            "ranking": "margin",
            "window": "pipeline",
            "block_size": 4,
            "append_at": 0.25,
            "activate_at": 0.75,
            "attention": "block",
            "threshold": 0.5,
            "branches": 2,
            "score": "window",
            "score_window": 3,
            "creation_weight": 0.25,
            "lookahead_floor": 0.1,
            "early_stop": False,
            "stop": ["§", "end"],
            "max_rounds": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "seed": 7,
        },
        {
            "decoder": "fast-dllm",
            "max_new_tokens": 8,
            "block_size": 4,
            "cache": "none",
            "factor": 2.0,
        },
        {"decoder": "vanilla", "max_new_tokens": 4, "steps": 2},
        {"max_new_tokens": 8, "block_size": 4, "branches": "auto", "objective": "tpf"},
        {
            "max_new_tokens": 8,
            "block_size": 4,
            "accept": "agreed",
            "agreement": 0.2,
            "agreement_ahead": 0.3,
            "merge": False,
        },
        {
            "decoder": "lopa",
            "max_new_tokens": 8,
            "block_size": 4,
            "score": "mean",
            "score_fraction": 0.5,
        },
    ],
)
def test_options_reach_the_decoder(run: Run, given: dict[str, object]) -> None:
    arguments: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is False:
            arguments.append(f"--no-{flag[2:]}")
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [word for v in values for word in (flag, str(v))]
    result = run("generate", "hi", "--model", "dummy:dream-tiny", "--json", *arguments)
    assert result.code == 0
    settings = json.loads(result.out)["settings"]
    assert {name: settings[name] for name in given} == given


def test_branches_are_a_number_or_auto(run: Run) -> None:
    result = run("generate", "hi", *SHORT, "--branches", "some")
    assert result.code == 2
    assert "'some' is not a whole number or auto" in result.error


def test_preset_with_options_on_top(run: Run) -> None:
    result = run("generate", "hi", *SHORT, "--preset", "math", "--max-rounds", "1", "--json")
    settings = json.loads(result.out)["settings"]
    assert settings["threshold"] == PRESETS["math"]["threshold"]
    assert (settings["block_size"], settings["max_rounds"]) == (4, 1)


def test_default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(BUILT_IN, "tiny", tmp_path)
    assert default_model() == "dummy:dream-tiny"
    (tmp_path / "config.json").touch()
    assert default_model() == "tiny"
