"""Answers of a given shape: a regex or a JSON Schema as an automaton over a model's tokens."""
