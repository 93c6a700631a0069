"""The server: OpenAI's API on the engine.

Two kinds of process. The API process speaks HTTP, knows no tensor and never imports torch; the
engine process (`worker`) loads the model and runs the rounds. They speak JSON over a socket. When
the engine process dies it is started again and every accepted request is submitted again.
"""
