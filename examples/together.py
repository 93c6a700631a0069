"""Decode many prompts together; each may have settings of its own."""

from lopa import LLM, DecodeConfig
from lopa.tasks import generate

llm = LLM("tiny")
prompts = [generate(task, 0, "eval").prompt for task in ("words", "functions")]

outputs = llm.generate(prompts, branches=3, max_new_tokens=128)  # in the order of the prompts
print([output.rounds for output in outputs])

settings = [DecodeConfig(branches=branches, max_new_tokens=128) for branches in (0, 7)]
for index, output in llm.generate_as_completed(prompts, settings):  # in the order of their ends
    print(f"prompt {index}, {settings[index].branches} branches: {output.rounds} rounds")
