"""Compiling for a model's tokens: what is kept, and what the tokens spell."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from test_stream_decoder import BYTES, LLAMA
from walks import walk_tokens

from lopa.config import DecodeConfig
from lopa.errors import ConfigError
from lopa.grammar import compile as compiling
from lopa.grammar.compile import Compiler
from lopa.models.tokenizer import Tokenizer

EOS, MASK = 256, 260


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOPA_CACHE_DIR", str(tmp_path))
    return tmp_path / "automata"


def compiler(tokenizer: Tokenizer = BYTES, forbidden: int = MASK) -> Compiler:
    return Compiler(tokenizer, vocab_size=300, forbidden={forbidden})


def test_nothing_to_fit() -> None:
    assert compiler().compile_for(DecodeConfig(), [EOS]) is None
    assert Compiler(None, vocab_size=9, forbidden=()).compile_for(DecodeConfig(), []) is None


def test_a_pattern_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        Compiler(None, vocab_size=9, forbidden=()).compile_for(DecodeConfig(regex="a"), [])


def test_the_automaton_covers_the_models_vocabulary() -> None:
    automaton = compiler().compile_for(DecodeConfig(regex="a+"), [EOS, 257])
    assert automaton is not None
    assert len(automaton.class_of) == 300
    assert automaton.class_of[MASK] == automaton.class_of[299] == 0
    assert automaton.class_of[EOS] == automaton.class_of[257] == automaton.classes - 1
    assert automaton.advance(automaton.start, [97, 97, EOS, 257]) == automaton.end


def test_it_is_kept_in_memory_and_on_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecodeConfig(schema={"type": "integer", "maximum": 12})
    one = compiler()
    found = one.compile_for(config, [EOS])
    assert one.compile_for(config, [EOS]) is found
    assert len(list(cache.glob("*.npz"))) == 1
    monkeypatch.setattr(compiling, "lift", None)  # would fail
    again = compiler().compile_for(config, [EOS])
    assert again is not None
    assert found is not None
    for name in ("class_of", "next", "accepting", "distance"):
        assert (getattr(again, name) == getattr(found, name)).all()
    assert (again.start, again.end) == (found.start, found.end)


def test_other_tokens_or_ends_are_another_automaton(cache: Path) -> None:
    config = DecodeConfig(regex="a")
    compiler().compile_for(config, [EOS])
    compiler().compile_for(config, [EOS, 257])
    compiler(forbidden=200).compile_for(config, [EOS])
    compiler(LLAMA).compile_for(config, [])
    assert len(list(cache.glob("*.npz"))) == 4


def test_a_damaged_file_is_compiled_again(cache: Path) -> None:
    config = DecodeConfig(regex="ab")
    compiler().compile_for(config, [EOS])
    (path,) = cache.glob("*.npz")
    for content in (b"", b"PK\x03\x04 cut", path.read_bytes()[:300]):
        path.write_bytes(content)
        found = compiler().compile_for(config, [EOS])
        assert found is not None
        assert found.advance(found.start, [97, 98]) >= 0


def test_files_are_limited_in_number(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_FILES", 3)
    for count in range(1, 6):
        compiler().compile_for(DecodeConfig(regex=f"a{{{count}}}"), [EOS])
    assert len(list(cache.iterdir())) == 3


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOPA_CACHE_DIR", str(tmp_path / "file"))
    assert compiler().compile_for(DecodeConfig(regex="a"), [EOS]) is not None


def test_a_refusal_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = compiler()
    config = DecodeConfig(regex="(a|b)*a(a|b){30}")
    with pytest.raises(ConfigError, match="too large") as first:
        one.compile_for(config, [EOS])
    monkeypatch.setattr(compiling, "_texts", None)
    with pytest.raises(ConfigError, match="too large") as again:
        one.compile_for(config, [EOS])
    assert first.value is not again.value


def test_a_regex_that_nothing_matches() -> None:
    with pytest.raises(ConfigError, match="no text matches"):
        compiler().compile_for(DecodeConfig(regex="a^b"), [EOS])


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA])
def test_what_the_tokens_decode_to_fits(tokenizer: Tokenizer) -> None:
    """Also where the first token loses its space, and characters are spelt in bytes."""
    for pattern in (" ?the( dog)*", "é{1,3}x", "( the|dog|日本)+", " {2,3}x"):
        config = DecodeConfig(regex=pattern)
        automaton = compiler(tokenizer, forbidden=299).compile_for(config, [])
        assert automaton is not None
        for seed in range(60):
            tokens = walk_tokens(automaton, Random(seed), 24)
            text = tokenizer.decode(tokens)
            assert compiling.regex.fullmatch(pattern).accepts(text), (tokens, text)


def test_every_spelling_of_a_text_is_allowed() -> None:
    """All texts of up to three tokens whose decoding fits, and no others."""
    ids = [LLAMA.token_id(piece) for piece in ("▁", "▁the", "dog", "▁▁", "▁x")]
    dfa = compiling.regex.fullmatch(" ?(the|dog)? ?x?")
    automaton = compiler(LLAMA, 299).compile_for(DecodeConfig(regex=" ?(the|dog)? ?x?"), [])
    assert automaton is not None
    for first in ids:
        for second in ids:
            for third in ids:
                tokens = [i for i in (first, second, third) if i is not None]
                state = automaton.advance(automaton.start, tokens)
                accepts = state >= 0 and bool(automaton.accepting[state])
                assert accepts == dfa.accepts(LLAMA.decode(tokens)), tokens


def test_a_tokenizer_whose_texts_depend_on_neighbours_is_refused() -> None:
    spec = {
        "added_tokens": [],
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "vocab": {"a": 0, "##b": 1, "[UNK]": 2},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 9,
        },
    }
    with pytest.raises(ConfigError, match="cannot be kept to"):
        compiler(Tokenizer(spec)).compile_for(DecodeConfig(regex="a"), [])


class TestSettings:
    def test_a_schema_is_kept_as_text(self) -> None:
        schema = {"type": "object", "properties": {"b": True, "a": {"const": "é"}}}
        config = DecodeConfig(schema=schema)
        assert config.schema == '{"type":"object","properties":{"b":true,"a":{"const":"é"}}}'
        assert DecodeConfig(schema=json.dumps(schema, indent=2)) == config
        assert config.settings()["schema"] == config.schema
        assert "schema" not in DecodeConfig().settings()

    def test_one_takes_the_others_place(self) -> None:
        config = DecodeConfig(schema=True)
        assert config.changed(regex="a").schema is None
        assert config.changed(branches=1).schema == "true"
        assert config.changed(regex=None).schema == "true"
        assert config.changed(schema=None).schema is None

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"schema": {}, "regex": "a"}, "give one"),
            ({"schema": "{"}, "JSON text"),
            ({"schema": "3"}, "an object, true or false"),
            ({"schema": {"const": float("nan")}}, "JSON text"),
            ({"schema": {"const": "\ud800"}}, "JSON text"),
            ({"schema": {"const": {1}}}, "JSON text"),
            ({"schema": {"const": "x" * 100_001}}, "at most"),
            ({"schema": "x" * 1_000_001}, "at most"),
            ({"regex": "a" * 10_001}, "at most"),
            ({"regex": 3}, "must be a string"),
            ({"regex": "\ud800"}, "UTF-8"),
        ],
    )
    def test_what_is_wrong_is_said(self, given: dict[str, object], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            DecodeConfig(**given)  # type: ignore[arg-type]
