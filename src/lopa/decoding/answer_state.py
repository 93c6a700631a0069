"""How far an answer that has to fit an automaton has been read.

The automaton's state behind the tokens that are filled without a gap is kept here and goes into
each plan. The tokens themselves are found where the logits are (`lopa.runner.lattice`): every row's
are on one path through the automaton that can be completed within the limit. A round fills tokens
of one row alone, the winner's, so the anchor can be completed after every round.
"""

from __future__ import annotations

from lopa.config import DecodeConfig
from lopa.errors import ConfigError
from lopa.types import Automaton, Constraint, IntArray


class AnswerState:
    def __init__(self, automaton: Automaton, config: DecodeConfig, prompt: int) -> None:
        check(automaton, config)
        self.automaton = automaton
        self.state = automaton.start
        self.start = prompt  # position of the first token that is not read yet
        self.limit = prompt + config.max_new_tokens

    def read(self, tokens: IntArray, mask_id: int) -> None:
        """Read on up to the first mask. tokens: from position 0 on"""
        gaps = tokens[self.start :] == mask_id
        count = int(gaps.argmax()) if gaps.any() else len(gaps)
        following, class_of = self.automaton.next, self.automaton.class_of
        for token in tokens[self.start : self.start + count].tolist():
            self.state = int(following[self.state, class_of[token]])
            if self.state < 0:
                raise RuntimeError(f"token {token} at {self.start} does not fit")
            self.start += 1

    def constraint(self, end: int) -> Constraint:
        """Of a plan; end: where its fillable positions end."""
        return Constraint(self.automaton, self.state, self.start, end, self.limit)


def check(automaton: Automaton, config: DecodeConfig) -> None:
    """Refuse settings that have no meaning for an answer that has to fit."""
    least = int(automaton.distance[automaton.start])
    if least > config.max_new_tokens:
        raise ConfigError(
            f"the shortest answer that fits has {least} tokens and max_new_tokens is "
            f"{config.max_new_tokens}: allow at least {least}"
        )
    if not config.early_stop:
        raise ConfigError("parity mode (early_stop false) has no answers that must fit: leave it")
    if config.stop:
        raise ConfigError("a stop string may cut an answer that must fit: leave out one of both")
    if config.ranking == "margin":
        raise ConfigError("ranking margin is not known for answers that must fit: use max_prob")
