"""Protocols, records, paired statistics, scale search, task negation and analogy."""
