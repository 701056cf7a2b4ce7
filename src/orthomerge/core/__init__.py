"""Errors, options and their schema, registries, tables, threads, seeds and progress; knows no model."""
