"""Hidden states of every family, and CKA: invariant to rotation, shift and scale; unbiased; of LoRA updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.lora_cka import update_cka
from tests.models.making import OPTIONS, batch_for, build

from orthomerge.analysis.layers import layer_states, linear_cka
from orthomerge.data.task import Examples
from orthomerge.models.encoding import Encoding
from orthomerge.models.families import FAMILIES, family, generic
from orthomerge.models.processing import PixelProcessor
from orthomerge.testing.toys import random, rotation


@dataclass(frozen=True)
class Rows:
    """A processor of row numbers: rows of a batch that was made before."""

    batch: dict[str, torch.Tensor]
    modality: Any

    def __call__(self, inputs: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: tensor[list(map(int, inputs))] for name, tensor in self.batch.items()}

    def digest(self) -> str:
        return "rows"


ROWS = Examples(["0", "1", "2", "3"], None, "test")
FINAL_NORM = ("vit", "deit", "dinov2")  # after the last layer
POOLINGS = [(name, way) for name in OPTIONS if name in FAMILIES and "clip" not in name for way in family(name).poolings]


@pytest.mark.parametrize(("name", "pooling"), POOLINGS)
def test_every_family_and_pooling(name: str, pooling: str) -> None:
    """T5 classifiers are read in their decoder, where the inputs differ."""
    chosen = family(name)
    encoder = build(chosen.encoder_class, name)
    batch = batch_for(chosen, encoder.config)
    rows = Rows(batch, chosen.modality)
    pair, alone = (
        layer_states(encoder, chosen, pooling, ROWS, rows, task="toy", how=Encoding(device="cpu", batch=size))
        for size in (2, 1)
    )
    assert list(pair) == ["embeddings", "layer 0", "layer 1", "features"]
    assert {tuple(part.shape) for part in pair.values()} == {(4, 32 if pooling == "cls_mean" else 16)}
    with torch.no_grad():
        features = chosen.features(encoder, batch, pooling)
    torch.testing.assert_close(pair["features"], features, atol=1e-5, rtol=1e-4)
    if pooling != "pooler" and name not in FINAL_NORM:
        torch.testing.assert_close(pair["layer 1"], features, atol=1e-5, rtol=1e-4)
    assert not pair["layer 0"].allclose(pair["layer 1"])
    assert not features[0].allclose(features[1])
    for layer, states in pair.items():  # of whatever is padded with it
        torch.testing.assert_close(states, alone[layer], atol=1e-4, rtol=1e-4)


def test_clip_is_read_before_its_projection() -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(**OPTIONS["clip_vision"]))
    rows = Rows(batch_for(family("clip"), encoder.config), "image")
    states = layer_states(encoder, family("clip"), "projection", ROWS, rows, task="toy", how=Encoding(device="cpu"))
    assert [part.shape[1] for part in states.values()] == [16, 16, 16, 8]


def test_a_module_of_somebodys_own_has_features_only() -> None:
    class Flat(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return pixel_values.flatten(1)

    images = Examples(list(np.zeros((3, 2, 2), dtype=np.uint8)), None, "test")
    processor = PixelProcessor(size=2, channels=1)
    states = layer_states(Flat(), generic(""), "output", images, processor, task="toy", how=Encoding(device="cpu"))
    assert {name: tuple(part.shape) for name, part in states.items()} == {"features": (3, 4)}


@pytest.mark.parametrize("shape", [(60, 8), (10, 40)])
def test_rotation_shift_and_scale_change_nothing(shape: tuple[int, int]) -> None:
    X, Y = random(*shape, seed=1), random(shape[0], 5, seed=2)
    turned = 0.01 * X @ rotation(shape[1]).T + 5 * random(shape[1], seed=3)
    assert linear_cka(X, turned) == pytest.approx(1, abs=1e-5)
    assert linear_cka(turned, Y) == pytest.approx(linear_cka(X, Y), abs=1e-5)
    assert linear_cka(X, Y) == pytest.approx(linear_cka(Y, X))


def test_unbiased_by_the_sum_over_four_inputs() -> None:
    """HSIC_1 is the mean over all quadruples of different inputs (Song et al. 2012, Eq. 3)."""
    X, Y = random(6, 3, seed=1).double(), random(6, 2, seed=2).double()

    def hsic(A: torch.Tensor, B: torch.Tensor) -> float:
        K, L = A @ A.T, B @ B.T
        every = list(permutations(range(6), 4))
        return sum(float(K[i, j] * (L[i, j] + L[q, r] - 2 * L[i, q])) for i, j, q, r in every) / len(every)

    assert linear_cka(X, Y) == pytest.approx(hsic(X, Y) / math.sqrt(hsic(X, X) * hsic(Y, Y)))


def test_what_is_alike_and_what_is_not() -> None:
    """A general linear map is seen, strangers with few inputs are, and constant features are like nothing."""
    X = random(200, 6)
    assert linear_cka(X, X @ torch.diag(torch.tensor([10.0, 1, 1, 1, 1, 1]))) < 0.9
    assert abs(linear_cka(random(30, 400, seed=1), random(30, 400, seed=2))) < 0.1
    constant = torch.full((8, 3), 0.1) + 1e-8 * random(8, 3)
    assert math.isnan(linear_cka(constant, random(8, 3)))


def updates(experts: int = 3, rank: int = 2, *, shared: float = 0.0) -> torch.Tensor:
    """Random updates of low rank [T, 12, 9], a part of which all experts have."""
    generator = torch.Generator().manual_seed(0)

    def product() -> torch.Tensor:
        return torch.randn(12, rank, generator=generator) @ torch.randn(rank, 9, generator=generator)

    common = product()
    return torch.stack([shared * common + product() for _ in range(experts)])


def test_two_experts_by_hand() -> None:
    one, other = updates(2)
    X = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    expected = linear_cka(X @ one.T, X @ other.T)
    assert update_cka(torch.stack([one, other]), inputs=X) == pytest.approx(expected)
    assert update_cka(torch.stack([one, other])) == pytest.approx(linear_cka(one.T, other.T))


def test_the_joint_basis_changes_no_cka_and_an_expert_without_an_update_is_left_out() -> None:
    X = torch.randn(60, 9, generator=torch.Generator().manual_seed(2))
    for inputs in (None, X):
        before = update_cka(updates(), inputs=inputs)
        assert update_cka(updates(), inputs=inputs, view="parts") == pytest.approx(before, abs=1e-5)
        assert abs(update_cka(updates(), inputs=inputs, view="directions") - before) > 1e-3
    some = updates()
    some[2] = 0
    assert update_cka(some) == pytest.approx(update_cka(some[:2]))
    assert math.isnan(update_cka(torch.zeros(3, 12, 9)))
