"""Print text as it becomes final, round by round."""

from lopa import LLM

llm = LLM("tiny")
question = (
    "Define sum_even(numbers) so that it returns the sum of the even numbers in numbers.\n"
    "assert sum_even([1, 2, 4]) == 6"
)
for event in llm.stream(question, max_new_tokens=128):
    # Filled tokens to the right of a mask wait until all before them are filled.
    print(event.text, end="", flush=True)
assert event.output is not None  # with the last event
print(f"\n{event.output.rounds} rounds, ended by {event.output.finish}")
