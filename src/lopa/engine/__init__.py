"""`LLM`, loading, sessions and the scheduler."""
