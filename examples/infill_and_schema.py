"""Fill a gap between two texts, and make an answer fit a JSON Schema or a regex."""

import json

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

# The built-in model never saw JSON, and every answer fits all the same.
count = {"type": "integer", "minimum": 0, "maximum": 99}
schema = {"type": "object", "properties": {"books": count}, "required": ["books"]}
print(json.loads(llm.generate(question, schema=schema, max_new_tokens=32).text))
