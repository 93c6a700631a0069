"""The engine: runners that execute plans on a device, and the loop that drives a decoder."""
