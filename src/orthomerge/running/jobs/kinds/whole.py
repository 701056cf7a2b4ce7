"""Merges that cannot be cut: one adapter from adapters, and methods that are fitted to inputs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from orthomerge.pipeline import merge
from orthomerge.running.jobs.context import MODEL, Context

__all__ = ["fit", "whole"]


def whole(context: Context, folder: Path) -> None:
    """Merge in one go."""
    merge(replace(context.recipe, align=None), out=folder / MODEL)


def fit(context: Context, folder: Path) -> None:
    """Fit in a place that outlives a killed worker: the next one goes on from the state that is kept there."""
    block = context.recipe.fit
    context.check_data(() if block is None else block.data.values())
    stable = context.store.folder / f"{context.job.key}.fit"
    stable.mkdir(exist_ok=True)
    merge(replace(context.recipe, align=None), out=stable / MODEL, force=True)
    (stable / MODEL).rename(folder / MODEL)
    shutil.rmtree(stable, ignore_errors=True)
