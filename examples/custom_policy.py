"""A lookahead policy of your own: which tokens are tried ahead, and which branch wins."""

from lopa import LLM, DecodeConfig
from lopa.decoding.policy import AgreedPolicy
from lopa.decoding.round_view import Anchor
from lopa.types import Draft


class Cautious(AgreedPolicy):
    """Tries only tokens ahead that are more likely than not."""

    def spawn(self, anchor: Anchor) -> list[Draft]:
        return [draft for draft in super().spawn(anchor) if draft[0].max_prob > 0.5]


llm, config = LLM("tiny"), DecodeConfig(branches=3, max_new_tokens=128)
question = (
    "Leo has 18 books. Kate has twice as many books as Leo. She gives half of her books to her "
    "school. How many books does she have in the end?"
)
for policy in (AgreedPolicy(config), Cautious(config)):
    session = llm.session(question, config, policy=policy)
    for _ in llm.engine().stream(session):
        pass
    assert session.output is not None
    output = session.output
    print(f"{type(policy).__name__}: {output.rounds} rounds, {output.mean_branches:.1f} branches")
print(output.text)
