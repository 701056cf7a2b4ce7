"""Contracts of aligners, for heads of every kind and for few or degenerate inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from orthomerge.alignment.aligners import Aligner, Alignment, Row
from orthomerge.core.errors import OrthomergeError
from orthomerge.core.schema import instance_of
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head
from orthomerge.testing.rows import check_row, same, tensors_of
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random, rotation

_D = 6


def check_aligner(row: Row, options: Mapping[str, Any] | None = None) -> None:
    """Check the contracts of an aligner; raise an AssertionError for the first that is broken.

    `options` are added to those of `row.quick`.
    """
    case = _Case(row, {**row.quick, **(options or {})})
    check_row(row, case.require, what="aligner")
    for contract in CONTRACTS:
        contract(case)


@dataclass(frozen=True)
class _Case:
    """A row with options."""

    row: Row
    options: Mapping[str, Any]

    def require(self, condition: object, message: str) -> None:
        if not condition:
            raise AssertionError(f"aligner {self.row.name!r} with options {dict(self.options)}: {message}")

    def fit(self, pair: FeaturePair, head: Head) -> Alignment:
        """Fit, and require a finite classifier with the head's labels."""
        aligner: Aligner = instance_of(self.row, self.options, what="aligner")
        alignment = aligner.fit(pair, head)
        self.require(alignment.classifier.labels == head.labels, "the labels must be those of the head")
        finite = all(tensor.isfinite().all() for tensor in tensors_of(alignment.classifier).values())
        self.require(finite, f"the classifier must be finite with {len(pair.merged)} inputs")
        return alignment


def turned_pair(count: int = 12, *, d: int = _D) -> FeaturePair:
    """Return random features of an expert, with those of a merge: the same, rotated, scaled and with noise."""
    expert = random(count, d, seed=1) + 1
    return pair_of(0.7 * expert @ rotation(d) + 0.3 * random(count, d), expert)


def _form_is_kept(case: _Case) -> None:
    """Check that heads keep shapes and dtypes, other classifiers have extra tensors, and inputs are not changed."""
    for kind in HEADS:
        head, pair = head_of(kind), turned_pair()
        inputs = [*head.tensors().values(), pair.merged.values, pair.expert.values]
        before = [tensor.clone() for tensor in inputs]
        alignment = case.fit(pair, head)
        case.require(all(map(torch.equal, inputs, before)), "neither head nor features may be written into")
        logits = alignment.classifier(pair.merged.values)
        case.require(logits.shape == (12, 3) and logits.isfinite().all(), f"logits must be finite, for a {kind} head")
        plain = all(isinstance(fact, bool | int | float | str) for fact in alignment.facts.values())
        case.require(plain, "facts must be numbers, texts or truth values")
        if case.row.extra:
            classifier: Any = alignment.classifier
            has_extra = not isinstance(classifier, Head) and classifier.extra_tensors()
            case.require(has_extra, "'extra' is for classifiers that are not a Head and have 'extra_tensors'")
            continue
        aligned: Any = alignment.classifier
        case.require(isinstance(aligned, Head), "the classifier must be a Head, or the row must have 'extra'")
        form = [(one.activation, one.normalise, _specs(one)) for one in (aligned, head)]
        case.require(form[0] == form[1], f"a {kind} head must keep its shapes, dtypes and activation")


def _bits_repeat(case: _Case) -> None:
    one, other = (case.fit(turned_pair(), head_of("plain")) for _ in range(2))
    tensors = [tensors_of(alignment.classifier) for alignment in (one, other)]
    case.require(one.facts == other.facts and same(*tensors), "the same inputs must give the same bits")


def _few_inputs_are_enough(case: _Case) -> None:
    """Check fits to one input, of one class, to equal inputs and to zeros."""
    for kind in HEADS:
        case.fit(turned_pair(1), head_of(kind))
    head, pair = linear_head(random(1, _D, seed=3), random(1, seed=4)), turned_pair()
    logits = case.fit(pair, head).classifier(pair.merged.values)
    case.require(logits.isfinite().all() and not logits.argmax(1).any(), "a head of one class must keep it")
    h, t, zero = random(1, _D), random(1, _D, seed=1), torch.zeros(7, _D)
    pairs = [pair_of(h.repeat(count, 1), t.repeat(count, 1)) for count in (2, 11)]
    pairs += [pair_of(zero, random(7, _D)), pair_of(random(7, _D), zero), pair_of(zero, zero)]
    for kind, degenerate in product(("normalising with bias", "hidden"), pairs):
        case.fit(degenerate, head_of(kind))


def _no_change_is_none(case: _Case) -> None:
    """Check a careful aligner on features that the merge left unchanged."""
    expert, head = turned_pair(30).expert, head_of("plain")
    classifier = case.fit(FeaturePair(expert, expert), head).classifier
    if case.row.careful:
        unchanged = torch.equal(classifier(expert.values), head(expert.values))
        case.require(unchanged, "the logits of an expert that the merge left unchanged must stay, to the last bit")


def _bad_features_are_refused(case: _Case) -> None:
    head, with_nan = head_of("plain"), random(12, _D)
    with_nan[3, 2] = math.nan
    narrow = FeaturePair(turned_pair().merged, turned_pair(d=5).expert)
    cases = {
        "no inputs": turned_pair(0),
        "features of another width than the head's": turned_pair(d=7),
        "expert features of another width than the head's": narrow,
        "merged features that are not finite": pair_of(with_nan, random(12, _D)),
        "expert features that are not finite": pair_of(random(12, _D), with_nan),
    }
    aligner: Aligner = instance_of(case.row, case.options, what="aligner")
    for what, pair in cases.items():
        try:
            aligner.fit(pair, head)
        except OrthomergeError as error:
            case.require("'toy'" in str(error), f"the error for {what} must name the task, got: {error}")
        else:
            case.require(condition=False, message=f"{what} must be refused with an OrthomergeError")


def _specs(head: Head) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in head.tensors().items()}


CONTRACTS: tuple[Callable[[_Case], None], ...] = (
    _form_is_kept,
    _bits_repeat,
    _few_inputs_are_enough,
    _no_change_is_none,
    _bad_features_are_refused,
)
