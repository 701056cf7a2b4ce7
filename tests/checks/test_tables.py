"""Every aligner, protocol and fitted method keeps the contracts, and the contracts notice when one does not."""

from __future__ import annotations

from collections.abc import Iterator
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


@dataclass(frozen=True)
class Same:
    """A sound aligner; those below break one contract each."""

    calls: ClassVar[Iterator[int]] = count(1)

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        Problem.of(pair, head)
        return Alignment(self.changed(pair, head))

    def changed(self, pair: FeaturePair, head: Head) -> Head:
        return head


class Unchecked(Same):
    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        return Alignment(head)


class Unsteady(Same):
    def changed(self, pair: FeaturePair, head: Head) -> Head:
        return head.with_tensors({key: tensor + next(self.calls) for key, tensor in head.tensors().items()})


class Restless(Same):
    def changed(self, pair: FeaturePair, head: Head) -> Head:
        return head.with_tensors({key: 2 * tensor for key, tensor in head.tensors().items()})


class Wide(Same):
    def changed(self, pair: FeaturePair, head: Head) -> Head:
        return head.to(torch.float64)


class Renamed(Same):
    def changed(self, pair: FeaturePair, head: Head) -> Head:
        return replace(head, labels=tuple(f"{label}?" for label in head.labels))


class Fragile(Same):
    def changed(self, pair: FeaturePair, head: Head) -> Head:
        spread = (pair.merged.values - pair.merged.values.mean(0)).norm()  # zero for one input
        return head.with_tensors({key: tensor * spread / spread for key, tensor in head.tensors().items()})


class Writing(Same):
    def changed(self, pair: FeaturePair, head: Head) -> Head:
        pair.merged.values.mul_(0.5)
        return head


def aligner_row(maker: type, **more: Any) -> AlignerRow:
    maker.__doc__ = maker.__doc__ or "Of a test."
    return replace(AlignerRow("mine", f"{__name__}:{maker.__name__}", "Mine", "Me 2026", careful=True), **more)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (aligner_row(Same, title=""), "must not be empty"),
        (aligner_row(Same, extra=True), "'extra' is for classifiers"),
        (aligner_row(Unchecked), "no inputs must be refused"),
        (aligner_row(Unsteady, careful=False), "the same inputs must give the same bits"),
        (aligner_row(Restless), "left unchanged must stay"),
        (aligner_row(Wide), "must keep its shapes, dtypes"),
        (aligner_row(Renamed), "the labels must be those of the head"),
        (aligner_row(Fragile), "must be finite with 1 inputs"),
        (aligner_row(Writing), "may be written into"),
    ],
    ids=lambda value: value.maker.rpartition(":")[2] if isinstance(value, AlignerRow) else "",
)
def test_broken_contracts_of_aligners_are_noticed(row: AlignerRow, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_aligner(row)


def test_rows_of_somebody_else() -> None:
    check_aligner(aligner_row(Same))
    check_aligner(aligner_row(Restless, careful=False))
    check_protocol(protocol_row(Mine))
    check_fitted_method(fitted_row(Average))


@dataclass(frozen=True)
class Mine(Current):
    """A sound protocol."""

    needs: ClassVar[frozenset[Need]] = frozenset({"features", "expert"})

    def build(self, evidence: Evidence) -> Head:
        evidence.pair()
        return evidence.head


class Careless(Mine):
    """Does not miss its evidence."""

    def build(self, evidence: Evidence) -> Head:
        return evidence.head


class Greedy(Mine):
    """Asks for what there is not."""

    needs: ClassVar[Any] = frozenset({"test labels"})


class Blind(Mine):
    """Gives logits that are no numbers."""

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
    """A sound fitted method."""

    calls: ClassVar[Iterator[int]] = count(1)

    def fit(self, setting: Setting) -> Fitted:
        return Fitted(self.weights(setting), setting.heads)

    def weights(self, setting: Setting) -> torch.Tensor:
        return setting.mean_expert()


class Drifting(Average):
    """Gives something else each time."""

    def weights(self, setting: Setting) -> torch.Tensor:
        return setting.mean_expert() + next(self.calls)


class Long(Average):
    """Gives weights of another length."""

    def weights(self, setting: Setting) -> torch.Tensor:
        return setting.mean_expert()[1:]


class Spoiling(Average):
    """Writes into the base."""

    def weights(self, setting: Setting) -> torch.Tensor:
        return setting.base.add_(1)


class Normalised(Average):
    """Divides by what the experts changed."""

    def weights(self, setting: Setting) -> torch.Tensor:
        change = setting.mean_expert() - setting.base
        return torch.addcdiv(setting.base, change, change.norm())


class Headless(Average):
    """Gives no heads."""

    def fit(self, setting: Setting) -> Fitted:
        return Fitted(setting.mean_expert(), {})


def fitted_row(maker: type) -> Row:
    return Row("mine", f"{__name__}:{maker.__name__}", "Mine", "Me 2026", fitted=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (METHODS["average"], "only methods that need inputs"),
        (fitted_row(Drifting), "must give the same bits"),
        (fitted_row(Long), "must have the shape of the setting's base"),
        (fitted_row(Spoiling), "must not be written into"),
        (fitted_row(Normalised), "weights must be finite"),
        (fitted_row(Headless), "one classifier per task"),
    ],
    ids=lambda value: value.maker.rpartition(":")[2] if isinstance(value, Row) else "",
)
def test_broken_contracts_of_fitted_methods_are_noticed(row: Row, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_fitted_method(row)
