"""Answer a question, and see in which order its tokens were filled."""

from lopa import LLM

llm = LLM("tiny")  # or a folder, a hub id, dummy:dream-7b for random weights
question = (
    "Leo has 18 books. Kate has twice as many books as Leo. She gives half of her books to her "
    "school. How many books does she have in the end?"
)
output = llm.generate(question, branches=7, max_new_tokens=128)
print(output.text)
print(f"{output.tokens} tokens in {output.rounds} rounds: {output.tpf:.1f} tokens per forward")
print(output.show())  # a notebook draws it; .save("order.html") makes a page of it
