"""Contracts of evaluation protocols: they build a classifier from the declared evidence only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

import torch

from orthomerge.core.errors import OrthomergeError
from orthomerge.core.schema import instance_of
from orthomerge.evaluation.protocols import Aligned, Builder, Evidence, Need, Row
from orthomerge.models.features import Features
from orthomerge.models.heads import Classifier
from orthomerge.testing.aligners import turned_pair
from orthomerge.testing.rows import check_row
from orthomerge.testing.toys import HEADS, head_of

_COUNT = 12


def check_protocol(row: Row, options: Mapping[str, Any] | None = None) -> None:
    """Check the contracts of a protocol; raise an AssertionError for the first that is broken."""

    def require(condition: object, message: str) -> None:
        if not condition:
            raise AssertionError(f"protocol {row.name!r} with options {dict(options or {})}: {message}")

    check_row(row, require, what="protocol")
    require(row.needs <= set(get_args(Need)), f"'needs' must be among {', '.join(get_args(Need))}")
    builder = instance_of(row, options or {}, what="protocol")
    protocol = cast("Builder", Aligned(builder) if hasattr(builder, "fit") else builder)
    for kind in HEADS:
        evidence = _evidence(row.needs, kind)
        tensors = _tensors(evidence)
        before = [tensor.clone() for tensor in tensors]
        classifiers = [protocol.build(evidence) for _ in range(2)]
        require(all(map(torch.equal, tensors, before)), "the evidence must not be written into")
        one, other = map(_logits, classifiers)
        require(classifiers[0].labels == evidence.head.labels, "the labels must be those of the head")
        require(one.shape == (_COUNT, 3) and one.isfinite().all(), f"logits must be finite, for a {kind} head")
        require(torch.equal(one, other), "the same evidence must give the same bits")
    if row.needs:
        try:
            protocol.build(replace(_evidence(row.needs, "plain"), support=None))
        except OrthomergeError:
            return
        require(False, "evidence without support inputs must be refused with an OrthomergeError")


def _evidence(needs: frozenset[Need], kind: str) -> Evidence:
    pair = turned_pair(_COUNT)
    labels = torch.arange(_COUNT) % 3 if "labels" in needs else None
    support = Features(pair.merged.values, "toy", "train", labels) if needs else None
    return Evidence(head_of(kind), support, pair.expert if "expert" in needs else None)


def _tensors(evidence: Evidence) -> list[torch.Tensor]:
    values = [features.values for features in (evidence.support, evidence.expert) if features is not None]
    return [*evidence.head.tensors().values(), *values]


def _logits(classifier: Classifier) -> torch.Tensor:
    return classifier(turned_pair(_COUNT).merged.values)
