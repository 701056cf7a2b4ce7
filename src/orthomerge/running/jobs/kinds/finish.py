"""The end of a run: models and records in their places, then card, diagnosis and report."""

from __future__ import annotations

from pathlib import Path

from orthomerge.checkpoints.publish import write_json
from orthomerge.running.jobs.context import Context
from orthomerge.running.jobs.finishing import finish_run

__all__ = ["finish"]


def finish(context: Context, folder: Path) -> None:
    """Do what is left, and name the stages that are done."""
    write_json(folder / "finish.json", list(finish_run(context.run, context.plan).stages))
