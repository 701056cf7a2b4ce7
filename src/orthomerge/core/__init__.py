"""Errors, options and their schema, registries, tables, threads, seeds and progress; independent of models."""
