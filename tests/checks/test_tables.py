"""Every aligner, protocol and fitted method keeps the contracts, and the contracts notice when one does not."""

from __future__ import annotations

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
from orthomerge.merging.methods import FITTED, METHODS, Row, build_method
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head
from orthomerge.testing import check_aligner, check_fitted_method, check_protocol
from orthomerge.testing.settings import make_setting


@pytest.mark.parametrize("name", ALIGNERS)
def test_contracts_of_every_aligner(name: str) -> None:
    assert ALIGNERS[name].name == name
    check_aligner(ALIGNERS[name])


@pytest.mark.parametrize("name", PROTOCOLS)
def test_contracts_of_every_protocol(name: str) -> None:
    check_protocol(PROTOCOLS[name], {"epochs": 2} if name == "aligned-c" else {})


@pytest.mark.parametrize("name", FITTED)
def test_contracts_of_every_fitted_method(name: str) -> None:
    check_fitted_method(FITTED[name])


@pytest.mark.parametrize("name", FITTED)
def test_another_seed_is_another_fit(name: str) -> None:
    """It draws the inputs that are looked at, or those of each step."""
    setting, row = make_setting(inputs=12), FITTED[name]
    one, other = (
        build_method(row, row.quick, tasks=setting.tasks).fit(replace(setting, seed=seed)).weights for seed in (0, 1)
    )
    assert not torch.equal(one, other)


CALLS = count(1)


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (aligner_row(title=""), "must not be empty"),
        (aligner_row(extra=True), "'extra' is for classifiers"),
        (aligner_row("refusals"), "no inputs must be refused"),
        (aligner_row("bits", careful=False), "the same inputs must give the same bits"),
        (aligner_row("unchanged experts"), "left unchanged must stay"),
        (aligner_row("dtype"), "must keep its shapes, dtypes"),
        (aligner_row("labels"), "the labels must be those of the head"),
        (aligner_row("one input"), "must be finite with 1 inputs"),
        (aligner_row("inputs"), "may be written into"),
    ],
)
def test_broken_contracts_of_aligners_are_noticed(row: AlignerRow, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_aligner(row)


def test_rows_of_somebody_else() -> None:
    check_aligner(aligner_row())
    check_aligner(aligner_row("unchanged experts", careful=False))
    check_protocol(protocol_row(Mine))
    check_fitted_method(fitted_row())


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


@pytest.mark.parametrize(
    ("maker", "message"),
    [(Careless, "without support inputs must be refused"), (Greedy, "'needs' must be among"), (Blind, "be finite")],
)
def test_broken_contracts_of_protocols_are_noticed(maker: type, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_protocol(protocol_row(maker))


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (METHODS["average"], "only methods that need inputs"),
        (fitted_row("bits"), "must give the same bits"),
        (fitted_row("shape"), "must have the shape of the setting's base"),
        (fitted_row("inputs"), "must not be written into"),
        (fitted_row("unchanged experts"), "weights must be finite"),
        (fitted_row("heads"), "one classifier per task"),
    ],
)
def test_broken_contracts_of_fitted_methods_are_noticed(row: Row, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_fitted_method(row)
