"""Sweeps: many merges and ways of reading them from one recipe, as jobs of one plan."""
