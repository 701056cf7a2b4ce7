"""Output folders as what is scored."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orthomerge.evaluation.evaluate import Subject

__all__ = ["output_subject"]


def output_subject(folder: Path, tasks: Iterable[str]) -> Subject:
    """An output folder as what is scored: its method's name, with its aligner's where it has one."""
    from orthomerge.evaluation.evaluate import Subject
    from orthomerge.manifest import access_class, read_manifest

    manifest = read_manifest(folder)
    method, aligned = manifest["method"], manifest.get("alignment")
    name = f"{method['name']} + {aligned['aligner']}" if aligned else method["name"]
    return Subject(name, dict.fromkeys(tasks, folder), method["parameters"], access=access_class(manifest))
