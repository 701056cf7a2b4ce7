"""Contracts that third parties can check on entries of their own."""

from orthomerge.testing.methods import check_method as check_method
