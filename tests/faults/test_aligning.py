"""Aligners of others that fail or give heads that cannot be saved: an error, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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


def moved(head: Head, change: torch.Tensor) -> Head:
    return replace(head, output=Linear(head.output.weight.double() + change, head.output.bias))


def unseen(features: torch.Tensor) -> torch.Tensor:
    """A direction at right angles to the few inputs there are."""
    vectors: torch.Tensor = torch.linalg.svd(features.double()).Vh
    return vectors[-1]


def failing(head: Head, features: torch.Tensor) -> Head:
    raise ZeroDivisionError("by zero")


OTHER = Head(Linear(torch.ones(2, 5), torch.ones(2)), ("two-0", "two-1"))
BAD: dict[str, tuple[Callable[[Head, torch.Tensor], Any], type[Exception], str]] = {
    # Long weights that no input shows: float32 has not enough digits for them.
    "steep": (lambda head, features: moved(head, 1e5 * unseen(features)), NumericalError,
              "the logits of 'two' change by .* of the largest when they are rounded to float32"),
    "infinite": (lambda head, features: moved(head, 1e300 * head.output.weight.double()), NumericalError,
                 "the logits of 'two' change by nan of the largest"),
    "wider": (lambda head, features: OTHER, IncompatibleError,
              "the aligned head of 'two' must have the shapes and dtypes"),
    "renamed": (lambda head, features: replace(head, labels=("a", "b")), IncompatibleError,
                "has other labels than the head"),
    "no head": (lambda head, features: SimpleNamespace(labels=head.labels), RecipeError,
                "is a SimpleNamespace, which cannot be saved; an aligner must return"),
    "failing": (failing, ZeroDivisionError, "by zero"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_saved_leaves_nothing(
    kind: str, merged_berts: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, error, match = BAD[kind]

    def fit(self: Ridge, pair: FeaturePair, head: Head) -> Alignment:
        return Alignment(make(head, pair.merged.values))

    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Ridge, "fit", fit)
    data: Any = {"two": tables / "two.csv"}
    with pytest.raises(error, match=match):
        align(merged_berts, data, aligner="ridge", encoding=Encoding(device="cpu"), limit=8).save(tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
