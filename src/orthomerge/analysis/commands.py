"""Command lines to suggest in a verdict, for a saved model and data on disk."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from orthomerge.models.experts import Experts
from orthomerge.models.opening import Expert, Opening


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

    `refit` merges again and so names base and experts; it is left out unless their paths say how to open them.
    """
    model, out = shlex.quote(folder), shlex.quote(folder.rstrip("/"))
    inputs = _options("--data", data)
    paths = ([f"--base {shlex.quote(base)}"] if base is not None else []) + _options("--expert", moved or {})
    sources = " ".join((*inputs, *paths))
    commands = {
        "align": f"orthomerge align {model} --aligner {aligner} {sources} --out {out}-aligned",
        "probe": f"orthomerge evaluate {model} {sources} --protocol current --protocol probe",
    }
    opening, plain = experts.opening, {task: Expert(experts.opening.experts[task].path) for task in data}
    if opening.base is not None and not experts.live and opening == Opening({**opening.experts, **plain}, opening.base):
        named = [shlex.quote(f"{task}={expert.path}") for task, expert in plain.items()]
        arguments = " ".join((*named, f"--base {shlex.quote(opening.base)}", "--method realign", *inputs))
        commands["refit"] = f"orthomerge merge {arguments} --out {out}-realigned"
    return commands


def _options(flag: str, values: Mapping[str, str]) -> list[str]:
    return [f"{flag} {shlex.quote(f'{name}={value}')}" for name, value in values.items()]
