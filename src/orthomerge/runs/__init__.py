"""A run from one recipe: merge, align, evaluate, diagnose, report; and sweeps over such runs."""
