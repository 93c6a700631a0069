"""The engine process: the model, and the jobs that run on it."""
