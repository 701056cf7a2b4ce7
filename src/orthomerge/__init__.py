"""Merge fine-tuned classifiers into one model, heads included.

Names are imported when first used, so that `import orthomerge` and `orthomerge --help` are instant.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthomerge.alignment.align import align
    from orthomerge.analysis.diagnosis import Diagnosis
    from orthomerge.api.analogy import analogy
    from orthomerge.api.diagnose import diagnose
    from orthomerge.api.evaluate import evaluate
    from orthomerge.api.export import export
    from orthomerge.api.finetune import finetune
    from orthomerge.api.inspect import inspect
    from orthomerge.api.list import list  # noqa: A004 - as open
    from orthomerge.api.load import load
    from orthomerge.api.merge import merge
    from orthomerge.api.negate import negate
    from orthomerge.api.open import open  # noqa: A004 - the verb of the library, used as om.open
    from orthomerge.api.push import push
    from orthomerge.core.errors import OrthomergeError
    from orthomerge.core.version import VERSION as __version__  # noqa: N811 - the name that Python gives it
    from orthomerge.data.reading import read_task as read_data
    from orthomerge.data.task import Task
    from orthomerge.evaluation.scores import Scores
    from orthomerge.merging.vectors import TaskVector
    from orthomerge.models.experts import Experts
    from orthomerge.models.heads import Prediction
    from orthomerge.models.model import Model
    from orthomerge.reporting.report import report
    from orthomerge.runs.recipe import Recipe, read_recipe
    from orthomerge.runs.run import run

_HOMES = {
    "Diagnosis": "analysis.diagnosis",
    "Experts": "models.experts",
    "Model": "models.model",
    "OrthomergeError": "core.errors",
    "Prediction": "models.heads",
    "Recipe": "runs.recipe",
    "Scores": "evaluation.scores",
    "Task": "data.task",
    "TaskVector": "merging.vectors",
    "align": "alignment.align",
    "analogy": "api.analogy",
    "diagnose": "api.diagnose",
    "evaluate": "api.evaluate",
    "export": "api.export",
    "finetune": "api.finetune",
    "inspect": "api.inspect",
    "list": "api.list",
    "load": "api.load",
    "merge": "api.merge",
    "negate": "api.negate",
    "open": "api.open",
    "push": "api.push",
    "read_data": "data.reading:read_task",
    "read_recipe": "runs.recipe",
    "report": "reporting.report",
    "run": "runs.run",
    "__version__": "core.version:VERSION",
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
    "finetune",
    "inspect",
    "list",
    "load",
    "merge",
    "negate",
    "open",
    "push",
    "read_data",
    "read_recipe",
    "report",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orthomerge' has no attribute {name!r}")
    home, _, own = _HOMES[name].partition(":")
    return getattr(import_module(f"orthomerge.{home}"), own or name)


def __dir__() -> Sequence[str]:
    return sorted(__all__)
