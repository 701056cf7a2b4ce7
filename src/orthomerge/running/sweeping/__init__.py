"""Sweeps: many merges and ways of reading them from one recipe, one after the other."""
