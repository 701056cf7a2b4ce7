"""Loading what was merged from linearised experts as the linear model that it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.merged import Merged, load
from orthomerge.tuning.linearised import deltas_between, linearised_features
from orthomerge.tuning.model import load_base

if TYPE_CHECKING:
    import torch

__all__ = ["load_linearised"]


def load_linearised(path: str | Path, *, base: str | Path) -> Merged:
    """An output folder whose experts are `linearised` or `tau_jp`, with the features of f_lin and the experts' heads.

    `base`: folder of the base that the experts were fine-tuned from; around any other, f_lin is another function.
    One expert alone is loaded from its own merge (`average`), which leaves it as it is. The result can go wherever a
    `Merged` can: `logits`, `extract`, `Bench.encode`.
    """
    merged = load(path)
    start = load_base(Path(base), merged.family, merged.pooling, eager=True)
    deltas = deltas_between(start, merged.encoder)
    tangent = linearised_features(merged.family, merged.pooling, start, deltas)
    # Features are read inside the tangent: J is that of the pooling too.
    family = replace(merged.family, forward=_as_it_is, poolings={merged.pooling: _as_they_come})
    return replace(merged, encoder=tangent, family=family)


def _as_it_is(tangent: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> Any:
    return tangent(batch)


def _as_they_come(features: torch.Tensor, batch: Mapping[str, torch.Tensor], config: Any) -> torch.Tensor:
    return features
