"""What a merge is aligned with and compared with: each expert, and the base under the experts' heads."""

from __future__ import annotations

from pathlib import Path

from orthomerge.running.jobs.context import MODEL, Context
from orthomerge.running.models import base_of, expert_of

__all__ = ["base", "expert"]


def expert(context: Context, folder: Path) -> None:
    """The expert of one task, weights unchanged."""
    expert_of(context.recipe, context.places.merged, context.job.spec["task"], folder / MODEL)


def base(context: Context, folder: Path) -> None:
    """The base, once for all tasks."""
    base_of(context.recipe, context.places.merged, folder / MODEL)
