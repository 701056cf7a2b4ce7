"""Command lines that a verdict suggests for a saved model and data on disk."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields

from orthomerge.models.experts import Experts
from orthomerge.models.opening import Opening

_OPTIONS = tuple(option.name for option in fields(Opening) if option.name not in ("experts", "base"))


def suggested_commands(
    folder: str,
    data: Mapping[str, str],
    experts: Experts,
    *,
    aligner: str = "auto",
    base: str | None = None,
    moved: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Make command lines by kind, see `Case`. `base` and `moved`: paths of a base and experts that were moved.

    `refit` merges anew and so names all of them; it is left out if a command line cannot say how they are opened.
    """
    where, out = shlex.quote(folder), shlex.quote(folder.rstrip("/"))
    inputs = _options("--data", data)
    places = ([f"--base {shlex.quote(base)}"] if base is not None else []) + _options("--expert", moved or {})
    sources = " ".join((*inputs, *places))
    commands = {
        "align": f"orthomerge align {where} --aligner {aligner} {sources} --out {out}-aligned",
        "probe": f"orthomerge evaluate {where} {sources} --protocol current --protocol probe",
    }
    opening = _opening(experts, tuple(data))
    if opening is not None:
        words = " ".join((*opening, "--method realign", *inputs))
        commands["refit"] = f"orthomerge merge {words} --out {out}-realigned"
    return commands


def _opening(experts: Experts, tasks: tuple[str, ...]) -> list[str] | None:
    """Arguments for base and experts; None if an expert is in memory, or described by more than its path."""
    opening = experts.opening
    chosen = {task: opening.experts[task] for task in tasks}
    described = any(expert.prefix or expert.labels or expert.head for expert in chosen.values())
    if opening.base is None or experts.live or described:
        return None
    usual = Opening(opening.experts)
    options = {name: getattr(opening, name) for name in _OPTIONS if getattr(opening, name) != getattr(usual, name)}
    settings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    paths = {task: expert.path for task, expert in chosen.items()}
    named = [shlex.quote(f"{task}={path}") for task, path in paths.items()]
    return [*named, f"--base {shlex.quote(opening.base)}", *_options("--set", settings)]


def _options(flag: str, values: Mapping[str, str]) -> list[str]:
    return [f"{flag} {shlex.quote(f'{name}={value}')}" for name, value in values.items()]
