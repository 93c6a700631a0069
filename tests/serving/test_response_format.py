"""Answers that have to fit a schema or a regex, over HTTP."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from serving_support import Server

from lopa.serving.engine_process.encoding_queue import EncodingQueue
from lopa.serving.jobs import Job

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["äpfel", "pears"]},
    },
    "required": ["answer", "unit"],
    "additionalProperties": False,
}


def json_schema(schema: Any) -> Any:
    made = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": made}


def test_a_schema_in_a_chat(client: openai.OpenAI) -> None:
    for seed, temperature in enumerate((0, 1, 1)):
        found = client.chat.completions.create(
            model="bytes",
            messages=MESSAGES,
            response_format=json_schema(SCHEMA),
            max_tokens=48,
            temperature=temperature,
            seed=seed,
        )
        assert found.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(found.choices[0].message.content or ""), SCHEMA)


def test_a_schema_in_a_stream_of_completions(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="bytes",
            prompt="Hello",
            max_tokens=40,
            stream=True,
            extra_body={"response_format": json_schema(SCHEMA)},
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_any_json_object(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="bytes", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=40
    )
    assert isinstance(json.loads(found.choices[0].message.content or ""), dict)
    assert found.choices[0].finish_reason == "stop"


def test_a_regex(client: openai.OpenAI) -> None:
    pattern = r"(yes|no), \d{2}\."
    found = client.completions.create(
        model="bytes", prompt="Hello", max_tokens=16, extra_body={"regex": pattern}
    )
    assert re.fullmatch(pattern, found.choices[0].text)


def test_plain_text_is_as_it_was(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="bytes", messages=MESSAGES)
    text = client.chat.completions.create(
        model="bytes", messages=MESSAGES, response_format={"type": "text"}
    )
    assert text.choices[0].message.content == plain.choices[0].message.content


BIG = {"enum": ["x" * 1_000_000]}
LAUGHS = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 60)}


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"response_format": json_schema({"not": {}})}, "response_format", "/not"),
        ({"response_format": json_schema({"type": "wrong"})}, "response_format", "/type"),
        ({"response_format": json_schema(False)}, "response_format", "allows no value"),
        ({"response_format": json_schema(BIG)}, "response_format", "at most"),
        (
            {"response_format": json_schema({"$defs": LAUGHS | {"d0": {}}, "$ref": "#/$defs/d59"})},
            "response_format",
            "too large",
        ),
        ({"response_format": json_schema({"minLength": 10**7})}, "response_format", "too large"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "goes with"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (
            {"response_format": json_schema(SCHEMA), "max_tokens": 9},
            "max_tokens",
            "allow at least 30",
        ),
        ({"regex": "(a|b)*a(a|b){30}"}, "regex", "too large"),
        ({"regex": "(" * 4000}, "regex", "too deep"),
        ({"regex": "("}, "regex", "not valid"),
        ({"regex": r"(a)\1"}, "regex", "back-references"),
        ({"regex": "a" * 20_000}, "regex", "at most"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "give one"),
        ({"regex": "a", "stop": ["b"]}, "stop", "cut"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused(
    server: Server, body: dict[str, Any], param: str, why: str
) -> None:
    response: httpx.Response = server.post("/v1/completions", prompt="Hello", **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert why in error["message"]
    assert error["param"] == param
    assert server.post("/v1/completions", prompt="Hello", max_tokens=1).status_code == 200


def test_a_schema_nested_beyond_reason(server: Server) -> None:
    deep = '{"items":' * 3000 + "true" + "}" * 3000
    head = '{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":'
    response = server.http.post(
        "/v1/completions",
        content=head + deep + "}}}",
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400


def test_other_prompts_do_not_wait_for_a_pattern() -> None:
    compiled, encoded = threading.Event(), threading.Event()
    seen = []

    def encode(job: Job) -> None:
        if job.options:
            assert encoded.wait(30)  # the other one comes first, though it was put second
        seen.append(job.id)
        (compiled if job.options else encoded).set()

    queue = EncodingQueue(encode)
    queue.put(Job(id="pattern", prompt="a", options={"regex": "a"}))
    queue.put(Job(id="plain", prompt="a longer one"))
    assert compiled.wait(30)
    assert seen == ["plain", "pattern"]
