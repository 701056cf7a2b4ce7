"""Aligned-c from a pair of features: the protocol's numbers, and the divergence it reports.

The recipes themselves are tested with the protocol, in tests/evaluation/test_protocols.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.alignment.toys import HEADS, head_of, pair_of, random, rotation

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.distillation import divergence
from orthomerge.alignment.problem import Problem
from orthomerge.evaluation import aligned_c
from orthomerge.evaluation.protocol import Evidence
from orthomerge.heads import Head


@pytest.mark.parametrize("recipe", ["paper", "tuned"])
@pytest.mark.parametrize("kind", HEADS)
def test_the_protocol_has_the_same_bits(recipe: Any, kind: str) -> None:
    pair, head = pair_of(random(30, 6) + 1, random(30, 6, seed=1)), head_of(kind)
    evidence = Evidence(head, pair.merged, Problem.of(pair, head).Z, seed=5)
    expected = aligned_c.AlignedC(recipe, epochs=2).build(evidence)
    found = AlignedC(recipe, epochs=2, seed=5).fit(pair, head).classifier
    assert isinstance(found, Head)
    assert found.tensors().keys() == expected.tensors().keys() == head.tensors().keys()
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in found.tensors().items())


def test_facts_and_a_planted_rotation() -> None:
    expert, head = random(300, 6), head_of("plain")
    merged = expert @ rotation(6)
    found = AlignedC().fit(pair_of(merged, expert), head)
    assert found.facts["loss_before"] == pytest.approx(divergence(head(expert), head(merged)), rel=1e-4)
    assert found.facts["loss"] == pytest.approx(divergence(head(expert), found.classifier(merged)), rel=1e-2)
    assert float(found.facts["loss"]) < 0.01 * float(found.facts["loss_before"])
    assert found.facts["steps"] == 300


def test_a_head_of_half_precision_is_trained_in_float32() -> None:
    head = head_of("plain")
    half = Head(type(head.output)(head.output.weight.bfloat16(), None), head.labels)
    found = AlignedC(epochs=1).fit(pair_of(random(9, 6), random(9, 6, seed=1)), half).classifier
    assert isinstance(found, Head)
    assert found.output.weight.dtype == torch.float32
