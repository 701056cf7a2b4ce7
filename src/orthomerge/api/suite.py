"""Score and diagnose merges of the experts of a named suite."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.analysis.detail import Detail
from orthomerge.api.diagnose import diagnose
from orthomerge.api.evaluate import evaluate
from orthomerge.core.errors import RecipeError, nearest
from orthomerge.evaluation.evaluate import Subject, with_unique_names
from orthomerge.merging.methods import make_method
from orthomerge.models.saved import resolve
from orthomerge.runs.recipe import parse_value
from orthomerge.suites.table import build_suite, find_suite

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.evaluation.scores import Scores
    from orthomerge.models.model import Model

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
    merged = with_unique_names([Subject(method, {}, parameters) for method, parameters in merges])
    names = [*_REFERENCES, *(subject.name for subject in merged)]
    if against is not None and against not in names:
        raise RecipeError(f"--against {against}: no model has this name; {nearest(against, names)}")
    suite = build_suite(name, device=device, **place)
    subjects = [
        replace(Subject.of(suite.merged(method, parameters), suite.tasks), parameters=parameters)
        for method, parameters in merges
    ]
    return evaluate(
        with_unique_names([*suite.references().values(), *subjects]),
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
    detail: Detail | None = None,
    **options: Any,
) -> Diagnosis:
    """Diagnose a suite's own merge by `method`, or a `model` whose experts are the suite's.

    `place`: arguments of `build_suite`; `options`: of `diagnose`.
    """
    detail = detail or Detail()
    chosen, parameters = _method(name, method)
    suite = build_suite(name, device=device, **place)
    value = suite.merged(chosen, parameters) if model is None else resolve(model)[0]
    text, folder = method if model is None else _method_text(value), place.get("folder")
    call = f"orthomerge evaluate --suite {name}" + (f" --folder {shlex.quote(str(folder))}" if folder else "")
    commands = {}
    if text is not None:
        commands["score"] = f"{call} --method {shlex.quote(text)} --aligner {detail.aligner}"
        commands["probe"] = f"{call} --method {shlex.quote(text)} --protocol probe"
    how: dict[str, Any] = {"detail": detail, "commands": commands, "encoding": suite.encoding(device, batch=batch)}
    return diagnose(value, suite.tasks, experts=suite.experts, **how, **options)


def _method(suite: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse "ties: density: 0.3" into a method and its options, and check both."""
    name, _, options = text.partition(":")
    parameters = parse_value(f"{{{options}}}") if options else {}
    make_method(name, parameters, tasks=find_suite(suite).tasks)
    return name, parameters


def _method_text(model: Model) -> str | None:
    """Format the method of a model as for `evaluate --method`; None if that flag cannot express it."""
    facts = model.origin.facts
    if "fit" in facts or "alignment" in facts:
        return None
    options = ", ".join(f"{key}: {json.dumps(value)}" for key, value in facts["method"]["parameters"].items())
    name: str = facts["method"]["name"]
    return f"{name}:{options}" if options else name
