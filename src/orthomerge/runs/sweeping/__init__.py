"""Sweeps: many merges and protocols from one recipe."""
