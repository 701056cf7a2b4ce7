"""What run.json says: how a run was made, on what machine, what it cost; stages that were found count as they did."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from orthomerge.core.version import VERSION
from orthomerge.models.writing import plain
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
    return {"orthomerge": VERSION, "python": platform.python_version(), **dict(_installed(_PACKAGES))}


def _installed(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def recipe_text(recipe: Recipe) -> str:
    """A recipe made in Python as the YAML that it could have been; options at their defaults are left out."""
    usual = Recipe(experts={"task": "path"})
    own = {name: value for name, value in vars(recipe).items() if value != getattr(usual, name)}
    found: str = yaml.safe_dump(_told({"experts": recipe.experts, **own}), sort_keys=False, allow_unicode=True)
    return found


def _told(value: Any) -> Any:
    """As plain data; what is in memory only is told as such."""
    if isinstance(value, Mapping):
        return {str(key): _told(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_told(item) for item in value]
    if isinstance(value, str | int | float | bool | None):
        return plain(value)
    if type(value).__module__ in ("orthomerge.runs.recipe", "orthomerge.runs.blocks", "orthomerge.models.opening"):
        return {name: _told(getattr(value, name)) for name in asdict(value) if getattr(value, name) is not None}
    return f"a {type(value).__name__} in memory"
