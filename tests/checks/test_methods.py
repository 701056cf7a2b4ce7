"""Every row of the method table keeps the contracts, and the contracts notice when a method does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import pytest
import torch

from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.methods import FITTED, METHODS, Row
from orthomerge.testing import check_method

# Options beside the defaults under which the contracts hold too.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("average", {"weights": [1, 2, 3]}),
    ("ties", {"density": 1.0}),
    ("ties@mergekit", {"density": 0.4, "weights": [0.5, 0.2, 0.9]}),
    ("ties@peft", {"density": 0.3, "weights": [0.5, -0.2, 0.9]}),
    ("ties@fusionbench", {"merge": "mean"}),
    ("ties@fusionbench", {"merge": "max"}),
    ("dare", {"drop": 0.3, "scale": [0.1, 0.2, 0.3]}),
    ("dare@mergekit", {"density": 0.6, "normalize": True}),
    ("dare_ties@mergekit", {"density": 0.6, "weights": [0.5, 0.2, 0.9], "normalize": True}),
    ("breadcrumbs", {"density": 0.5, "gamma": 0.1, "scale": [0.1, 0.2, 0.3]}),
    ("slerp", {"t": 0.3}),
    ("consensus", {"threshold": [0.2, 0.4, 0.6]}),
    ("wudi", {"rest": "mean"}),
    ("knots", {"merger": "dare_ties@peft"}),
]


@pytest.mark.parametrize("name", METHODS)
def test_contracts_of_every_row(name: str) -> None:
    assert METHODS[name].name == name
    check_method(METHODS[name])


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_contracts_under_other_options(name: str, options: dict[str, Any]) -> None:
    check_method(METHODS[name], options)


CALLS = count(1)


@dataclass(frozen=True)
class Mean:
    """A sound method, or one that breaks a contract."""

    scale: float = 1.0
    seed: int = 0
    breaks: str = ""

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        several = len(deltas) > 1
        if self.breaks == "inputs":
            deltas.mul_(1.5)
        seed = 0 if self.breaks == "seed" else self.seed
        total = sum(delta * (1 + 0.1 * seed) for delta in deltas)
        result = self.scale / len(deltas) * torch.as_tensor(total)
        match self.breaks:
            case "blocks":
                return result * (0.9 if several and deltas[0].numel() <= 8 else 1.0)
            case "bits":
                return result * (1 + 1e-7 * next(CALLS) * several)
            case "identical experts" if several and deltas.any():
                return result / (deltas - deltas[:1]).abs().amax(0)
            case "unchanged experts":
                return result + 1e-3 * several
            case "dtype":
                return result.double()
            case "shape" if base.ndim == 2 and len(deltas) == 3:
                return result.mean(-1, keepdim=True)  # which would broadcast
        return result


def row_of(breaks: str = "", **more: Any) -> Row:
    quick = {"breaks": breaks} if breaks else {}
    row = Row("mine", f"{__name__}:Mean", "Mine", "Me 2026", faithful={"scale": 1.0}, quick=quick)
    return replace(row, **more)


def test_a_row_of_somebody_else() -> None:
    check_method(row_of())
    check_method(row_of(faithful="it is not asked to"), {"scale": 0.5})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (row_of(title=""), "must not be empty"),
        (row_of(faithful=None), "'faithful' must be options"),
        (row_of(faithful={"scale": 0.5}), r"with options \{'scale': 0.5\}: a single expert must come back"),
        (FITTED["moma"], "only methods without inputs"),
        (row_of("seed"), "another seed must change the result"),
        (row_of("inputs"), "must not write into its inputs"),
        (row_of("blocks"), "blocks of 1 elements must give the same bits"),
        (row_of("bits"), "must give the same bits"),
        (row_of("identical experts"), "identical experts must give finite weights"),
        (row_of("unchanged experts"), "experts that are the base must give the base"),
        (row_of("dtype"), "must be float32, got torch.float64"),
        (row_of("shape"), r"'embeddings.word.weight' must have shape \(23, 8\), got \(23, 1\)"),
    ],
)
def test_broken_contracts_are_noticed(row: Row, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_method(row)
