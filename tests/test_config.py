from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lopa.config import DecodeConfig, options_of, with_changes
from lopa.errors import ConfigError
from lopa.presets import PAPER, PRESETS


def test_defaults_by_decoder() -> None:
    assert DecodeConfig().branches == 7
    assert DecodeConfig(decoder="d2f").branches == 0
    assert DecodeConfig(decoder="d2f", branches=0).threshold == 0.9
    assert DecodeConfig(decoder="vanilla", max_new_tokens=40).steps == 40
    assert DecodeConfig(decoder="fast-dllm").ranking == "max_prob"
    assert DecodeConfig(stop="x").stop == ("x",)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"decoder": "beam"}, "decoder"),
        ({"branches": -1}, "branches"),
        ({"branches": 129}, "branches"),
        ({"branches": 2.5}, "branches"),
        ({"branches": True}, "branches"),
        ({"branches": "many"}, "or auto"),
        ({"objective": "tpf"}, "objective is not used by the lopa decoder unless branches is auto"),
        ({"branches": "auto", "objective": "time"}, "objective must be one of speed, tpf"),
        ({"decoder": "d2f", "objective": "tpf"}, "belongs to lopa"),
        ({"decoder": "d2f", "branches": "auto"}, "branches is not used by the d2f decoder"),
        ({"threshold": 1.01}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": "0.9"}, "threshold"),
        ({"append_at": -0.1}, "append_at"),
        ({"activate_at": 2}, "activate_at"),
        ({"lookahead_floor": 1.5}, "lookahead_floor"),
        ({"score_fraction": 0.0}, "score_fraction"),
        ({"ranking": "entropy"}, "ranking"),
        ({"attention": "causal"}, "attention"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 20, "early_stop": False}, "use 32 new tokens"),
        ({"decoder": "fast-dllm", "max_new_tokens": 50, "early_stop": False}, "does not divide"),
        ({"decoder": "fast-dllm", "steps": 9}, "multiple of the 8 blocks"),
        ({"decoder": "fast-dllm", "steps": 8, "factor": 1.0}, "give one of them"),
        ({"decoder": "fast-dllm", "threshold": 0.8, "factor": 1.0}, "give one of them"),
        ({"decoder": "d2f", "branches": 4}, "branches is not used by the d2f decoder"),
        ({"decoder": "vanilla", "threshold": 0.9}, "threshold is not used by the vanilla"),
        ({"decoder": "vanilla", "block_size": 8}, "block_size is not used"),
        ({"decoder": "d2f", "steps": 8}, "belongs to vanilla, fast-dllm, sdar, llada2, lopa"),
        ({"decoder": "d2f", "edit_threshold": 0.9}, "belongs to sdar, llada2, lopa"),
        ({"edit_rounds": 3}, "edit_rounds is not used by the lopa decoder without edit_threshold"),
        ({"decoder": "llada2", "edit_threshold": 0.9, "steps": 8}, "decoder with edit_threshold:"),
        ({"decoder": "sdar", "edit_rounds": 8}, "by the sdar decoder without edit_threshold:"),
        ({"decoder": "sdar", "quota": 2}, "quota is not used by the sdar decoder"),
        ({"steps": 4, "quota": 2}, "steps and quota both say"),
        ({"quota": 0}, "quota must be a whole number, at least 1"),
        ({"window": "canvas", "quota": 2}, "quota is not used"),
        ({"decoder": "vanilla", "attention": "block"}, "attention is not used"),
        ({"decoder": "vanilla", "window": "pipeline"}, "always uses the canvas window"),
        ({"window": "canvas", "block_size": 32}, "canvas window"),
        ({"window": "tiles"}, "window"),
        ({"top_p": 0.9}, "temperature above 0"),
        ({"top_k": 5}, "temperature above 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed must be"),
        ({"temperature": None}, "temperature must be"),
        ({"max_new_tokens": None}, "max_new_tokens must be"),
        ({"top_k": None}, "top_k must be"),
        ({"stop": ("",)}, "stop"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"early_stop": "yes"}, "early_stop"),
        ({"stop": None}, "stop"),
        ({"stop": "\ud800"}, "UTF-8"),
        ({"temperature": 1e-40}, "temperature must be 0 or at least"),
        ({"threshold": 10**400}, "threshold"),
        ({"seed": 2**63}, "at most"),
        ({"score_window": 3}, "score_window is not used by the lopa decoder with score fills"),
        ({"score": "fills", "score_fraction": 0.5}, "with score fills"),
        ({"decoder": "sdar", "append_at": 0.5}, "append_at is not used by the sdar decoder"),
        ({"accept": "any"}, "accept must be one of score, agreed, exact"),
        ({"agreement": 1.5}, "agreement"),
        ({"agreement_ahead": -0.1}, "agreement_ahead"),
        ({"accept": "score", "agreement": 0.2}, "with accept score"),
        ({"early_stop": False, "agreement": 0.2}, "with accept score"),
        ({"accept": "exact", "score": "fills"}, "with accept exact"),
        ({"accept": "exact", "lookahead_floor": 0.2}, "with accept exact"),
        ({"decoder": "d2f", "accept": "agreed"}, "belongs to lopa"),
        ({"merge": 1}, "merge must be true or false"),
        ({"accept": "score", "merge": True}, "merge is not used by the lopa decoder with accept"),
        ({"accept": "exact", "merge": True}, "with accept exact"),
        ({"early_stop": False, "merge": True}, "with accept score"),
        ({"decoder": "d2f", "merge": True}, "belongs to lopa"),
    ],
)
def test_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecodeConfig(**options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_number_of_new_tokens_is_rounded_up_to_whole_blocks() -> None:
    assert DecodeConfig(max_new_tokens=50, block_size=16).blocks == 4
    assert DecodeConfig(max_new_tokens=1).blocks == 1


def test_parity_mode_cuts_to_whole_blocks() -> None:
    config = DecodeConfig(max_new_tokens=50, block_size=16, early_stop=False)
    assert config.blocks == 3


@pytest.mark.parametrize("decoder", ["vanilla", "fast-dllm", "sdar", "llada2", "d2f", "lopa"])
def test_settings_round_trip(decoder: Any) -> None:
    config = DecodeConfig(decoder=decoder, max_new_tokens=64, stop=("a",), seed=3)
    assert DecodeConfig(**config.settings()) == config
    assert set(config.settings()) >= options_of(decoder) - {
        "factor",
        "steps",
        "score_window",
        "objective",
        "edit_threshold",
        "edit_rounds",
    }


def test_auto() -> None:
    config = DecodeConfig(branches="auto")
    assert (config.objective, config.most_branches) == ("speed", 15)
    assert DecodeConfig(**config.settings()) == config
    assert "objective" not in DecodeConfig().settings()


# Table of the published settings: block, τ_add, τ_act, τ_conf, k.
@pytest.mark.parametrize(
    ("task", "published"),
    [
        ("gsm8k", (32, 0.1, 0.95, 0.90, 14)),
        ("math", (16, 0.1, 0.95, 0.90, 7)),
        ("humaneval", (32, 0.3, 0.95, 0.95, 7)),
        ("mbpp", (32, 0.3, 0.95, 0.95, 7)),
        ("humaneval+", (32, 0.3, 0.95, 0.95, 6)),
        ("mbpp+", (32, 0.3, 0.95, 0.90, 14)),
    ],
)
def test_presets(task: str, published: tuple[float, ...]) -> None:
    c = DecodeConfig.preset(task)
    assert (c.block_size, c.append_at, c.activate_at, c.threshold, c.branches) == published
    assert c.max_new_tokens == 512
    assert c.temperature == 0
    assert c.ranking == ("max_prob" if task.endswith("+") else "neg_entropy")
    assert (c.accept, c.score, c.lookahead_floor, c.lookahead_eos) == ("score", "mean", 0.0, True)


def test_the_paper_in_general() -> None:
    tasks = {"gsm8k", "math", "humaneval", "mbpp", "humaneval+", "mbpp+"}
    assert set(PRESETS) == {"paper", *tasks}
    assert DecodeConfig.preset("paper", max_new_tokens=256) == DecodeConfig(**PAPER)
    usual = DecodeConfig()
    assert (usual.accept, usual.score, usual.lookahead_eos) == ("agreed", "fills", False)
    assert DecodeConfig(accept="score").creation_weight == 0.5
    assert DecodeConfig(score="mean").creation_weight == 0.0  # each score has its own
    assert DecodeConfig.preset("gsm8k", score="fills").creation_weight == 0.5
    assert DecodeConfig.preset("gsm8k", score="fills", creation_weight=0.1).creation_weight == 0.1
    parity = DecodeConfig(early_stop=False)
    assert (parity.score, parity.creation_weight, parity.lookahead_eos) == ("mean", 0.0, True)
    assert (parity.accept, parity.agreement) == ("score", None)
    assert not DecodeConfig(early_stop=False, lookahead_eos=False).lookahead_eos
    assert parity == DecodeConfig.preset("paper", max_new_tokens=256, early_stop=False)


@pytest.mark.parametrize("accept", ["score", "agreed", "exact"])
def test_every_way_to_accept_has_its_own_options(accept: Any) -> None:
    config = DecodeConfig(accept=accept, branches=3, threshold=0.8)
    settings = config.settings()
    assert DecodeConfig(**settings) == config
    assert ("agreement" in settings, "score" in settings) == (accept == "agreed", accept != "exact")
    assert config.merge == ("merge" in settings) == (accept == "agreed")
    for other in ("score", "agreed", "exact"):
        changed = config.changed(accept=other)
        assert changed == DecodeConfig(accept=other, branches=3, threshold=0.8)  # type: ignore[arg-type]


def test_changes_drop_what_they_make_meaningless() -> None:
    usual = DecodeConfig()
    parity = DecodeConfig(early_stop=False)
    assert usual.changed(early_stop=False) == parity
    assert parity.changed(early_stop=True) == usual
    assert usual.changed(early_stop=False, accept="agreed").merge
    assert not usual.changed(merge=False).changed(branches=3).merge
    strict = DecodeConfig(agreement=0.2, merge=False, score="mean", lookahead_floor=0.1)
    assert strict.changed(accept="score") == DecodeConfig(accept="score")
    assert strict.changed(branches=3).agreement == 0.2
    block = usual.changed(attention="block")
    assert (block.agreement, block.agreement_ahead) == (0.1, 0.8)
    assert strict.changed(attention="block").merge is False
    assert block.changed(attention="full") == usual
    assert with_changes(
        {"agreement": 0.2, "score": "mean", "branches": 3}, {"accept": "score"}
    ) == {
        "branches": 3,
        "accept": "score",
    }
    assert with_changes({"score": "mean", "score_fraction": 0.5}, {"score": "window"}) == {
        "score": "window"
    }
    assert with_changes({"agreement": 0.2, "objective": "tpf"}, {"branches": 3}) == {
        "agreement": 0.2,
        "branches": 3,
    }
    assert with_changes({"threshold": 0.5, "window": "blocks"}, {"decoder": "vanilla"}) == {
        "decoder": "vanilla"
    }


def test_numbers_of_other_libraries() -> None:
    config = DecodeConfig(threshold=np.float32(0.5), branches=np.int64(3))  # type: ignore[arg-type]
    assert config == DecodeConfig(threshold=0.5, branches=3)


def test_a_preset_for_another_decoder_takes_what_it_can_use() -> None:
    config = DecodeConfig.preset("gsm8k", decoder="d2f")
    assert (config.decoder, config.branches, config.append_at) == ("d2f", 0, 0.1)
    assert DecodeConfig.preset("mbpp+", decoder="vanilla").ranking == "max_prob"


def test_preset_changes() -> None:
    assert DecodeConfig.preset("gsm8k", branches=3).branches == 3
    with pytest.raises(ConfigError, match="no preset 'gsm9k'"):
        DecodeConfig.preset("gsm9k")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_tokens", "it is max_new_tokens here"),
        ("temprature", "it is temperature here"),
        ("guided_json", "it is schema here"),
        ("xyzzy", "help\\(lopa.DecodeConfig\\) lists them"),
    ],
)
def test_a_name_that_is_no_setting(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no setting {name}: {remedy}"):
        DecodeConfig().changed(**{name: 1})
