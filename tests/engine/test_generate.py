"""`LLM.generate` and its relatives, as hands that know vLLM and transformers expect them."""

from __future__ import annotations

import pydoc
from typing import Any

import pytest

from lopa import LLM, DecodeConfig, LopaError
from lopa.errors import ConfigError

SHORT = DecodeConfig(max_new_tokens=24, block_size=8, branches=2)
PROMPTS = ["Hello", "World, how are you?", "x", "Hello"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    from cli_support import write_checkpoint, write_tokenizer

    folder = write_checkpoint(tmp_path_factory.mktemp("chat"))
    write_tokenizer(folder)
    return LLM(folder, device="cpu", dtype="float32")


def test_a_list_is_decoded_together_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [llm.generate(prompt, SHORT) for prompt in PROMPTS]
    sizes = []
    launch = llm.runner.launch

    def counted(plans: Any, lane: int) -> Any:
        sizes.append(len(plans))
        return launch(plans, lane)

    monkeypatch.setattr(llm.runner, "launch", counted)
    together = llm.generate(PROMPTS, SHORT)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.rounds for o in together] == [o.rounds for o in alone]
    assert max(sizes) == len(PROMPTS)


def test_settings_as_keyword_arguments(llm: LLM) -> None:
    expected = llm.generate("Hello", DecodeConfig(max_new_tokens=24, block_size=8, branches=1))
    assert llm.generate("Hello", SHORT, branches=1).token_ids == expected.token_ids
    plain = llm.generate("Hello", branches=1, max_new_tokens=24, block_size=8)
    assert plain.config == expected.config
    other = llm.generate("Hello", SHORT, decoder="d2f")
    assert (other.config.decoder, other.config.block_size) == ("d2f", 8)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        llm.generate("Hello", max_tokens=5)


def test_one_setting_each(llm: LLM) -> None:
    configs = [SHORT, SHORT.changed(branches=0), SHORT.changed(max_new_tokens=5)]
    outputs = llm.generate(PROMPTS[:3], configs)
    assert [o.config for o in outputs] == configs
    for prompt, config, output in zip(PROMPTS, configs, outputs, strict=False):
        assert output.token_ids == llm.generate(prompt, config).token_ids
    with pytest.raises(LopaError, match="2 configs for 3 prompts"):
        llm.generate(PROMPTS[:3], configs[:2])


def test_a_progress_bar_when_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS[:2], SHORT)
    assert capsys.readouterr() == ("", "")
    llm.generate(PROMPTS[:2], SHORT, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err


def test_chat(chatting: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    one = chatting.chat(hello, SHORT)
    assert one.token_ids == chatting.generate(hello, SHORT).token_ids
    assert [o.token_ids for o in chatting.chat([hello, hello], SHORT)] == [one.token_ids] * 2
    for wrong in ("Hello", ["Hello"]):
        with pytest.raises(LopaError, match="chat takes messages"):
            chatting.chat(wrong, SHORT)  # type: ignore[call-overload]


def test_a_context(llm: LLM) -> None:
    with llm as same:
        assert same is llm


def test_nothing_gives_nothing(llm: LLM) -> None:
    assert llm.generate([], SHORT) == []


@pytest.mark.parametrize(
    ("prompts", "config", "named"),
    [
        ((p for p in PROMPTS), SHORT, "got generator"),
        ("Hello", {"branches": 1}, "config must be a DecodeConfig: got dict"),
        (["Hello", None], SHORT, "got NoneType"),
    ],
)
def test_wrong_kinds_are_named(llm: LLM, prompts: Any, config: Any, named: str) -> None:
    with pytest.raises(LopaError, match=named):
        llm.generate(prompts, config)


def test_a_string_is_never_several_prompts(llm: LLM) -> None:
    with pytest.raises(LopaError, match="give a list of prompts"):
        llm.generate_as_completed("abc", SHORT)


def test_a_repr_is_one_line(llm: LLM) -> None:
    output = llm.generate("Hello", SHORT)
    (*_, event) = llm.stream("Hello", SHORT)
    for thing in (llm, output, event, output.trace):
        assert len(repr(thing)) < 300
        assert "\n" not in repr(thing)


def test_help_has_a_line_on_every_setting() -> None:
    text = pydoc.plain(pydoc.render_doc(DecodeConfig))
    for name in DecodeConfig().__dataclass_fields__:
        assert f"{name}: " in text.split("Data descriptors")[0]
