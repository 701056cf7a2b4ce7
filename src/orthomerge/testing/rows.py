"""Checks that the contracts of all tables share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getdoc
from typing import Any

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import TableRow, instance_of, maker_of
from orthomerge.models.heads import Head


def check_row(row: TableRow, require: Callable[[object, str], None], *, what: str) -> None:
    """Require a name, title, reference and docstring, and that an unknown option is refused by name."""
    require(row.name and row.title and row.reference, "name, title and reference must not be empty")
    require(getdoc(maker_of(row)), "its class or function must have a docstring")
    try:
        instance_of(row, {"scael": 1.0}, what=what)
    except RecipeError as error:
        require("unknown option 'scael'" in str(error), f"an unknown option must be named, got: {error}")
    else:
        require(False, "an unknown option must be refused")


def tensors_of(classifier: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a classifier: a head, or one with extra parameters."""
    if isinstance(classifier, Head):
        return classifier.tensors()
    return {**classifier.head.tensors(), **classifier.extra_tensors()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two mappings hold the same tensors bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
