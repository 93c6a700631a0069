"""The experiments: each answers one question about lookahead decoding, with figures and a picture.

A study is a function of a `Study` (model, problems, settings) to its findings; nothing here is
imported by the engine.
"""
