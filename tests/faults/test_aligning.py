"""Aligners of others that fail or give heads that cannot be saved: an error, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orthomerge.alignment.align import align
from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.models.encoding import Encoding
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head, Linear


def steep(head: Head, features: torch.Tensor) -> Head:
    """Long weights at right angles to the few inputs there are: float32 has not enough digits for that."""
    unseen = torch.linalg.svd(features.double()).Vh[-1]
    return replace(head, output=Linear(head.output.weight.double() + 1e5 * unseen, head.output.bias))


def infinite(head: Head, features: torch.Tensor) -> Head:
    return replace(head, output=Linear(head.output.weight.double() * 1e300, head.output.bias))


def wider(head: Head, features: torch.Tensor) -> Head:
    return Head(Linear(torch.ones(2, 5), torch.ones(2)), head.labels)


def renamed(head: Head, features: torch.Tensor) -> Head:
    return replace(head, labels=("a", "b"))


def no_head(head: Head, features: torch.Tensor) -> Any:
    return type("Odd", (), {"labels": ("two-0", "two-1")})()


def failing(head: Head, features: torch.Tensor) -> Head:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (steep, NumericalError, "the logits of 'two' change by .* of the largest when they are rounded to float32"),
        (infinite, NumericalError, "the logits of 'two' change by nan of the largest"),
        (wider, IncompatibleError, "the aligned head of 'two' must have the shapes and dtypes"),
        (renamed, IncompatibleError, "has other labels than the head"),
        (no_head, RecipeError, "is a Odd, which cannot be saved; an aligner must return"),
        (failing, ZeroDivisionError, "by zero"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing(
    make: Callable[[Head, torch.Tensor], Any],
    error: type[Exception],
    match: str,
    merged_berts: Path,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fit(self: Ridge, pair: FeaturePair, head: Head) -> Alignment:
        return Alignment(make(head, pair.merged.values))

    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Ridge, "fit", fit)
    data: Any = {"two": tables / "two.csv"}
    with pytest.raises(error, match=match):
        align(merged_berts, data, aligner="ridge", encoding=Encoding(device="cpu"), limit=8).save(tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
