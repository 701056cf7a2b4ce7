"""Hidden states of every family: the last layer, read as the pooling reads it, is what the encoder says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from orthomerge.analysis.layers import layer_states
from orthomerge.api.merge import merge
from orthomerge.data.task import Examples
from orthomerge.models.encoding import Encoding
from orthomerge.models.families import family
from orthomerge.models.model import Model

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
