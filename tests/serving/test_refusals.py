"""What is not supported is a 400 that names the field, in the format that clients know."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from serving_support import Server, until

from lopa import DecodeConfig
from lopa.serving.api.schemas import IGNORED, UNSUPPORTED, Decoding

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def refused(server: Server, status: int = 400, path: str = "completions", **body: Any) -> Any:
    given = body if "messages" in body or "prompt" in body else {"prompt": "Hello", **body}
    response = server.post(f"/v1/{path}", **given)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


def test_requests_know_every_setting() -> None:
    # A schema is spelt as OpenAI does.
    assert {*Decoding.model_fields, "schema"} == set(DecodeConfig.__dataclass_fields__)


def test_the_client_raises_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="presence_penalty") as caught:
        client.completions.create(model="bytes", prompt="Hello", presence_penalty=0.5)
    assert caught.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt-4", prompt="Hello")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("best_of", 2),
        ("echo", True),
        ("tools", [{"type": "function"}]),
        ("store", True),
    ],
)
def test_unsupported_fields(server: Server, field: str, value: Any) -> None:
    error = refused(server, **{field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert "leave it out" in error["message"]


def test_a_chat_has_no_suffix(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    error = refused(server, path="chat/completions", messages=messages, suffix="end")
    assert error["param"] == "suffix"
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"gap_tokens": 4}, "gap_tokens", "needs a suffix"),
        ({"suffix": "", "gap_tokens": 4}, "gap_tokens", "needs a suffix"),
        ({"suffix": "b", "gap_tokens": 0}, "gap_tokens", "greater than"),
        ({"suffix": "b", "gap_tokens": []}, "gap_tokens", "at least 1"),
        ({"suffix": "b", "gap_tokens": [1] * 65}, "gap_tokens", "at most 64"),
        ({"suffix": "b", "gap_tokens": 4, "max_tokens": 5}, "gap_tokens", "differ"),
        ({"suffix": "b", "gap_tokens": 600}, "prompt", "more than the 512"),
        ({"suffix": "b" * 2000}, "suffix", "shorten it"),
        ({"suffix": [258]}, "suffix", "the suffix contains the mask token"),
        ({"suffix": "b", "attention": "block"}, "attention", "attention full"),
        ({"suffix": "b", "early_stop": False}, "early_stop", "parity mode"),
        ({"suffix": 7}, "suffix", "string"),
    ],
)
def test_bad_gaps(server: Server, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(server, **body)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_neutral_values_are_accepted(server: Server, field: str) -> None:
    for value in (None, *UNSUPPORTED[field][0]):
        assert server.complete(max_tokens=1, **{field: value}).status_code == 200


def test_harmless_fields_are_taken_with_a_note(server: Server, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="bytes",
        messages=MESSAGES,
        max_tokens=1,
        metadata={"trace": "a"},
        reasoning_effort="low",
        user="bo",
    )
    line = log_line(server, found.id)
    assert (line["ignored"], line["user"]) == ("metadata,reasoning_effort", "bo")
    for field in IGNORED:
        assert server.complete(max_tokens=1, **{field: "x"}).status_code == 200
    assert "ignored" not in log_line(server, server.complete(max_tokens=1).json()["id"])


def log_line(server: Server, response_id: str) -> dict[str, Any]:
    """Of a request; it is written after the response."""

    def lines() -> list[dict[str, Any]]:
        return [line for line in server.logged("request") if line.get("id") == response_id]

    found: dict[str, Any] = until(lines, server)[0]
    return found


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"banana": 1}, "banana", "unknown field"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": -1}, "temperature", "between"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0.5}, "top_p", "temperature above 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than"),
        ({"max_tokens": 9, "max_new_tokens": 8}, "max_tokens", "differ"),
        ({"max_tokens": 10**9}, "prompt", "more than the 512"),
        ({"max_tokens": 510}, "prompt", "more than the 512"),
        ({"prompt": "x" * 511, "max_tokens": 1}, "prompt", "whole blocks"),
        ({"n": 0}, "n", "greater than"),
        ({"n": 17}, "n", "16 or fewer"),
        ({"prompt": ["x"] * 17}, "prompt", "16 or fewer"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"seed": 2**63 - 1, "n": 2}, "seed", "at most"),
        ({"logprobs": 3}, "logprobs", "alternatives"),
        ({"stream_mode": "denoise"}, "stream_mode", "stream: true"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_mode": "denoise", "n": 2}, "n", "one choice"),
        ({"decoder": "best"}, "decoder", "lopa"),
        ({"decoder": "d2f", "branches": 3}, "branches", "leave it out"),
        ({"branches": 129}, "branches", "at most 128"),
        ({"branches": 1.5}, "branches", "integer"),
        ({"threshold": 2}, "threshold", "between"),
        ({"block_size": 0}, "block_size", "at least 1"),
        ({"accept": "any"}, "accept", "agreed"),
        ({"agreement": 1.5}, "agreement", "between"),
        ({"accept": "score", "agreement": 0.2}, "agreement", "leave it out"),
        ({"accept": "exact", "merge": True}, "merge", "leave it out"),
        ({"merge": "yes"}, "merge", "boolean"),
        ({"decoder": "vanilla", "steps": 33}, "steps", "at most 32"),
        ({"stop": [""]}, "stop[0]", "at least 1"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": 5}, "stop", "string"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1"),
        ({"prompt": [1, 99999]}, "prompt", "outside the vocabulary"),
        ({"prompt": [1] * 513}, "prompt", "513 parts"),
        ({"prompt": [-1]}, "prompt[0]", "greater than"),
        ({"prompt": {"a": 1}}, "prompt", "string"),
        ({"prompt": None}, "prompt", "string"),
    ],
)
def test_bad_completions(server: Server, body: Any, param: str, words: str) -> None:
    error = refused(server, **body)
    assert error["param"] == param, error
    assert words in error["message"], error
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least 1"),
        ("Hello", "messages", "list"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "user"),
        ([{"role": "user", "content": None}], "messages[0].content", "string"),
        ([{"role": "user", "content": "x", "name": "Bo"}], "messages[0].name", "unknown"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "is 'image_url', and the model reads text only",
        ),
    ],
)
def test_bad_chats(server: Server, messages: Any, param: str, words: str) -> None:
    error = refused(server, path="chat/completions", messages=messages)
    assert error["param"] == param, error
    assert words in error["message"], error


def test_a_chat_that_is_too_long(server: Server) -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    error = refused(server, path="chat/completions", messages=messages)
    assert error["param"] == "messages"
    assert "shorten" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b"{" * 5000, b"[" * 100_000,
     b'{"prompt": "\\ud800"}', b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
     b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "threshold": 1e999}'],
)  # fmt: skip
def test_bodies_that_are_no_requests(server: Server, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = server.http.post("/v1/completions", content=raw, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_must_be_sent_as_json(server: Server) -> None:
    """So that a web page elsewhere cannot post a form here without being asked for."""
    response = server.http.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
    )
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_other_paths_and_methods(server: Server) -> None:
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/../../etc/passwd", 404),
    ]:
        response = server.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]
