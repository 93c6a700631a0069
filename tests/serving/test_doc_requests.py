"""The requests of README and docs, sent as they stand to `lopa serve`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from serving_support import Server

from doc_questions import PAGES, blocks, problem, requests
from lopa.evaluation.scoring import score
from lopa.models.questions import FUNCTION, WORD_PROBLEM

SENT = [(path, body) for page in PAGES for path, body in requests(page)]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with Server() as server:
        yield server


def test_curl_is_answered_rightly(tiny: Server) -> None:
    assert SENT
    for path, body in SENT:
        answer = tiny.post(path, **body)
        assert answer.status_code == 200, answer.text
        asked = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] if "messages" in body else choice["text"]
        assert score(problem(asked), text), text


def test_openai_client(tiny: Server, capsys: pytest.CaptureFixture[str]) -> None:
    serving = next(page for page in PAGES if page.name == "serving.md")
    (block,) = (block for block in blocks(serving) if "from openai import" in block)
    exec(compile(block.replace("http://127.0.0.1:8000", tiny.url), "serving.md", "exec"), {})
    assert score(problem(FUNCTION), capsys.readouterr().out)


def test_it_says_what_it_can_do(tiny: Server) -> None:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        continued = client.completions.create(model="tiny", prompt="Hello", max_tokens=8)
        assert continued.choices[0].text
        for before, said in (([], "solves word problems"), (["Hi"], "one question at a time")):
            given = [*before, "Hello" if not before else WORD_PROBLEM]
            messages = [{"role": "user", "content": text} for text in given]
            with pytest.raises(openai.BadRequestError, match=said):
                client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
