"""Families, heads and their kinds, `Experts`, `Model`, encoding, and model folders in and out."""
