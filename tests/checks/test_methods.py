"""Every row of the method table keeps the contracts, and the contracts notice when a method does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class Mean:
    """A sound method; those below break one contract each."""

    scale: float = 1.0
    seed: int = 0

    scope: ClassVar[Scope] = "element"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        total = sum(delta * (1 + 0.1 * self.seed) for delta in deltas)
        return self.scale / len(deltas) * torch.as_tensor(total)


class Seedless(Mean):
    """The seed changes nothing."""

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return self.scale * deltas.sum(0) / len(deltas)


class Writing(Mean):
    """Writes into the deltas."""

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return super().merge(base, deltas.mul_(1.5), site=site).div_(1.5)


class Blockwise(Mean):
    """Depends on the size of the blocks."""

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return super().merge(base, deltas, site=site) * (1.0 if deltas[0].numel() > 8 or len(deltas) == 1 else 0.9)


class Unsteady(Mean):
    """Gives something else each time."""

    calls: ClassVar[Iterator[int]] = count(1)

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return super().merge(base, deltas, site=site) * (1 + 1e-7 * next(self.calls) * (len(deltas) > 1))


class Normalised(Mean):
    """Divides by the spread of the experts, which identical experts do not have."""

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        result = super().merge(base, deltas, site=site)
        spread = (deltas - deltas[:1]).abs().amax(0)
        return result if len(deltas) == 1 or not deltas.any() else result / spread


class Shifted(Mean):
    """Changes the base where no expert has."""

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return super().merge(base, deltas, site=site) + 1e-3 * (len(deltas) > 1)


class Wide(Mean):
    """Answers in float64."""

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        return super().merge(base, deltas, site=site).double()


class Narrow(Mean):
    """Answers with one number per row where the base has a matrix, which would broadcast."""

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
        result = super().merge(base, deltas, site=site)
        return result.mean(-1, keepdim=True) if base.ndim == 2 and len(deltas) == 3 else result


def row_of(maker: Callable[..., Any], **more: Any) -> Row:
    row = Row("mine", f"{__name__}:{maker.__name__}", "Mine", "Me 2026", faithful={"scale": 1.0})
    return replace(row, **more)


def test_a_row_of_somebody_else() -> None:
    check_method(row_of(Mean))
    check_method(row_of(Mean, faithful="it is not asked to"), {"scale": 0.5})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (row_of(Mean, title=""), "must not be empty"),
        (row_of(Mean, faithful=None), "'faithful' must be options"),
        (row_of(Mean, faithful={"scale": 0.5}), r"with options \{'scale': 0.5\}: a single expert must come back"),
        (FITTED["moma"], "only methods without inputs"),
        (row_of(Seedless), "another seed must change the result"),
        (row_of(Writing), "must not write into its inputs"),
        (row_of(Blockwise), "blocks of 1 elements must give the same bits"),
        (row_of(Unsteady), "must give the same bits"),
        (row_of(Normalised), "identical experts must give finite weights"),
        (row_of(Shifted), "experts that are the base must give the base"),
        (row_of(Wide), "must be float32, got torch.float64"),
        (row_of(Narrow), r"'embeddings.word.weight' must have shape \(23, 8\), got \(23, 1\)"),
    ],
    ids=lambda value: value.maker.rpartition(":")[2] if isinstance(value, Row) else "",
)
def test_broken_contracts_are_noticed(row: Row, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_method(row)
