"""Fill a gap between two texts, and make an answer fit a JSON Schema or a regex."""

import json
from pathlib import Path

from lopa import LLM

llm = LLM("tiny")

function = (
    "Define sum_even(numbers) so that it returns the sum of the even numbers in numbers.\n"
    "assert sum_even([1, 2, 4]) == 6\n"
    "def sum_even(numbers):\n"
    "    total = 0\n"
)
gap = llm.infill(function, "\n    return total", max_new_tokens=32)  # its length is found
print(gap.text)

question = (
    "Leo has 18 books. Kate has twice as many books as Leo. She gives half of her books to her "
    "school. How many books does she have in the end?"
)
fitting = llm.generate(question, regex=r"[^#]+\n#### \d+", max_new_tokens=128)
print(fitting.text)

# The built-in model never saw JSON, and every answer fits all the same. One that is right has the
# steps first, under names it knows, and is filled token by token: see docs/structured.md.
schema = json.loads((Path(__file__).parent / "word_problem.json").read_text())
answer = llm.generate(question, schema=schema, branches=0, threshold=1.0, max_new_tokens=128)
print(json.loads(answer.text))
