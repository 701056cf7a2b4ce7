"""Aligners: features of two encoders and a head in, a head out."""
