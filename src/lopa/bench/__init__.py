"""Measurements on the spot: what a round costs, and how that compares with what the chip allows."""
