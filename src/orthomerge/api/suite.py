"""Score and diagnose merges of the experts of a named suite."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orthomerge.analysis.detail import Detail
from orthomerge.analysis.diagnosis import Diagnosis
from orthomerge.api.diagnose import diagnose
from orthomerge.api.evaluate import evaluate
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import find_row
from orthomerge.evaluation.evaluate import Subject, with_unique_names
from orthomerge.evaluation.scores import Scores
from orthomerge.merging.methods import make_method
from orthomerge.models.model import Model
from orthomerge.models.saved import resolve
from orthomerge.runs.recipe import parse_value
from orthomerge.suites.table import SUITES, build_suite

_REFERENCES = ("base", "expert", "mtl")


def evaluate_suite(
    name: str,
    methods: Sequence[str],
    *,
    place: Mapping[str, Any],
    device: str = "auto",
    batch: int = 64,
    against: str | None = None,
    **options: Any,
) -> Scores:
    """Score merges of a suite's experts beside its references.

    `methods`: names, or "ties: density: 0.3". `place`: arguments of `build_suite`; `options`: of `evaluate`.
    """
    merges = [_method(name, text) for text in methods]
    subjects = with_unique_names([Subject(method, {}, parameters) for method, parameters in merges])
    names = [*_REFERENCES, *(subject.name for subject in subjects)]
    if against is not None and against not in names:
        raise RecipeError(f"--against {against}: no model has this name; {nearest(against, names)}")
    suite = build_suite(name, device=device, **place)
    merged = [dict.fromkeys(suite.tasks, suite.merged(method, parameters)) for method, parameters in merges]
    scored = [replace(subject, models=models) for subject, models in zip(subjects, merged, strict=True)]
    return evaluate(
        [*suite.references().values(), *scored],
        suite.tasks,
        experts=suite.experts,
        against=against,
        suite=name,
        encoding=suite.encoding(device, batch=batch),
        **options,
    )


def diagnose_suite(
    name: str,
    model: Model | str | Path | None,
    *,
    place: Mapping[str, Any],
    method: str = "task_arithmetic",
    device: str = "auto",
    batch: int = 64,
    detail: Detail,
    **options: Any,
) -> Diagnosis:
    """Diagnose a suite's own merge by `method`, or a `model` whose experts are the suite's.

    `place`: arguments of `build_suite`; `options`: of `diagnose`.
    """
    chosen, parameters = _method(name, method)
    suite = build_suite(name, device=device, **place)
    value = suite.merged(chosen, parameters) if model is None else resolve(model)[0]
    commands = {}
    if model is None:
        folder = f" --folder {shlex.quote(str(place['folder']))}" if place.get("folder") else ""
        call = f"orthomerge evaluate --suite {name}{folder} --method {shlex.quote(method)}"
        commands = {"score": f"{call} --aligner {detail.aligner}", "probe": f"{call} --protocol probe"}
    how: dict[str, Any] = {"detail": detail, "commands": commands, "encoding": suite.encoding(device, batch=batch)}
    return diagnose(value, suite.tasks, experts=suite.experts, **how, **options)


def _method(suite: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse "ties: density: 0.3" into a method and its options, and check both."""
    name, _, options = text.partition(":")
    parameters = parse_value(f"{{{options}}}") if options else {}
    make_method(name, parameters, tasks=find_row(SUITES, suite, what="suite").tasks)
    return name, parameters
