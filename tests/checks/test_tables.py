"""Every row of the tables keeps its contracts, and the contracts notice when a row does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import pytest
import torch

from orthomerge.alignment.aligners import ALIGNERS, Alignment
from orthomerge.alignment.aligners import Row as AlignerRow
from orthomerge.alignment.problem import Problem
from orthomerge.evaluation.protocols import PROTOCOLS, Current, Evidence, Need
from orthomerge.evaluation.protocols import Row as ProtocolRow
from orthomerge.fitting.setting import Fitted, Setting
from orthomerge.merging.kinds import Scope, Site
from orthomerge.merging.methods import FITTED, METHODS, Row, build_method
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head
from orthomerge.testing import check_aligner, check_fitted_method, check_method, check_protocol
from orthomerge.testing.settings import make_setting

TABLES: list[tuple[Callable[..., None], Any]] = [
    (check_method, METHODS),
    (check_aligner, ALIGNERS),
    (check_protocol, PROTOCOLS),
    (check_fitted_method, FITTED),
]
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
CASES = [
    *(
        (check, row, {"epochs": 2} if row is PROTOCOLS["aligned-c"] else {})
        for check, rows in TABLES
        for row in rows.values()
    ),
    *((check_method, METHODS[name], options) for name, options in VARIANTS),
]


@pytest.mark.parametrize(
    ("check", "row", "options"), CASES, ids=[f"{case[0].__name__}-{case[1].name}" for case in CASES]
)
def test_contracts_of_every_row(check: Callable[..., None], row: Any, options: dict[str, Any]) -> None:
    check(row, options)


def test_rows_have_the_names_of_the_tables() -> None:
    assert all(row.name == name for _, rows in TABLES for name, row in rows.items())


@pytest.mark.parametrize("name", FITTED)
def test_another_seed_is_another_fit(name: str) -> None:
    """It draws the inputs that are looked at, or those of each step."""
    setting, row = make_setting(inputs=12), FITTED[name]
    one, other = (
        build_method(row, row.quick, tasks=setting.tasks).fit(replace(setting, seed=seed)).weights for seed in (0, 1)
    )
    assert not torch.equal(one, other)


# Rows of somebody else, which are sound or break a contract

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


def method_row(breaks: str = "", **more: Any) -> Row:
    quick = {"breaks": breaks} if breaks else {}
    row = Row("mine", f"{__name__}:Mean", "Mine", "Me 2026", faithful={"scale": 1.0}, quick=quick)
    return replace(row, **more)


@dataclass(frozen=True)
class Same:
    """A sound aligner, or one that breaks a contract."""

    breaks: str = ""

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        if self.breaks != "refusals":
            Problem.of(pair, head)
        return Alignment(self.changed(pair, head))

    def changed(self, pair: FeaturePair, head: Head) -> Head:
        tensors = head.tensors()
        match self.breaks:
            case "bits":
                return head.with_tensors({key: tensor + next(CALLS) for key, tensor in tensors.items()})
            case "unchanged experts":
                return head.with_tensors({key: 2 * tensor for key, tensor in tensors.items()})
            case "dtype":
                return head.to(torch.float64)
            case "labels":
                return replace(head, labels=tuple(f"{label}?" for label in head.labels))
            case "one input":
                spread = (pair.merged.values - pair.merged.values.mean(0)).norm()
                return head.with_tensors({key: tensor * spread / spread for key, tensor in tensors.items()})
            case "inputs":
                pair.merged.values.mul_(0.5)
        return head


def aligner_row(breaks: str = "", **more: Any) -> AlignerRow:
    row = AlignerRow("mine", f"{__name__}:Same", "Mine", "Me 2026", careful=True, quick={"breaks": breaks})
    return replace(row, **more)


@dataclass(frozen=True)
class Mine(Current):
    """A sound protocol."""

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "expert"})

    def build(self, evidence: Evidence) -> Head:
        evidence.pair()
        return evidence.head


class Careless(Mine):
    def build(self, evidence: Evidence) -> Head:
        return evidence.head


class Greedy(Mine):
    needs: ClassVar[Any] = frozenset({"test labels"})


class Blind(Mine):
    def build(self, evidence: Evidence) -> Head:
        super().build(evidence)
        return evidence.head.with_tensors({key: each * float("nan") for key, each in evidence.head.tensors().items()})


def protocol_row(maker: type) -> ProtocolRow:
    return ProtocolRow("mine", f"{__name__}:{maker.__name__}", "Mine", "Me 2026")


@dataclass(frozen=True)
class Average:
    """A sound fitted method, or one that breaks a contract."""

    breaks: str = ""

    def fit(self, setting: Setting) -> Fitted:
        return Fitted(self.weights(setting), {} if self.breaks == "heads" else setting.heads)

    def weights(self, setting: Setting) -> torch.Tensor:
        weights = setting.mean_expert()
        match self.breaks:
            case "bits":
                return weights + next(CALLS)
            case "shape":
                return weights[1:]
            case "inputs":
                return setting.base.add_(1)
            case "unchanged experts":
                return torch.addcdiv(setting.base, weights - setting.base, (weights - setting.base).norm())
        return weights


def fitted_row(breaks: str = "") -> Row:
    return Row("mine", f"{__name__}:Average", "Mine", "Me 2026", fitted=True, quick={"breaks": breaks})


def test_rows_of_somebody_else() -> None:
    check_method(method_row())
    check_method(method_row(faithful="it is not asked to"), {"scale": 0.5})
    check_aligner(aligner_row())
    check_aligner(aligner_row("unchanged experts", careful=False))
    check_protocol(protocol_row(Mine))
    check_fitted_method(fitted_row())


@pytest.mark.parametrize(
    ("check", "row", "message"),
    [
        (check_method, method_row(title=""), "must not be empty"),
        (check_method, method_row(faithful=None), "'faithful' must be options"),
        (
            check_method,
            method_row(faithful={"scale": 0.5}),
            r"with options \{'scale': 0.5\}: a single expert must come back",
        ),
        (check_method, FITTED["moma"], "only methods without inputs"),
        (check_method, method_row("seed"), "another seed must change the result"),
        (check_method, method_row("inputs"), "must not write into its inputs"),
        (check_method, method_row("blocks"), "blocks of 1 elements must give the same bits"),
        (check_method, method_row("bits"), "must give the same bits"),
        (check_method, method_row("identical experts"), "identical experts must give finite weights"),
        (check_method, method_row("unchanged experts"), "experts that are the base must give the base"),
        (check_method, method_row("dtype"), "must be float32, got torch.float64"),
        (check_method, method_row("shape"), r"'embeddings.word.weight' must have shape \(23, 8\), got \(23, 1\)"),
        (check_aligner, aligner_row(title=""), "must not be empty"),
        (check_aligner, aligner_row(extra=True), "'extra' is for classifiers"),
        (check_aligner, aligner_row("refusals"), "no inputs must be refused"),
        (check_aligner, aligner_row("bits", careful=False), "the same inputs must give the same bits"),
        (check_aligner, aligner_row("unchanged experts"), "left unchanged must stay"),
        (check_aligner, aligner_row("dtype"), "must keep its shapes, dtypes"),
        (check_aligner, aligner_row("labels"), "the labels must be those of the head"),
        (check_aligner, aligner_row("one input"), "must be finite with 1 inputs"),
        (check_aligner, aligner_row("inputs"), "may be written into"),
        (check_protocol, protocol_row(Careless), "without support inputs must be refused"),
        (check_protocol, protocol_row(Greedy), "'needs' must be among"),
        (check_protocol, protocol_row(Blind), "be finite"),
        (check_fitted_method, METHODS["average"], "only methods that need inputs"),
        (check_fitted_method, fitted_row("bits"), "must give the same bits"),
        (check_fitted_method, fitted_row("shape"), "must have the shape of the setting's base"),
        (check_fitted_method, fitted_row("inputs"), "must not be written into"),
        (check_fitted_method, fitted_row("unchanged experts"), "weights must be finite"),
        (check_fitted_method, fitted_row("heads"), "one classifier per task"),
    ],
)
def test_broken_contracts_are_noticed(check: Callable[..., None], row: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(row)
