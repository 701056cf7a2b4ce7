"""Task vectors by hand, and figures from records, searches and fits: curves, losses, coefficients, masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from orthomerge.analysis import recorded
from orthomerge.analysis.conflict import Conflict, effective_rank, in_order, layer_of
from orthomerge.analysis.diagnosis import Heat
from orthomerge.core.errors import NumericalError
from orthomerge.evaluation.records import Record
from orthomerge.evaluation.scale import ScaleSearch
from orthomerge.merging.vectors import Difference, InMemory, TaskVector, TaskVectors
from orthomerge.testing.toys import random

State = dict[str, torch.Tensor]


def vectors(base: State, tuned: dict[str, State], *, tile: int = 1 << 18) -> TaskVectors:
    weights, ends = InMemory(base), {task: Difference(InMemory(state)) for task, state in tuned.items()}
    return TaskVectors({task: TaskVector(weights, ((1.0, end),)) for task, end in ends.items()}, tile=tile)


def test_names_of_layers_and_their_order() -> None:
    layers = {
        "encoder.layer.3.output.dense.weight": "layer 3",
        "layers.11.attention.q_proj.bias": "layer 11",
        "encoder.block.0.layer.1.DenseReluDense.wi.weight": "layer 0",
        "decoder.block.2.layer.0.SelfAttention.q.weight": "decoder 2",
        "vision_model.encoder.layers.5.mlp.fc1.weight": "layer 5",
        "embeddings.word_embeddings.weight": "embeddings",
        "vision_model.pre_layrnorm.weight": "embeddings",
        "shared.weight": "embeddings",
        "pooler.dense.weight": "final",
        "layernorm.bias": "final",
    }
    assert {name: layer_of(name) for name in layers} == layers
    found = in_order(["final", "layer 10", "decoder 0", "layer 2", "embeddings", "layer 2"])
    assert found == ("embeddings", "layer 2", "layer 10", "decoder 0", "final")


def test_effective_rank() -> None:
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.outer(random(7, seed=1), random(3, seed=2))) == pytest.approx(1, abs=1e-4)
    entropy = -(0.36 * math.log(0.36) + 0.64 * math.log(0.64))
    assert effective_rank(torch.diag(torch.tensor([3.0, 4.0]))) == pytest.approx(math.exp(entropy))
    assert math.isnan(effective_rank(torch.zeros(2, 3)))


def test_by_hand() -> None:
    base = {"layer.0.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "norm.bias": torch.tensor([1.0, 0.0])}
    one = {"layer.0.weight": base["layer.0.weight"] + torch.eye(2), "norm.bias": torch.tensor([2.0, 0.0])}
    change = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    other = {"layer.0.weight": base["layer.0.weight"] + change, "norm.bias": torch.tensor([0.0, 0.0])}
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
    # Tiny changes have no sign.
    base = {"w": torch.zeros(3)}
    one, other = {"w": torch.tensor([1.0, 1e-9, 1.0])}, {"w": torch.tensor([1.0, -1.0, -1.0])}
    assert Conflict.of(vectors(base, {"one": one, "other": other})).signs[0][1] == pytest.approx(0.5)


def test_blocks_do_not_matter() -> None:
    base = {f"layer.{n}.weight": random(6, 5, seed=n) for n in range(2)} | {"embed": random(40, seed=7)}
    tuned = {task: {k: v + random(*v.shape, seed=s) for k, v in base.items()} for s, task in enumerate("abc", 20)}
    whole, cut = Conflict.of(vectors(base, tuned)), Conflict.of(vectors(base, tuned, tile=7))
    for one, other in ((whole.norms, cut.norms), (whole.cosine, cut.cosine), (whole.signs, cut.signs)):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert whole.ranks[1] == pytest.approx(cut.ranks[1])


def test_an_expert_that_is_the_base_and_one_that_is_no_number() -> None:
    base = {"layer.0.weight": torch.eye(2)}
    found = Conflict.of(vectors(base, {"same": base, "other": {"layer.0.weight": 2 * torch.eye(2)}}))
    assert found.norms[0][0] == 0
    assert math.isnan(found.cosine[0][1])
    assert math.isnan(found.signs[0][1])
    with pytest.raises(NumericalError, match=r"'layer\.0\.weight' holds NaN or infinity"):
        Conflict.of(vectors(base, {"bad": {"layer.0.weight": torch.full((2, 2), math.nan)}}))


def test_figures() -> None:
    base = {"layer.0.weight": torch.eye(3)}
    alone = Conflict.of(vectors(base, {"one": {"layer.0.weight": 2 * torch.eye(3)}}))
    assert [figure.key for figure in alone.figures()] == ["vector-norms", "vector-ranks"]
    cosine, signs = ((1, 0.3), (0.3, 1)), ((0, 0.4), (0.4, 0))
    figures = Conflict(("a", "b"), ("final",), ((0.1, 0.2),), ((math.nan,) * 2,), cosine, signs).figures()
    assert [figure.key for figure in figures] == ["vector-norms", "vector-cosines", "sign-conflicts"]
    assert figures[0].values == ((10.0, 20.0),)
    assert figures[1].diverging
    assert figures[2].values[0] == (0.0, 40.0)


def record(task: str, value: float, *, method: str = "ties", protocol: str = "knn", **more: Any) -> Record:
    given: dict[str, Any] = {"access": "inductive", "support": "train", "inputs": {"model": "abc"}, **more}
    return Record(task, method, protocol, "accuracy", value, value - 0.1, value + 0.1, 50, **given)


def test_accuracy_over_shots() -> None:
    records = [
        record(task, value, shots=shots, seed=seed)
        for shots, values in {5: (0.6, 0.8), 1: (0.4, 0.5)}.items()
        for seed, value in enumerate(values)
        for task in ("a", "b")
    ]
    records += [record(task, 0.3, protocol="current", support=None, access="data-free") for task in ("a", "b")]
    records += [record(task, 0.9) for task in ("a", "b")]
    figure = recorded.shots_figure(records, method="ties")
    assert figure is not None
    assert [curve.name for curve in figure.curves] == ["knn (inductive)", "knn, all inputs (inductive)", "as it is"]
    knn, whole, plain = figure.curves
    assert whole.y == pytest.approx((90, 90))
    assert knn.x == (1.0, 5.0)
    assert knn.y == pytest.approx((45, 70))
    spread = math.sqrt(2) * 10
    assert knn.low is not None
    assert knn.high is not None
    assert (knn.low[1], knn.high[1]) == pytest.approx((70 - spread, 70 + spread))
    assert plain.y == pytest.approx((30, 30))
    for few in ([record("a", 0.5, shots=5)], []):  # one number of shots is no curve
        assert recorded.shots_figure(few, method="ties") is None


def test_witnesses() -> None:
    records = [record("a", 0.5, shots=5), record("b", 0.7, shots=5), record("a", 0.9, protocol="probe")]
    ((name, witness),) = recorded.recorded_witnesses(records, ("a", "b"), model="abc").items()
    assert name == "knn, 5/class"
    assert witness.value == pytest.approx(60)
    assert recorded.recorded_witnesses(records, ("a", "b"), model="another") == {}
    assert recorded.recorded_name(records, "ties (here)", model="abc") == "ties"
    assert recorded.recorded_name(records, "ties", model="xyz") == "ties"
    assert recorded.recorded_name(records, "new", model="xyz") == "new"


def test_score_over_scales_and_losses() -> None:
    figure = recorded.scale_figure(ScaleSearch("accuracy", {0.5: {"a": 80.0, "b": 60.0}, 0.1: {"a": 90.0, "b": 70.0}}))
    assert figure.curves[0].x == (0.1, 0.5)
    assert figure.curves[0].y == (80.0, 70.0)
    assert "best mean is at 0.1" in figure.caption
    rows = [{"step": 0, "held_out": 3.0}, {"step": 10, "loss": 9.0, "held_out": 2.0}, {"step": 20, "loss": 8.0}]
    training, held_out = recorded.loss_figures(rows)
    assert (training.curves[0].x, training.curves[0].y) == ((10, 20), (9, 8))
    assert (held_out.curves[0].x, held_out.curves[0].y) == ((0, 10), (3, 2))
    assert recorded.loss_figures([{"step": 0, "loss": math.nan}, {"step": 1, "loss": 1.0}]) == ()


def test_coefficients() -> None:
    layers = {"embed.weight": 0.1, "layers.0.a.weight": 0.2, "layers.0.b.weight": 0.4}
    figure = recorded.coefficient_figure({"a": layers, "b": {name: 2 * value for name, value in layers.items()}})
    assert figure is not None
    assert figure.rows == ("embeddings", "layer 0")
    assert figure.values[1] == pytest.approx((0.3, 0.6))
    whole = recorded.coefficient_figure({"a": 0.3, "b": 0.5})
    assert whole is not None
    assert (whole.rows, whole.values) == (("all layers",), ((0.3, 0.5),))
    assert recorded.coefficient_figure({}) is None
    # A manifest that is anybody's
    coefficients = [{"coefficients": odd} for odd in (3, {"a": "much"}, {"a": {"layers.0": None}})]
    masks = [{"masked_by_tensor": odd} for odd in (3, {"w": 3}, {"w": {"masked": 1}})]
    odd: list[Any] = [[], {"curve": "up", "facts": {}}, *({"facts": facts} for facts in (*coefficients, *masks))]
    assert all(recorded.fit_figures({"fit": fit}) == () for fit in odd)
    assert recorded.fit_figures({}) == ()
    curve = [{"step": 0, "loss": 1.0}, {"step": 5, "loss": 0.5}]
    figures = recorded.fit_figures({"fit": {"curve": curve, "facts": {"coefficients": {"a": 0.3}}}})
    assert [figure.key for figure in figures] == ["fit-loss", "coefficients"]
    assert isinstance(figures[1], Heat)


def test_masks() -> None:
    counts = {"layer.0.w": (1, 4), "layer.0.b": (2, 2), "norm.w": (0, 4), "embed.w": (0, 0)}
    figure = recorded.masking_figure({name: {"masked": masked, "of": of} for name, (masked, of) in counts.items()})
    assert figure is not None
    assert figure.groups == ("layer 0", "final")
    assert figure.series[0].values == pytest.approx((50, 0))
    assert "30.0 % in all" in figure.caption
    for empty in ({}, {"w": {"masked": 0, "of": 0}}):
        assert recorded.masking_figure(empty) is None
