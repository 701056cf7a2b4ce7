"""Writing the model that a command made."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthomerge.core.progress import Progress
    from orthomerge.models.model import Model


def existing(paths: Iterable[str | None]) -> list[Path]:
    """Those that are on this machine, and must not be overlapped by an output."""
    there = []
    for path in paths:
        with suppress(OSError, RuntimeError, ValueError):  # whoever opens it says what is wrong with it
            if path is not None and Path(path).expanduser().exists():
                there.append(Path(path).expanduser())
    return there


def check_place(out: str | None, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse a place that cannot be written to, before any work."""
    from orthomerge.files.publish import check_target

    if out is not None:
        check_target(Path(out), force=force, inputs=inputs)


def write(
    model: Model,
    out: str,
    *,
    force: bool,
    progress: Progress,
    inputs: Iterable[Path] = (),
    max_shard_size: str | int = "5GB",
) -> dict[str, Any]:
    """Write a model folder, and return its manifest."""
    from orthomerge.models.writing import write_model

    progress.stage("merging", sum(spec.nbytes for spec in model.weights.specs.values()))
    return write_model(
        model,
        Path(out).expanduser(),
        force=force,
        max_shard_size=max_shard_size,
        inputs=inputs,
        progress=progress.advance,
    )
