"""Accuracy of every task at a glance: expert, merge, and the merge read in other ways."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from orthomerge.analysis.families import mean_interval
from orthomerge.analysis.figures import Bars, Series


def accuracy_figure(found: Mapping[str, Mapping[str, NDArray[np.bool_]]]) -> Bars:
    """From hits by reading and task, all on the same tasks."""
    tasks = tuple(next(iter(found.values())))
    series = []
    for name, by_task in found.items():
        rows = [mean_interval([hits]) for hits in by_task.values()]
        rows.append(mean_interval(list(by_task.values())))
        values, low, high = (tuple(column) for column in zip(*rows, strict=True))
        series.append(Series(name, values, low, high))
    return Bars(
        "accuracy",
        "Accuracy by task",
        "On test inputs, with 95 % intervals. Aligned: heads fitted to unlabelled inputs of another split; a probe saw "
        "their labels too.",
        (*tasks, "mean"),
        "accuracy, %",
        tuple(series),
    )
