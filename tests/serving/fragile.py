"""Tokens that the fragile worker cannot stand."""

DEADLY, FAULTY = 250, 251
