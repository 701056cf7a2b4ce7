"""How a run was made: command, recipe, stages with their seconds, memory, machine, versions, and what was merged."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build
from orthomerge.evaluation.records import read_document, write_whole

FILE = "run.json"


@dataclass(frozen=True)
class RunInfo:
    """`recipe`: its text. `started`: ISO 8601. `seconds`: by stage, in order. `memory`: bytes at the peak.

    `manifests`: what was merged: folders of outputs, relative to the run folder, or blocks of a manifest as they are
    (`method`, `inputs` with hashes, `heads`, `alignment`, `fit`).
    """

    command: str = ""
    recipe: str = ""
    started: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    memory: int | None = None
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    manifests: tuple[str | dict[str, Any], ...] = ()


def write_info(path: Path, info: RunInfo) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(asdict(info), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_info(path: Path) -> RunInfo:
    """Read it back; what does not fit is an error that names the file."""
    return build(RunInfo, read_document(path, error=RecipeError), where=str(path))
