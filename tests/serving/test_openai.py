"""OpenAI's own client, unchanged, against a server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from serving_support import Server, data_of

from lopa import LLM, DecodeConfig
from lopa.engine.prompts import Infill
from lopa.version import VERSION

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SETTINGS = DecodeConfig(branches=2, score="mean", block_size=8, max_new_tokens=32)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bytes"]
    assert client.models.retrieve("bytes").owned_by == "lopa"
    with pytest.raises(openai.NotFoundError, match="bytes is"):
        client.models.retrieve("gpt/4")


def test_completion(client: openai.OpenAI, llm: LLM) -> None:
    alone = llm.generate("Hello", SETTINGS)
    found = client.completions.create(model="bytes", prompt="Hello")
    assert found.choices[0].text == alone.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 32)
    assert found.id.startswith("cmpl-")
    told: Any = found.choices[0]
    assert told.lopa["branches"] == alone.mean_branches > 0


def test_chat(client: openai.OpenAI, llm: LLM) -> None:
    alone = llm.generate(MESSAGES, SETTINGS)
    found = client.chat.completions.create(model="bytes", messages=MESSAGES)
    assert found.choices[0].message.content == alone.text
    assert found.choices[0].message.role == "assistant"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hel", "lo")]}]
    again = client.chat.completions.create(model="bytes", messages=parts)
    assert again.choices[0].message.content == alone.text
    # What a client gets back it may send on as it is.
    turns = [*MESSAGES, found.choices[0].message, *MESSAGES]
    client.chat.completions.create(model="bytes", messages=turns, max_tokens=8)


@pytest.mark.parametrize("wanted", [1, 5, 8, 13])
def test_any_max_tokens(client: openai.OpenAI, llm: LLM, wanted: int) -> None:
    tokens = -(-wanted // 8) * 8
    whole = DecodeConfig(branches=2, score="mean", block_size=8, max_new_tokens=tokens)
    full = llm.generate("Hello", whole)
    found = client.completions.create(model="bytes", prompt="Hello", max_tokens=wanted)
    assert found.usage is not None
    assert found.usage.completion_tokens == wanted
    assert found.choices[0].finish_reason == "length"
    assert llm.tokenizer is not None
    assert found.choices[0].text == llm.tokenizer.decode(full.token_ids[:wanted])


def test_completion_stream(client: openai.OpenAI, llm: LLM) -> None:
    alone = llm.generate("Hello", SETTINGS)
    stream = client.completions.create(
        model="bytes", prompt="Hello", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == alone.text
    assert len([text for text in texts if text]) > 1
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 32


def test_chat_stream(client: openai.OpenAI, llm: LLM) -> None:
    alone = llm.generate(MESSAGES, SETTINGS)
    chunks = list(client.chat.completions.create(model="bytes", messages=MESSAGES, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stream_never_splits_a_character(client: openai.OpenAI, llm: LLM) -> None:
    for seed in range(2):
        options = {"temperature": 1.0, "seed": seed}
        alone = llm.generate("x", DecodeConfig(**{**SETTINGS.settings(), **options}))
        stream = client.completions.create(
            model="bytes", prompt="x", stream=True, temperature=1.0, seed=seed
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == alone.text


def test_stop(client: openai.OpenAI, llm: LLM) -> None:
    full = llm.generate("Hello", SETTINGS).text
    stop = full[10:12]
    for given in (stop, ["never", stop]):
        found = client.completions.create(model="bytes", prompt="Hello", stop=given)
        assert found.choices[0].text == full[: full.index(stop)]
        assert found.choices[0].finish_reason == "stop"
    stream = client.completions.create(model="bytes", prompt="Hello", stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == full[: full.index(stop)]


def test_suffix(client: openai.OpenAI, llm: LLM) -> None:
    """The text is the gap's, whole or as a stream."""
    config = SETTINGS.changed(max_new_tokens=9)
    alone = llm.generate(Infill("Hello", ((9, "World"),)), config)
    asked: Any = {"model": "bytes", "prompt": "Hello", "suffix": "World"}
    found = client.completions.create(**asked, extra_body={"gap_tokens": 9})
    assert found.choices[0].text == alone.text
    assert found.choices[0].finish_reason == "stop"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (10, 9)
    ids = llm.encode("World")
    again = client.completions.create(
        model="bytes", prompt="Hello", extra_body={"suffix": ids, "gap_tokens": 9}
    )
    assert again.choices[0].text == alone.text
    stream = client.completions.create(**asked, stream=True, extra_body={"gap_tokens": 9})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_suffix_without_a_length(client: openai.OpenAI, llm: LLM) -> None:
    """Lengths up to max_tokens are tried."""
    config = SETTINGS.changed(max_new_tokens=6)
    alone = llm.generate(Infill("Hello", ((None, "World"),)), config)
    asked: Any = {"model": "bytes", "prompt": "Hello", "suffix": "World", "max_tokens": 6}
    found = client.completions.create(**asked, logprobs=0)
    assert found.choices[0].text == alone.text
    assert found.usage is not None
    assert found.usage.completion_tokens == alone.tokens <= 6
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.token_logprobs or []) == alone.tokens
    stream = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == alone.text


def test_suffix_and_stop(client: openai.OpenAI, llm: LLM) -> None:
    config = SETTINGS.changed(max_new_tokens=12)
    whole = llm.generate(Infill("Hello", ((12, "World"),)), config).text
    stop = whole[4:6]
    found = client.completions.create(
        model="bytes", prompt="Hello", suffix="World", stop=stop, extra_body={"gap_tokens": 12}
    )
    assert found.choices[0].text == whole[: whole.index(stop)]


def test_n_counts_seeds_up(client: openai.OpenAI, llm: LLM) -> None:
    found = client.completions.create(
        model="bytes", prompt=["Hello", "You"], n=2, temperature=1.0, seed=5
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for i, (prompt, seed) in enumerate([("Hello", 5), ("Hello", 6), ("You", 5), ("You", 6)]):
        config = DecodeConfig(**{**SETTINGS.settings(), "temperature": 1.0, "seed": seed})
        assert found.choices[i].text == llm.generate(prompt, config).text
    assert found.usage is not None
    assert found.usage.prompt_tokens == 8  # every prompt once
    chunks = client.completions.create(
        model="bytes", prompt="Hello", n=2, temperature=1.0, seed=5, stream=True
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in found.choices[:2]]


def test_token_ids_as_a_prompt(client: openai.OpenAI) -> None:
    text = client.completions.create(model="bytes", prompt="Hello").choices[0].text
    ids = llm_ids(client, "Hello")
    one = client.completions.create(model="bytes", prompt=ids)
    many = client.completions.create(model="bytes", prompt=[ids, ids], max_tokens=8)
    assert one.choices[0].text == text
    assert len(many.choices) == 2


def llm_ids(client: openai.OpenAI, text: str) -> list[int]:
    """The ids as the denoising stream gives them."""
    stream = client.completions.with_streaming_response.create(
        model="bytes", prompt=text, stream=True, extra_body={"stream_mode": "denoise"}
    )
    with stream as response:
        ids: list[int] = data_of(response.iter_lines())[0]["prompt_ids"]
    return ids


def test_logprobs(client: openai.OpenAI) -> None:
    found = client.completions.create(model="bytes", prompt="Hello", logprobs=0, max_tokens=12)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 12
    assert all(value <= 0 for value in logprobs.token_logprobs)
    chat = client.chat.completions.create(
        model="bytes", messages=MESSAGES, logprobs=True, max_tokens=12
    )
    told = chat.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    raw = bytes(byte for token in told.content for byte in token.bytes or [])
    assert raw.decode("utf-8", "replace") == chat.choices[0].message.content
    chunks = client.chat.completions.create(
        model="bytes", messages=MESSAGES, logprobs=True, max_tokens=12, stream=True
    )
    streamed = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [token for part in streamed for token in part or []] == told.content


def test_extension_fields(client: openai.OpenAI, llm: LLM) -> None:
    config = llm.decode_config(decoder="d2f", block_size=8, max_new_tokens=16, threshold=0.5)
    found = client.completions.create(
        model="bytes",
        prompt="Hello",
        max_tokens=16,
        extra_body={"decoder": "d2f", "threshold": 0.5},
    )
    assert found.choices[0].text == llm.generate("Hello", config).text
    vanilla = client.completions.create(
        model="bytes", prompt="Hello", max_tokens=5, extra_body={"decoder": "vanilla"}
    )
    alone = llm.generate("Hello", DecodeConfig(decoder="vanilla", max_new_tokens=5))
    assert vanilla.choices[0].text == alone.text


@pytest.mark.parametrize(
    "options",
    [
        {"accept": "agreed", "agreement": 0.3, "agreement_ahead": 0.4},
        {"accept": "agreed", "agreement": 0.3, "merge": False},
        {"accept": "exact"},
    ],
)
def test_how_branches_are_accepted(server: Server, llm: LLM, options: dict[str, Any]) -> None:
    """As an option of the request; and what the anchor thinks is in the stream."""
    score = {} if options["accept"] == "exact" else {"score": "mean"}
    config = DecodeConfig(branches=3, block_size=8, max_new_tokens=32, **options, **score)
    alone = llm.generate("Hello", config)
    body = {"prompt": "Hello", "stream": True, "stream_mode": "denoise", "branches": 3, **options}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        run, *rounds, end, _ = data_of(response.iter_lines())
    assert run["settings"] == alone.trace.settings
    assert end["token_ids"] == alone.token_ids
    named = {token for told in [run, *rounds, end] for token in told.get("pieces", {})}
    for told, record in zip(rounds, alone.trace.rounds, strict=True):
        branches = told["branches"]
        assert [b["refused"] for b in branches] == [b.refused for b in record.branches]
        for branch in branches:
            assert len(branch["lookaheads"]) == len(branch["anchor"])
            placed = [*branch["lookaheads"], *branch["anchor"]]
            assert {str(each["token"]) for each in placed} <= named
    assert any(b["refused"] for told in rounds for b in told["branches"])


def test_denoise_stream(server: Server, llm: LLM) -> None:
    alone = llm.generate("Hello", SETTINGS)
    body = {"prompt": "Hello", "stream": True, "stream_mode": "denoise"}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        run, *rounds, end, done = data_of(response.iter_lines())
    assert done == "[DONE]"
    assert run["type"] == "run"
    assert run["settings"] == alone.trace.settings
    assert "".join(run["prompt_pieces"]) == "Hello"
    assert [r["type"] for r in rounds] == ["round"] * alone.rounds
    for told, record in zip(rounds, alone.trace.rounds, strict=True):
        assert told["winner"] == record.winner
        assert [f["token"] for f in told["fills"]] == [f.token for f in record.fills]
        assert [b["score"] for b in told["branches"]] == [b.score for b in record.branches]
    assert "".join(r["text"] for r in rounds) == alone.text == end["text"]
    assert end["token_ids"] == alone.token_ids
    assert end["summary"]["rounds"] == alone.rounds
    pieces: dict[str, str] = {}
    for record in [*rounds, end]:
        assert not pieces.keys() & record["pieces"].keys()
        pieces |= record["pieces"]
    assert {int(token) for token in pieces} >= set(alone.token_ids)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_both_endpoints_denoise(server: Server, path: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hello"}
    body = {**asked, "stream": True, "stream_mode": "denoise", "max_tokens": 8}
    with server.http.stream("POST", f"/v1/{path}", json=body) as response:
        kinds = [e if e == "[DONE]" else e["type"] for e in data_of(response.iter_lines())]
    assert (kinds[0], kinds[1], kinds[-2], kinds[-1]) == ("run", "round", "end", "[DONE]")


def test_tokenize(server: Server, llm: LLM) -> None:
    """The tokens that a request would have; nothing is decoded."""
    counted = ("lopa_rounds_total", "lopa_answers_dropped_total")
    before = [server.metric(name) for name in counted]
    for body, prompt in (({"prompt": "Hello é"}, "Hello é"), ({"messages": MESSAGES}, MESSAGES)):
        found = server.post("/tokenize", **body).json()
        ids = llm.encode(prompt)
        assert found == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert server.slots() == []
    assert [server.metric(name) for name in counted] == before
    for wrong in ({}, {"prompt": "x", "messages": MESSAGES}, {"prompt": ""}, {"text": "x"}):
        assert server.post("/tokenize", **wrong).status_code == 400
    long = [{"role": "user", "content": "x" * 600}]
    for field, value in (("prompt", "x" * 600), ("messages", long)):
        assert server.post("/tokenize", **{field: value}).json()["error"]["param"] == field


def test_version(server: Server) -> None:
    assert server.http.get("/version").json() == {"version": VERSION}
