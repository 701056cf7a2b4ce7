"""Merge fine-tuned classifiers into one model, heads included.

Names are imported when first used, so that `import orthomerge` and `orthomerge --help` are instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.api.align import align
    from orthomerge.api.analogy import analogy
    from orthomerge.api.diagnose import diagnose
    from orthomerge.api.evaluate import evaluate
    from orthomerge.api.export import export
    from orthomerge.api.load import load
    from orthomerge.api.merge import merge
    from orthomerge.api.negate import negate
    from orthomerge.api.open import open  # noqa: A004 - the verb of the library, used as om.open
    from orthomerge.data.reading import read_task as read_data
    from orthomerge.data.task import Task
    from orthomerge.errors import OrthomergeError
    from orthomerge.evaluation.scores import Scores
    from orthomerge.merging.vectors import TaskVector
    from orthomerge.models.experts import Experts
    from orthomerge.models.kinds import Prediction
    from orthomerge.models.model import Model
    from orthomerge.recipe import Recipe, read_recipe
    from orthomerge.running.line import run
    from orthomerge.running.sweeping.sweep import sweep
    from orthomerge.version import VERSION as __version__  # noqa: N811 - the name that Python gives it

_HOMES = {
    "Diagnosis": "analysis.diagnosis",
    "Experts": "models.experts",
    "Model": "models.model",
    "OrthomergeError": "errors",
    "Prediction": "models.kinds",
    "Recipe": "recipe",
    "Scores": "evaluation.scores",
    "Task": "data.task",
    "TaskVector": "merging.vectors",
    "align": "api.align",
    "analogy": "api.analogy",
    "diagnose": "api.diagnose",
    "evaluate": "api.evaluate",
    "export": "api.export",
    "load": "api.load",
    "merge": "api.merge",
    "negate": "api.negate",
    "open": "api.open",
    "read_data": "data.reading:read_task",
    "read_recipe": "recipe",
    "run": "running.line",
    "sweep": "running.sweeping.sweep",
    "__version__": "version:VERSION",
}

__all__ = [
    "Diagnosis",
    "Experts",
    "Model",
    "OrthomergeError",
    "Prediction",
    "Recipe",
    "Scores",
    "Task",
    "TaskVector",
    "__version__",
    "align",
    "analogy",
    "diagnose",
    "evaluate",
    "export",
    "load",
    "merge",
    "negate",
    "open",
    "read_data",
    "read_recipe",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orthomerge' has no attribute {name!r}")
    home, _, own = _HOMES[name].partition(":")
    return getattr(import_module(f"orthomerge.{home}"), own or name)


def __dir__() -> list[str]:
    return sorted(__all__)
