"""Merge fine-tuned classifiers into one model, heads included.

Names are imported when first used, so that `import orthomerge` and `orthomerge --help` are instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthomerge.aligning import align
    from orthomerge.errors import OrthomergeError
    from orthomerge.heads import Head
    from orthomerge.merged import Merged, export, load, verify
    from orthomerge.merging.vectors import TaskVector, TaskVectors
    from orthomerge.pipeline import merge, task_vectors
    from orthomerge.planning import Plan, make_plan
    from orthomerge.recipe import Recipe, read_recipe
    from orthomerge.running.line import run
    from orthomerge.running.sweeping.sweep import sweep

__all__ = [
    "Head",
    "Merged",
    "OrthomergeError",
    "Plan",
    "Recipe",
    "TaskVector",
    "TaskVectors",
    "align",
    "export",
    "load",
    "make_plan",
    "merge",
    "read_recipe",
    "run",
    "sweep",
    "task_vectors",
    "verify",
]

_HOMES = {
    "Head": "heads",
    "Merged": "merged",
    "OrthomergeError": "errors",
    "Plan": "planning",
    "Recipe": "recipe",
    "TaskVector": "merging.vectors",
    "TaskVectors": "merging.vectors",
    "align": "aligning",
    "export": "merged",
    "load": "merged",
    "make_plan": "planning",
    "merge": "pipeline",
    "read_recipe": "recipe",
    "run": "running.line",
    "sweep": "running.sweeping.sweep",
    "task_vectors": "pipeline",
    "verify": "merged",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orthomerge' has no attribute {name!r}")
    return getattr(import_module(f"orthomerge.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
