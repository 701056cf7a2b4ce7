"""The end of a sweep that workers without a driver did: one run folder from what they made."""

from __future__ import annotations

from pathlib import Path

from orthomerge.checkpoints.publish import write_json
from orthomerge.running.jobs.context import Context
from orthomerge.running.jobs.finishing import waiting_ledger
from orthomerge.running.sweeping.finishing import finish_sweep

__all__ = ["finish"]


def finish(context: Context, folder: Path) -> None:
    """Do what is left, and say how many cells failed."""
    with waiting_ledger(context.run) as ledger:
        made = finish_sweep(context.plan, ledger)
    write_json(folder / "finish.json", {"cells": len(made.rows), "failed": len(made.failures)})
