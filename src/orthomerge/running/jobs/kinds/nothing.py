"""A job that does nothing for `seconds`: it shows what the others cost beside their work."""

from __future__ import annotations

import time
from pathlib import Path

from orthomerge.running.jobs.context import Context

__all__ = ["nothing"]


def nothing(context: Context, folder: Path) -> None:
    """Leave one small file."""
    if seconds := context.job.spec.get("seconds", 0):
        time.sleep(seconds)
    (folder / "nothing").write_text(context.job.key)
