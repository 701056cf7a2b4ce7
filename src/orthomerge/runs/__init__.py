"""Recipes, a store of results by content, the driver of a run, sweeps."""
