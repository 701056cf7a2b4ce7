"""The whole line from one recipe: merge, align, references, evaluate, card, diagnose, report."""
