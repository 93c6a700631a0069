"""Answers that have to fit: driven round by round, looked at after each."""

from __future__ import annotations

from typing import Any

from lopa.decoding.decoder import Decoder
from lopa.engine.base_llm import BaseLLM
from lopa.engine.output import Output
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session


def completable(decoder: Decoder) -> bool:
    """Whether the anchor's masks can be filled so that it fits, by search."""
    assert decoder.answer is not None
    automaton = decoder.answer.automaton
    classes: Any = automaton.class_of
    states = {automaton.start}
    answer = decoder.tokens[decoder.prompt : decoder.prompt + decoder.config.max_new_tokens]
    for token in answer.tolist():
        moves = automaton.next[sorted(states)]
        if token != decoder.mask_id:
            moves = moves[:, classes[token]]
        states = {int(to) for to in moves.reshape(-1) if to >= 0}
    return any(automaton.distance[state] == 0 for state in states)


def check_answer(output: Output, decoder: Decoder) -> None:
    """It is complete, and all of it was allowed."""
    assert decoder.answer is not None
    automaton: Any = decoder.answer.automaton
    assert output.finish == "eos"
    assert len(output.token_ids) <= decoder.config.max_new_tokens
    assert decoder.mask_id not in output.token_ids
    state = automaton.advance(automaton.start, output.token_ids)
    assert state >= 0, output.token_ids
    assert automaton.accepting[state], output.token_ids
    eos = [token in decoder.eos_ids for token in output.token_ids]
    assert not any(eos[:-1])


def run(engine: Scheduler, sessions: list[Session]) -> list[Output]:
    """Together, with a look at every anchor after every round."""
    for session in sessions:
        engine.add(session)
    try:
        while engine.busy:
            for session, _ in engine.step():
                assert completable(session.decoder)
    finally:
        engine.close()
    outputs = []
    for session in sessions:
        assert session.output is not None
        check_answer(session.output, session.decoder)
        outputs.append(session.output)
    return outputs


def answer(llm: BaseLLM, prompt: list[int], automaton: Any, **settings: Any) -> Output:
    config = llm.decode_config(**settings)
    session = llm.session_from_ids(prompt, config, automaton=automaton)
    engine = llm.engine()
    assert isinstance(engine, Scheduler)
    return run(engine, [session])[0]
