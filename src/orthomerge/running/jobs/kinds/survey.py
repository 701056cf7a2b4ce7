"""The look that a survey method takes at everything before it merges a tensor: thresholds, norms, angles.

What it found is kept where it is plain numbers. Where it is not (KnOTS keeps bases), every shard takes the look again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orthomerge.checkpoints.publish import write_json
from orthomerge.errors import CheckpointError
from orthomerge.running.jobs.context import Context

if TYPE_CHECKING:
    from orthomerge.merging.kinds import SurveyMethod, TensorMethod

__all__ = ["FILE", "read_survey", "survey", "told"]

FILE = "survey.json"


def survey(context: Context, folder: Path) -> None:
    """Take the look and keep what was found."""
    from orthomerge.pipeline import prepared, task_vectors

    job = context.merge_job()
    write_json(folder / FILE, told(cast("SurveyMethod", job.method), prepared(job, task_vectors(job))))


def told(method: SurveyMethod, found: TensorMethod) -> dict[str, Any] | None:
    """The method that a survey gave as plain data; None where it is more than that."""
    name = type(found).__name__
    if not is_dataclass(type(found)) or getattr(sys.modules[type(method).__module__], name, None) is not type(found):
        return None
    values = {field.name: getattr(found, field.name) for field in fields(cast("Any", found))}
    own = [name for name, value in values.items() if value is method]
    plain = {name: value for name, value in values.items() if name not in own}
    return {"class": name, "own": own, "values": plain} if all(map(_is_plain, plain.values())) else None


def read_survey(folder: Path, method: SurveyMethod, again: Callable[[], TensorMethod]) -> TensorMethod:
    """What the survey found, or the survey `again` where that could not be kept."""
    path = folder / FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    if document is None:
        return again()
    made = getattr(sys.modules[type(method).__module__], document["class"], None)
    if not isinstance(made, type) or not is_dataclass(made):
        raise CheckpointError(f"{path} is not of the method {type(method).__name__}; remove it, and run again")
    values = {name: _tuples(value) for name, value in document["values"].items()}
    return cast("TensorMethod", made(**values, **dict.fromkeys(document["own"], method)))


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _tuples(value: Any) -> Any:
    """JSON has no tuples, methods have no lists."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
