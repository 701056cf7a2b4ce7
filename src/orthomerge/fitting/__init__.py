"""Fitted methods: experts and unlabelled inputs in, a `Model` out."""
