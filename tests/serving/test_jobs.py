"""Jobs and their events between the API and the engine."""

from __future__ import annotations

import json

import pytest

from lopa import LLM
from lopa.errors import ConfigError
from lopa.serving.config import EngineConfig
from lopa.serving.engine_process.worker import Worker
from lopa.serving.jobs import Accepted, Advance, Event, Failed, Finished, Job, Token, pack, unpack

_ADVANCE = {"round": 3, "text": "né", "filled": 9, "seconds": 0.5, "winner_rank": 1, "branches": 4}
_TOKENS = [Token(text="n", bytes=[110], logprob=-0.5), Token(text="é", bytes=[195], logprob=0.0)]
_FINISHED = {"finish": "eos", "tokens": 9, "rounds": 3, "tpf": 3.0, "branches": 2.5, "seconds": 0.5}


@pytest.mark.parametrize(
    "event",
    [
        Accepted(prompt_tokens=3, max_tokens=8, token_ids=[1, 2, 3]),
        Advance(**_ADVANCE, expected_gain=0.25),
        Advance(**_ADVANCE, tokens=_TOKENS, trace_line="{}"),
        Finished(**_FINISHED, queue_seconds=0.1, engine_seconds=0.7),
        Failed(kind="invalid", message="no", param="prompt"),
    ],
)
def test_an_event_is_the_same_on_the_other_side(event: Event) -> None:
    assert unpack(json.loads(json.dumps(pack(event)))) == event


def test_settings_are_kept_by_what_was_given(known_cost: None) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    worker = Worker(llm, EngineConfig(model="dummy:dream-tiny"), None)  # type: ignore[arg-type]

    def settings(**options: object) -> object:
        job = Job(id="a", prompt=[1, 2], max_tokens=8, options=options)
        return worker.open(job)[0].session.config

    first = settings(branches=1, temperature=1)
    assert settings(temperature=1, branches=1) is first
    assert settings(branches=2, temperature=1) is not first
    with pytest.raises(ConfigError, match="branches"):
        settings(branches=True, temperature=1)  # equals 1
    with pytest.raises(ConfigError, match="temperature"):
        settings(branches=1, temperature=True)
    for number in range(600):  # as many seeds as there are requests
        settings(seed=number)
    assert len(worker._configs) < 600
    kept = len(worker._configs)
    settings(stop=["x" * 10_000])
    assert len(worker._configs) == kept
