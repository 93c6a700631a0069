"""The server: OpenAI's API on the engine.

Two kinds of process. The API process (`api`) speaks HTTP and never imports torch; the engine
process (`engine_process`) loads the model and runs the rounds. They exchange JSON over a socket
(`ipc`, `jobs`). When the engine process dies it is restarted and every accepted request is
submitted again. `ray` runs several engine processes over a cluster.
"""
