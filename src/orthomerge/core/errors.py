"""Exceptions of orthomerge, each with an exit code.

A message names what must hold, what was given instead, and what to do about it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class OrthomergeError(Exception):
    """Base class: a mistake in the input or a fault of the machine, not a bug in orthomerge."""

    exit_code = 1


class RecipeError(OrthomergeError):
    """A recipe or command line names something that does not exist, or options that contradict each other."""

    exit_code = 2


class CheckpointError(OrthomergeError):
    """A file is missing, broken, hostile, or in a format that is not supported."""

    exit_code = 3


class IncompatibleError(OrthomergeError):
    """Files that are valid on their own do not fit together."""

    exit_code = 4


class OutputError(OrthomergeError):
    """An output cannot be written, or does not verify."""

    exit_code = 5


class NumericalError(OrthomergeError):
    """NaN, infinity, overflow, or a solver that does not converge."""

    exit_code = 6


def some(items: Iterable[object], *, most: int = 3) -> str:
    """List the first few items: ``'a', 'b', 'c' and 4 more``."""
    names = [repr(str(item)) for item in items]
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Suggest the most similar of the valid names, or list them."""
    names = sorted(valid)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


def summary(error: Exception) -> str:
    """Return the class and first line of an error of a library: ``ValueError: no such file``."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"
