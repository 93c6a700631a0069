"""StreamDecoder: the pieces add up to `decode`, and none ends inside a character."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import TEXTS, dream_folder, flags, load

from lopa.models.stream_decoder import StreamDecoder
from lopa.models.tokenizer import Tokenizer


def llama_like() -> Tokenizer:
    """Byte fallback and a stripped leading space: decoding depends on the neighbours."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "dog", "é", "▁▁", "▁x"]
    named = [{"id": i, **flags(words[i], True)} for i in (0, 1)]
    spec = {
        "added_tokens": named,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [],
            "unk_token": "<unk>",
            "byte_fallback": True,
        },
    }
    return Tokenizer(spec)


BYTES = Tokenizer.byte_level({"<|eos|>": 256, "<|mask|>": 260})
LLAMA = llama_like()


def stream(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(chunk) for chunk in chunks), decoder.flush()]


class TestStreamDecoder:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.lists(st.integers(-2, 262), max_size=6), max_size=12))
    def test_random_bytes(self, chunks: list[list[int]]) -> None:
        assert "".join(stream(BYTES, chunks)) == BYTES.decode([*chain(*chunks)])

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.lists(st.integers(-1, 265) | st.integers(256, 265), max_size=6), max_size=12)
    )
    def test_random_ids_of_a_byte_fallback_vocabulary(self, chunks: list[list[int]]) -> None:
        assert "".join(stream(LLAMA, chunks)) == LLAMA.decode([*chain(*chunks)])

    @settings(max_examples=100, deadline=None)
    @given(
        st.text(st.sampled_from("a é你好世界👩\u200d🇨🇭😀\n")),
        st.sampled_from([BYTES, LLAMA]),
        st.integers(1, 4),
    )
    def test_no_partial_characters(self, text: str, tokenizer: Tokenizer, size: int) -> None:
        ids = [i if tokenizer is BYTES else i + 2 for i in text.encode()]
        outputs = stream(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
        assert "".join(outputs) == tokenizer.decode(ids)
        assert not any("\ufffd" in output for output in outputs)

    def test_trained_vocabulary(self, tmp_path: Path) -> None:
        dream = load(dream_folder(tmp_path))
        for text in TEXTS:
            ids = dream.encode(text)
            outputs = stream(dream, [[i] for i in ids])
            assert "".join(outputs) == dream.decode(ids)
            assert not any("\ufffd" in output for output in outputs)

    def test_characters_come_as_soon_as_they_are_whole(self) -> None:
        decoder = StreamDecoder(BYTES)
        assert [decoder.push([byte]) for byte in "a你".encode()] == ["a", "", "", "你"]
        assert decoder.push([0xE4, 256]) == ""
        assert decoder.flush() == "\ufffd"
        assert decoder.flush() == ""
        assert decoder.push([97]) == "a"

    def test_work_does_not_grow_with_the_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        decode = Tokenizer.decode

        def counting(self: Tokenizer, ids: list[int]) -> str:
            sizes.append(len(ids))
            return decode(self, ids)

        monkeypatch.setattr(Tokenizer, "decode", counting)
        stream(LLAMA, [[259]] * 50)
        assert max(sizes) <= 2
