"""On what machine a run was made, with what versions, and from what recipe: for run.json."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orthomerge.core.version import VERSION
from orthomerge.models.writing import plain

if TYPE_CHECKING:
    from orthomerge.runs.recipe import Recipe

_PACKAGES = ("torch", "numpy", "transformers")


def peak_memory() -> int:
    """Bytes that this process had in memory at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine() -> str:
    """Processor, cores, memory, system and, if torch sees one, the GPU."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        names[0] if names else platform.machine(),
        f"{os.cpu_count()} cores",
        f"{memory:.0f} GiB",
        f"{platform.system()} {platform.release()}",
        *([torch.cuda.get_device_name()] if torch.cuda.is_available() else []),
    ]
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Of whatever can change a number."""
    installed = {"orthomerge": VERSION, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def recipe_text(recipe: Recipe) -> str:
    """A recipe made in Python as the YAML that it could have been; options at their defaults are left out."""
    usual = type(recipe)(experts={"task": "path"})
    own = {name: value for name, value in vars(recipe).items() if value != getattr(usual, name)}
    text: str = yaml.safe_dump(_plain({"experts": recipe.experts, **own}), sort_keys=False, allow_unicode=True)
    return text


def _plain(value: Any) -> Any:
    """As plain data; of what is in memory only, the type."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | bool | None):
        return plain(value)
    if is_dataclass(value) and type(value).__module__.startswith(("orthomerge.runs.", "orthomerge.models.opening")):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: _plain(part) for name, part in parts.items() if part is not None}
    return f"a {type(value).__name__} in memory"
