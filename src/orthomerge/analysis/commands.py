"""Command lines to suggest in a verdict, for a saved model and data on disk."""

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
    """Return command lines by kind, see `Case`. `base` and `moved`: new paths of a base and experts that were moved.

    `refit` merges again and so names all experts; it is left out if options cannot describe how to open them.
    """
    model, out = shlex.quote(folder), shlex.quote(folder.rstrip("/"))
    inputs = _options("--data", data)
    paths = ([f"--base {shlex.quote(base)}"] if base is not None else []) + _options("--expert", moved or {})
    sources = " ".join((*inputs, *paths))
    commands = {
        "align": f"orthomerge align {model} --aligner {aligner} {sources} --out {out}-aligned",
        "probe": f"orthomerge evaluate {model} {sources} --protocol current --protocol probe",
    }
    opening = _opening(experts, tuple(data))
    if opening is not None:
        arguments = " ".join((*opening, "--method realign", *inputs))
        commands["refit"] = f"orthomerge merge {arguments} --out {out}-realigned"
    return commands


def _opening(experts: Experts, tasks: tuple[str, ...]) -> list[str] | None:
    """Return arguments for base and experts; None if an expert is in memory or has options beside its path."""
    opening = experts.opening
    sources = {task: opening.experts[task] for task in tasks}
    has_options = any(expert.prefix or expert.labels or expert.head for expert in sources.values())
    if opening.base is None or experts.live or has_options:
        return None
    default = Opening(opening.experts)
    options = {name: getattr(opening, name) for name in _OPTIONS if getattr(opening, name) != getattr(default, name)}
    settings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    paths = {task: expert.path for task, expert in sources.items()}
    arguments = [shlex.quote(f"{task}={path}") for task, path in paths.items()]
    return [*arguments, f"--base {shlex.quote(opening.base)}", *_options("--set", settings)]


def _options(flag: str, values: Mapping[str, str]) -> list[str]:
    return [f"{flag} {shlex.quote(f'{name}={value}')}" for name, value in values.items()]
