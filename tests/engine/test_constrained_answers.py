"""Answers that have to fit an automaton: every window and decoder, whatever the weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from fitting import answer, run
from small_automata import alternation, automaton_of, balanced, digits, literal

import goldens
from lopa import LLM
from lopa.engine.scheduler import Scheduler
from lopa.errors import ConfigError
from lopa.grammar.token_automaton import TokenAutomaton

WINDOWS: list[dict[str, Any]] = [
    {"block_size": 8},
    {"block_size": 8, "attention": "block"},
    {"window": "canvas"},
    {"window": "blocks", "block_size": 8, "cache": "none"},
    {"window": "blocks", "block_size": 8, "cache": "prefix"},
    {"window": "blocks", "block_size": 8, "cache": "dual"},
]
DECODERS: list[dict[str, Any]] = [
    {"decoder": "vanilla"},
    {"decoder": "vanilla", "steps": 5},
    {"decoder": "fast-dllm", "block_size": 8},
    {"decoder": "fast-dllm", "block_size": 8, "factor": 1.0},
    {"decoder": "d2f", "block_size": 8},
    {"accept": "score", "branches": 5, "block_size": 8},
    {"accept": "exact", "branches": 5, "block_size": 8},
    {"accept": "exact", "branches": 5, "window": "canvas"},
    {"branches": "auto", "objective": "tpf", "block_size": 4},
    {"merge": False, "block_size": 8, "score": "mean"},
    {"ranking": "max_prob", "lookahead_eos": True, "block_size": 8},
    {"temperature": 0.7, "top_p": 0.5, "top_k": 20},
]


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.schemas)


PROMPT = [5, 8, 11, 14, 17, 20]


@cache
def loaded(model: str, **special: Any) -> LLM:
    return LLM(model, device="cpu", dtype="float32", **special)


@cache
def patterns(vocab: int, eos: tuple[int, ...]) -> dict[str, TokenAutomaton]:
    return {
        "digits": digits(range(30, 40), 18, vocab, eos),
        "balanced": balanced(40, 41, range(50, 120), 2, vocab, eos),
        "literal": literal(range(60, 77), vocab, eos),
        "alternation": alternation([[7], [8, 9, 10], [8, 9, *range(90, 108)]], vocab, eos),
        # Pairs of a key and a value of any length, of a shared alphabet: any mask may be any of it
        "pairs": automaton_of(
            [
                {30: 1},
                {31: 2},
                {32: 3},
                dict.fromkeys(range(100, 150), 3) | {33: 4},
                {34: 0, 35: 5},
                {},
            ],
            [5],
            vocab,
            eos,
        ),
    }


def of(llm: LLM, name: str) -> TokenAutomaton:
    return patterns(llm.config.vocab_size, tuple(llm.config.eos_ids))[name]


@pytest.mark.parametrize(
    "name", ["pairs", *(slow(n) for n in ("digits", "balanced", "literal", "alternation"))]
)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window: dict[str, Any], name: str) -> None:
    llm = loaded("dummy:dream-tiny")
    for branches in (0, 3, 7):
        for temperature in (0.0, 1.0):
            answer(
                llm,
                PROMPT,
                of(llm, name),
                max_new_tokens=21,  # no whole number of blocks
                threshold=0.3,
                branches=branches,
                temperature=temperature,
                **window,
            )


@pytest.mark.parametrize("settings", DECODERS, ids=str)
@pytest.mark.parametrize("model", ["dummy:dream-tiny", slow(str(goldens.LLADA))])
def test_decoders(model: str, settings: dict[str, Any]) -> None:
    llm = loaded(model)
    for name in ("balanced", "pairs"):
        answer(llm, PROMPT, of(llm, name), max_new_tokens=24, **settings)


@pytest.mark.parametrize("model", ["fastdllm2_a", "llada21_a", "llada2_a", "sdar_a", "sdarmoe_a"])
def test_families(model: str) -> None:
    """Block-causal ones count blocks from position 0; LLaDA2.1 edits."""
    llm = loaded(str(goldens.MODELS / model), mask_token_id=198, eos_token_id=199)
    for name, temperature in (("balanced", 0.0), ("pairs", 1.0)):
        answer(llm, PROMPT, of(llm, name), max_new_tokens=21, temperature=temperature)


@pytest.mark.parametrize("window", [WINDOWS[0], WINDOWS[1], WINDOWS[2]], ids=str)
def test_exact_branches_give_the_tokens_of_none(window: dict[str, Any]) -> None:
    llm = loaded("dummy:dream-tiny")
    settings = {"max_new_tokens": 24, "threshold": 0.1, "accept": "exact", **window}
    for name in ("pairs", "balanced"):
        none = answer(llm, PROMPT, of(llm, name), branches=0, **settings)
        some = answer(llm, PROMPT, of(llm, name), branches=7, **settings)
        assert some.token_ids == none.token_ids
        assert some.rounds <= none.rounds


def test_a_budget_that_just_suffices() -> None:
    """The last token ends the answer, and no EOS is needed."""
    llm = loaded("dummy:dream-tiny")
    for window in WINDOWS:
        output = answer(llm, PROMPT, of(llm, "literal"), max_new_tokens=17, **window)
        assert output.token_ids == list(range(60, 77))


def test_one_token_too_few_is_refused() -> None:
    llm = loaded("dummy:dream-tiny")
    with pytest.raises(ConfigError, match="allow at least 17"):
        answer(llm, PROMPT, of(llm, "literal"), max_new_tokens=16)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"early_stop": False}, "parity"),
        ({"ranking": "margin"}, "margin"),
        ({"stop": "x"}, "stop string"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], reason: str) -> None:
    llm = loaded("dummy:dream-tiny")
    with pytest.raises(ConfigError, match=reason):
        answer(llm, PROMPT, of(llm, "digits"), max_new_tokens=32, **settings)


def test_what_has_only_one_answer_takes_one_round() -> None:
    """Where one token fits its probability is 1, whatever the threshold."""
    llm = loaded("dummy:dream-tiny")
    output = answer(
        llm, PROMPT, of(llm, "literal"), max_new_tokens=17, window="canvas", threshold=0.999
    )
    assert output.rounds == 1


def test_sessions_with_and_without_beside_each_other() -> None:
    """Each gives what it gives alone."""
    llm = loaded("dummy:dream-tiny")
    config = llm.decode_config(max_new_tokens=24, block_size=8, branches=3, threshold=0.3)
    names: list[str | None] = ["pairs", None, "balanced", None, "balanced", "digits"]
    prompts = [[*PROMPT, i] for i in range(len(names))]

    def session(index: int) -> Any:
        name = names[index]
        automaton = None if name is None else of(llm, name)
        return llm.session_from_ids(prompts[index], config, automaton=automaton)

    alone = []
    for index, name in enumerate(names):
        if name is None:
            alone.append(llm.generate(prompts[index], config).token_ids)
        else:
            alone.append(run(llm.engine(), [session(index)])[0].token_ids)
    sessions = [session(index) for index in range(len(names))]
    engine = Scheduler(llm.runner)
    for _ in engine.run(iter(sessions)):
        pass
    assert [s.output.token_ids for s in sessions] == alone
