"""Hidden states of every family: the last layer, read as the pooling reads it, is what the encoder says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from orthomerge import Recipe, merge
from orthomerge.analysis.layers import layer_states
from orthomerge.data.processing import load_processor
from orthomerge.data.task import Examples
from orthomerge.merged import Merged, load
from orthomerge.models.families import family

TEXTS = Examples(["a good film", "bad", "it was not very good", "not a film", "very bad it was"], None, "test")


@pytest.fixture(scope="module")
def bert(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bert") / "out"
    merge(Recipe(experts={"two": str(berts / "two")}, base=str(berts / "base"), method="average"), out=out)
    return out


@pytest.mark.parametrize("pooling", ["pooler", "cls", "mean"])
def test_bert(bert: Path, pooling: str) -> None:
    found = load(bert)
    merged = Merged(found.encoder, found.heads, found.family, pooling)
    processor = load_processor(bert / "encoder", modality="text")
    states = layer_states(merged, TEXTS, processor, task="toy", batch=2, device="cpu")
    assert list(states) == ["embeddings", "layer 0", "layer 1", "features"]
    assert {tuple(part.shape) for part in states.values()} == {(5, 32)}
    with torch.no_grad():
        features = merged.features(processor(list(TEXTS.inputs)))
    torch.testing.assert_close(states["features"], features, atol=1e-5, rtol=1e-4)
    if pooling != "pooler":
        torch.testing.assert_close(states["layer 1"], states["features"])
    assert not states["layer 0"].allclose(states["layer 1"])


def test_padding_does_not_count(bert: Path) -> None:
    found = load(bert)
    merged = Merged(found.encoder, found.heads, found.family, "mean")
    processor = load_processor(bert / "encoder", modality="text")
    together = layer_states(merged, TEXTS, processor, task="toy", batch=5, device="cpu")
    alone = layer_states(merged, TEXTS, processor, task="toy", batch=1, device="cpu")
    for name in together:
        torch.testing.assert_close(together[name], alone[name], atol=1e-5, rtol=1e-4)


def test_clip_is_read_before_its_projection() -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from orthomerge.data.pixels import PixelProcessor

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=6)
    merged = Merged(CLIPVisionModelWithProjection(config), {}, family("clip"), "projection")
    images = Examples(list(np.random.default_rng(0).integers(0, 255, (4, 8, 8), dtype=np.uint8)), None, "test")
    states = layer_states(merged, images, PixelProcessor(size=8), task="toy", device="cpu")
    assert list(states) == ["embeddings", "layer 0", "layer 1", "layer 2", "features"]
    assert [part.shape[1] for part in states.values()] == [16, 16, 16, 16, 6]


def test_t5_is_read_in_its_decoder(tmp_path: Path) -> None:
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    config = T5Config(
        d_model=16, d_ff=24, d_kv=8, num_layers=1, num_decoder_layers=2, num_heads=2, vocab_size=20,
        eos_token_id=1, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    merged = Merged(T5Model(config), {}, family("t5"), "eos")

    class Ids:
        modality = "text"

        def __call__(self, inputs: list[str]) -> dict[str, torch.Tensor]:
            ids = torch.tensor([[5, 6 + len(text), 1] for text in inputs])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def digest(self) -> str:
            return ""

    states = layer_states(merged, Examples(["a", "bb", "ccc"], None, "test"), Ids(), task="toy", device="cpu")  # type: ignore[arg-type]
    assert list(states) == ["embeddings", "layer 0", "layer 1", "features"]
    torch.testing.assert_close(states["layer 1"], states["features"])
    assert not states["features"][0].allclose(states["features"][1])


def test_a_module_of_somebodys_own_has_features_only() -> None:
    from orthomerge.data.pixels import PixelProcessor
    from orthomerge.models.generic import generic

    class Flat(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return pixel_values.flatten(1)

    images = Examples(list(np.zeros((3, 2, 2), dtype=np.uint8)), None, "test")
    merged = Merged(Flat(), {}, generic(""), "output")
    states = layer_states(merged, images, PixelProcessor(size=2, channels=1), task="toy", device="cpu")
    assert {name: tuple(part.shape) for name, part in states.items()} == {"features": (3, 4)}
