"""Contracts of fitted methods, checked on three experts of a tiny BERT with a few texts each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from orthomerge.files.run_state import RunState
from orthomerge.fitting.setting import Fitted, FittedMethod, Setting
from orthomerge.merging.methods import Row, build_method
from orthomerge.models.writing import plain
from orthomerge.testing.rows import check_row, same, tensors_of
from orthomerge.testing.settings import make_setting

_INPUTS = 12


def check_fitted_method(row: Row, options: Mapping[str, Any] | None = None) -> None:
    """Check the contracts of a method that is fitted to inputs; raise an AssertionError for the first that is broken.

    `options` are added to those of `row.quick`.
    """
    case = _Case(row, {**row.quick, **(options or {})})
    check_row(row, case.require, what="method")
    case.require(row.fitted, "only methods that need inputs are checked here; use check_method")
    for contract in CONTRACTS:
        contract(case)


@dataclass(frozen=True)
class _Case:
    """A row with options."""

    row: Row
    options: Mapping[str, Any]

    def require(self, condition: object, message: str) -> None:
        if not condition:
            raise AssertionError(f"method {self.row.name!r} with options {dict(self.options)}: {message}")

    def fit(self, setting: Setting) -> Fitted:
        """Fit, and check the form of the result."""
        method: FittedMethod = build_method(self.row, self.options, tasks=setting.tasks)
        fitted = method.fit(setting)
        weights = fitted.weights
        self.require(weights.shape == setting.base.shape, "weights must have the shape of the setting's base, [P]")
        self.require(weights.dtype == torch.float32, f"weights must be float32, got {weights.dtype}")
        self.require(weights.device.type == "cpu", f"weights must be on the CPU, got {weights.device}")
        self.require(weights.isfinite().all(), "weights must be finite")
        self.require(tuple(fitted.classifiers) == setting.tasks, "there must be one classifier per task, in order")
        for task, classifier in fitted.classifiers.items():
            self.require(classifier.labels == setting.heads[task].labels, "the labels must be those of the heads")
            logits = classifier(setting.inputs.targets[task].features)
            self.require(logits.isfinite().all(), f"the classifier of {task!r} must give finite logits")
        try:
            json.dumps(plain({"facts": fitted.facts, "curve": fitted.curve}))
        except TypeError as error:
            self.require(condition=False, message=f"facts and curve must be plain numbers, texts and mappings: {error}")
        return fitted


def _setting_is_not_changed(case: _Case) -> None:
    setting = make_setting(inputs=_INPUTS)
    tensors = [setting.base, *(setting.tuned(task) for task in setting.tasks)]
    tensors += [tensor for head in setting.heads.values() for tensor in head.tensors().values()]
    for target in setting.inputs.targets.values():
        tensors += [target.rows, target.features, target.weights]
    before = [tensor.clone() for tensor in tensors]
    case.fit(setting)
    case.require(all(map(torch.equal, tensors, before)), "base, heads and targets must not be written into")


def _bits_repeat(case: _Case) -> None:
    one, other = (case.fit(make_setting(inputs=_INPUTS)) for _ in range(2))
    case.require(_same(one, other), "two fits of the same setting must give the same bits")


def _experts_may_be_the_base(case: _Case) -> None:
    """Check that there is no division by zero if experts equal the base."""
    setting = make_setting(inputs=_INPUTS)
    case.fit(replace(setting, tuned=lambda task: setting.base.clone(), merged=lambda *_: setting.base.clone()))


def _killed_runs_continue(case: _Case) -> None:
    with TemporaryDirectory(prefix="orthomerge-") as folder:
        state = RunState(Path(folder) / "state", "contracts")
        setting = replace(make_setting(inputs=_INPUTS), state=state)
        first = case.fit(setting)
        again = case.fit(replace(make_setting(inputs=_INPUTS), state=state))
        case.require(_same(first, again), "a run that continues from a state must give the same bits")
    case.require(_same(first, case.fit(make_setting(inputs=_INPUTS))), "writing a state must not change the result")


def _same(one: Fitted, other: Fitted) -> bool:
    """Whether two results have the same bits."""
    heads = zip(one.classifiers.values(), other.classifiers.values(), strict=True)
    if not all(same(tensors_of(head), tensors_of(again)) for head, again in heads):
        return False
    return torch.equal(one.weights, other.weights) and plain(one.facts) == plain(other.facts)


CONTRACTS: tuple[Callable[[_Case], None], ...] = (
    _setting_is_not_changed,
    _bits_repeat,
    _experts_may_be_the_base,
    _killed_runs_continue,
)
