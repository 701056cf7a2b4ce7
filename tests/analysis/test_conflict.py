"""Task vectors by hand: norms, cosines, signs, ranks; streamed in small blocks or large."""

from __future__ import annotations

import math

import pytest
import torch

from orthomerge.analysis.conflict import Conflict, effective_rank, in_order, layer_of
from orthomerge.core.errors import NumericalError
from orthomerge.merging.vectors import Difference, InMemory, TaskVector, TaskVectors
from orthomerge.testing.toys import random

State = dict[str, torch.Tensor]


def vectors(base: State, tuned: dict[str, State], *, tile: int = 1 << 18) -> TaskVectors:
    weights = InMemory(base)
    return TaskVectors(
        {task: TaskVector(weights, ((1.0, Difference(InMemory(state))),)) for task, state in tuned.items()}, tile=tile
    )


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("encoder.layer.3.output.dense.weight", "layer 3"),
        ("layers.11.attention.q_proj.bias", "layer 11"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "layer 0"),
        ("decoder.block.2.layer.0.SelfAttention.q.weight", "decoder 2"),
        ("vision_model.encoder.layers.5.mlp.fc1.weight", "layer 5"),
        ("embeddings.word_embeddings.weight", "embeddings"),
        ("vision_model.pre_layrnorm.weight", "embeddings"),
        ("shared.weight", "embeddings"),
        ("pooler.dense.weight", "final"),
        ("layernorm.bias", "final"),
    ],
)
def test_names_of_layers(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_layers_in_order() -> None:
    found = in_order(["final", "layer 10", "decoder 0", "layer 2", "embeddings", "layer 2"])
    assert found == ("embeddings", "layer 2", "layer 10", "decoder 0", "final")


def test_effective_rank() -> None:
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.outer(random(7, seed=1), random(3, seed=2))) == pytest.approx(1, abs=1e-4)
    assert effective_rank(torch.diag(torch.tensor([3.0, 4.0]))) == pytest.approx(
        math.exp(-(0.36 * math.log(0.36) + 0.64 * math.log(0.64)))
    )
    assert math.isnan(effective_rank(torch.zeros(2, 3)))


def test_by_hand() -> None:
    base = {"layer.0.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "norm.bias": torch.tensor([1.0, 0.0])}
    one = {"layer.0.weight": base["layer.0.weight"] + torch.eye(2), "norm.bias": torch.tensor([2.0, 0.0])}
    other = {
        "layer.0.weight": base["layer.0.weight"] + torch.tensor([[1.0, 2.0], [0.0, -1.0]]),
        "norm.bias": torch.tensor([0.0, 0.0]),
    }
    found = Conflict.of(vectors(base, {"one": one, "other": other}))
    assert found.tasks == ("one", "other")
    assert found.layers == ("layer 0", "final")
    assert found.norms[0] == pytest.approx((math.sqrt(2) / 5, math.sqrt(6) / 5))
    assert found.norms[1] == pytest.approx((1, 1))
    # <one, other> = 1 - 1 - 1; |one|^2 = 3, |other|^2 = 7.
    assert found.cosine[0][1] == pytest.approx(-1 / math.sqrt(21))
    # Both change three elements, two of them in opposite directions.
    assert found.signs[0][1] == found.signs[1][0] == pytest.approx(2 / 3)
    assert found.signs[0][0] == 0
    assert found.ranks[0][0] == pytest.approx(2)
    assert math.isnan(found.ranks[1][0])


def test_tiny_changes_have_no_sign() -> None:
    base = {"w": torch.zeros(3)}
    one, other = {"w": torch.tensor([1.0, 1e-9, 1.0])}, {"w": torch.tensor([1.0, -1.0, -1.0])}
    assert Conflict.of(vectors(base, {"one": one, "other": other})).signs[0][1] == pytest.approx(0.5)


def test_blocks_do_not_matter() -> None:
    base = {f"layer.{n}.weight": random(6, 5, seed=n) for n in range(2)} | {"embed": random(40, seed=7)}
    tuned = {task: {k: v + random(*v.shape, seed=s) for k, v in base.items()} for s, task in enumerate("abc", 20)}
    whole, cut = Conflict.of(vectors(base, tuned)), Conflict.of(vectors(base, tuned, tile=7))
    for one, other in zip((whole.norms, whole.cosine, whole.signs), (cut.norms, cut.cosine, cut.signs), strict=True):
        for row, again in zip(one, other, strict=True):
            assert row == pytest.approx(again)
    assert whole.ranks[1] == pytest.approx(cut.ranks[1])


def test_an_expert_that_is_the_base() -> None:
    base = {"layer.0.weight": torch.eye(2)}
    found = Conflict.of(vectors(base, {"same": base, "other": {"layer.0.weight": 2 * torch.eye(2)}}))
    assert found.norms[0][0] == 0
    assert math.isnan(found.cosine[0][1])
    assert math.isnan(found.signs[0][1])


def test_not_a_number() -> None:
    base = {"w": torch.zeros(2)}
    with pytest.raises(NumericalError, match="'w' holds NaN or infinity"):
        Conflict.of(vectors(base, {"bad": {"w": torch.tensor([1.0, math.nan])}}))


def test_figures() -> None:
    base = {"layer.0.weight": torch.eye(3)}
    alone = Conflict.of(vectors(base, {"one": {"layer.0.weight": 2 * torch.eye(3)}}))
    assert [figure.key for figure in alone.figures()] == ["vector-norms", "vector-ranks"]
    pair = Conflict(
        ("a", "b"), ("final",), ((0.1, 0.2),), ((math.nan,) * 2,), ((1, 0.3), (0.3, 1)), ((0, 0.4), (0.4, 0))
    )
    figures = pair.figures()
    assert [figure.key for figure in figures] == ["vector-norms", "vector-cosines", "sign-conflicts"]
    assert figures[0].values == ((10.0, 20.0),)
    assert figures[1].diverging
    assert figures[2].values[0] == (0.0, 40.0)
