"""Hidden states of every family, and CKA: invariant to rotation, shift and scale; unbiased; of LoRA updates."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.lora_cka import update_cka

from orthomerge.analysis.layers import layer_states, linear_cka
from orthomerge.api.merge import merge
from orthomerge.core.errors import IncompatibleError
from orthomerge.data.task import Examples
from orthomerge.models.encoding import Encoding
from orthomerge.models.families import family
from orthomerge.models.model import Model
from orthomerge.testing.toys import random, rotation

TEXTS = Examples(["a good film", "bad", "it was not very good", "not a film", "very bad it was"], None, "test")

CPU = Encoding(device="cpu", batch=2)


@pytest.fixture(scope="module")
def bert(berts: Path) -> Model:
    return merge({"two": berts / "two"}, "average", base=berts / "base")


@pytest.mark.parametrize("pooling", ["pooler", "cls", "mean"])
def test_bert(bert: Model, pooling: str) -> None:
    encoder, family = bert.encoder.runner(pooling)
    processor = bert.processor.processor()
    states = layer_states(encoder, family, pooling, TEXTS, processor, task="toy", how=CPU)
    assert list(states) == ["embeddings", "layer 0", "layer 1", "features"]
    assert {tuple(part.shape) for part in states.values()} == {(5, 32)}
    with torch.no_grad():
        features = family.features(encoder, processor(list(TEXTS.inputs)), pooling)
    torch.testing.assert_close(states["features"], features, atol=1e-5, rtol=1e-4)
    if pooling != "pooler":
        torch.testing.assert_close(states["layer 1"], states["features"])
    assert not states["layer 0"].allclose(states["layer 1"])


def test_padding_does_not_count(bert: Model) -> None:
    encoder, family = bert.encoder.runner("mean")
    processor = bert.processor.processor()
    together, alone = (
        layer_states(encoder, family, "mean", TEXTS, processor, task="toy", how=Encoding(device="cpu", batch=batch))
        for batch in (5, 1)
    )
    for name in together:
        torch.testing.assert_close(together[name], alone[name], atol=1e-5, rtol=1e-4)


def test_clip_is_read_before_its_projection() -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from orthomerge.models.processing import PixelProcessor

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=6)
    encoder = CLIPVisionModelWithProjection(config)
    images = Examples(list(np.random.default_rng(0).integers(0, 255, (4, 8, 8), dtype=np.uint8)), None, "test")
    states = layer_states(encoder, family("clip"), "projection", images, PixelProcessor(size=8), task="toy", how=CPU)
    assert list(states) == ["embeddings", "layer 0", "layer 1", "layer 2", "features"]
    assert [part.shape[1] for part in states.values()] == [16, 16, 16, 16, 6]


def test_t5_is_read_in_its_decoder(tmp_path: Path) -> None:
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    config = T5Config(
        d_model=16, d_ff=24, d_kv=8, num_layers=1, num_decoder_layers=2, num_heads=2, vocab_size=20,
        eos_token_id=1, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip

    class Ids:
        modality = "text"

        def __call__(self, inputs: list[str]) -> dict[str, torch.Tensor]:
            ids = torch.tensor([[5, 6 + len(text), 1] for text in inputs])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def digest(self) -> str:
            return ""

    texts = Examples(["a", "bb", "ccc"], None, "test")
    states = layer_states(T5Model(config), family("t5"), "eos", texts, Ids(), task="toy", how=CPU)  # type: ignore[arg-type]
    assert list(states) == ["embeddings", "layer 0", "layer 1", "features"]
    torch.testing.assert_close(states["layer 1"], states["features"])
    assert not states["features"][0].allclose(states["features"][1])


def test_a_module_of_somebodys_own_has_features_only() -> None:
    from orthomerge.models.families import generic
    from orthomerge.models.processing import PixelProcessor

    class Flat(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return pixel_values.flatten(1)

    images = Examples(list(np.zeros((3, 2, 2), dtype=np.uint8)), None, "test")
    processor = PixelProcessor(size=2, channels=1)
    states = layer_states(Flat(), generic(""), "output", images, processor, task="toy", how=CPU)
    assert {name: tuple(part.shape) for name, part in states.items()} == {"features": (3, 4)}


@pytest.mark.parametrize("shape", [(60, 8), (10, 40)])
def test_rotation_shift_and_scale_change_nothing(shape: tuple[int, int]) -> None:
    X, Y = random(*shape, seed=1), random(shape[0], 5, seed=2)
    turned = 0.01 * X @ rotation(shape[1]).T + 5 * random(shape[1], seed=3)
    assert linear_cka(X, turned) == pytest.approx(1, abs=1e-5)
    assert linear_cka(turned, Y) == pytest.approx(linear_cka(X, Y), abs=1e-5)
    assert linear_cka(X, Y) == pytest.approx(linear_cka(Y, X))


def test_a_general_linear_map_is_seen() -> None:
    X = random(200, 6)
    assert linear_cka(X, X @ torch.diag(torch.tensor([10.0, 1, 1, 1, 1, 1]))) < 0.9


def test_unbiased_by_the_sum_over_four_inputs() -> None:
    """HSIC_1 is the mean over all quadruples of different inputs (Song et al. 2012, Eq. 3)."""
    X, Y = random(6, 3, seed=1).double(), random(6, 2, seed=2).double()

    def hsic(A: torch.Tensor, B: torch.Tensor) -> float:
        K, L = A @ A.T, B @ B.T
        every = list(permutations(range(6), 4))
        return sum(float(K[i, j] * (L[i, j] + L[q, r] - 2 * L[i, q])) for i, j, q, r in every) / len(every)

    assert linear_cka(X, Y) == pytest.approx(hsic(X, Y) / math.sqrt(hsic(X, X) * hsic(Y, Y)))


def test_strangers_with_few_inputs() -> None:
    X, Y = random(30, 400, seed=1), random(30, 400, seed=2)
    assert abs(linear_cka(X, Y)) < 0.1


def test_constant_features_are_like_nothing() -> None:
    constant = torch.full((8, 3), 0.1) + 1e-8 * random(8, 3)
    assert math.isnan(linear_cka(constant, random(8, 3)))


@pytest.mark.parametrize(("rows", "others"), [(3, 3), (5, 6)])
def test_too_few_inputs_and_other_inputs_are_refused(rows: int, others: int) -> None:
    with pytest.raises(IncompatibleError, match="CKA needs features of the same inputs, at least 4"):
        linear_cka(random(rows, 2), random(others, 2))


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


def test_the_joint_basis_changes_no_cka() -> None:
    X = torch.randn(60, 9, generator=torch.Generator().manual_seed(2))
    for inputs in (None, X):
        before = update_cka(updates(), inputs=inputs)
        assert update_cka(updates(), inputs=inputs, view="parts") == pytest.approx(before, abs=1e-5)
        assert abs(update_cka(updates(), inputs=inputs, view="directions") - before) > 1e-3


def test_an_expert_without_an_update_is_left_out() -> None:
    some = updates()
    some[2] = 0
    assert update_cka(some) == pytest.approx(update_cka(some[:2]))
    assert math.isnan(update_cka(torch.zeros(3, 12, 9)))
