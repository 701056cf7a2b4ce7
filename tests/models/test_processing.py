"""Tokenizers keep their mask, grey images become RGB, and no example is lost on the way to a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.data.task import Examples
from orthomerge.models.processing import ImageProcessor, PixelProcessor, Processor, batches
from orthomerge.models.processors import load_processor

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "very", "not"]
BERT = {"model_type": "bert", "vocab_size": 20, "max_position_embeddings": 40, "type_vocab_size": 2}
VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}


def texts(folder: Path, length: int = 128, **changes: Any) -> Processor:
    """The tokenizer of a folder with a vocabulary, and a config with some keys changed."""
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    config = {key: value for key, value in {**BERT, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return load_processor(folder, modality="text", max_length=length)


def images(folder: Path, channels: int = 3, **changes: Any) -> Processor:
    """An image processor with some keys changed."""
    numbers = {"image_mean": [0.5] * channels, "image_std": [0.25] * channels}
    (folder / "preprocessor_config.json").write_text(json.dumps({**VIT, **numbers, **changes}))
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "num_channels": channels}))
    return load_processor(folder, modality="image")


def test_texts(tmp_path: Path) -> None:
    processor = texts(tmp_path)
    assert repr(processor) == "TextProcessor(max_length=40, segments=True)"
    batch = processor(["a good film", "bad"])
    assert batch["input_ids"].tolist() == [[2, 5, 6, 8, 3], [2, 7, 3, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0] * 5] * 2
    for types in (0, 1, None):  # only for models that have token types
        assert sorted(texts(tmp_path, type_vocab_size=types)(["a"])) == ["attention_mask", "input_ids"]
    (tmp_path / "config.json").unlink()
    assert "token_type_ids" in load_processor(tmp_path, modality="text")(["a"])


@pytest.mark.parametrize(
    ("length", "config", "expected"),
    [
        (128, {}, 40),
        (16, {}, 16),
        (128, {"max_position_embeddings": None}, 128),
        (128, {"model_type": "roberta", "pad_token_id": 1}, 38),
    ],
)
def test_texts_are_no_longer_than_the_model(length: int, config: dict[str, Any], expected: int, tmp_path: Path) -> None:
    processor = texts(tmp_path, length, **config)
    assert processor(["good " * 200])["input_ids"].shape == (1, expected)


def test_digests(tmp_path: Path) -> None:
    assert texts(tmp_path, 30).digest() == texts(tmp_path, 30).digest()
    processors = [texts(tmp_path, 30), texts(tmp_path, 20), texts(tmp_path, 30, type_vocab_size=1)]
    texts(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS[:-1], "never"]) + "\n")
    processors.append(load_processor(tmp_path, modality="text", max_length=30))
    assert images(tmp_path).digest() == images(tmp_path).digest()
    processors += [images(tmp_path), images(tmp_path, resample=3), images(tmp_path, channels=1)]
    processors += [PixelProcessor(8), PixelProcessor(9), PixelProcessor(8, std=(1.0,))]
    assert len({processor.digest() for processor in processors}) == len(processors)


def test_tokenizers_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompatibleError, match=r"has 11 tokens, but its model has 7; it is another model's"):
        texts(tmp_path, vocab_size=7)
    with pytest.raises(RecipeError, match=r"'max_length' must leave room for .*, got 2"):
        texts(tmp_path, 2)
    with pytest.raises(IncompatibleError, match="must be texts, got ndarray"):
        texts(tmp_path)([np.zeros((2, 2))])
    with monkeypatch.context() as patch:
        import transformers

        unpadded = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"), pad_token=None)
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: unpadded)
        with pytest.raises(CheckpointError, match="has no padding token"):
            texts(tmp_path)
    options = {"tokenizer_class": "BertTokenizer", "padding_side": "left"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(CheckpointError, match="pads texts on the left, so that features would depend on the batch"):
        load_processor(tmp_path, modality="text")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"transformers cannot load the tokenizer of"):
        texts(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(CheckpointError, match=r"has no vocabulary .*copy the tokenizer's files from the base"):
        load_processor(tmp_path, modality="text")


def test_grey_becomes_rgb(tmp_path: Path) -> None:
    grey = np.full((8, 8), 255, np.uint8)
    batch = images(tmp_path)([grey, np.zeros((5, 9, 3), np.uint8), np.zeros((3, 3, 1), np.uint8)])
    assert list(batch) == ["pixel_values"]
    assert batch["pixel_values"].shape == (3, 3, 8, 8)
    assert torch.allclose(batch["pixel_values"][0], torch.tensor(2.0))
    assert torch.allclose(batch["pixel_values"][1], torch.tensor(-2.0))
    processor = images(tmp_path, 1)
    assert processor([np.zeros((8, 8), np.uint8)])["pixel_values"].shape == (1, 1, 8, 8)
    with pytest.raises(IncompatibleError, match="reads images with 1 channel, got 3"):
        processor([np.zeros((8, 8, 3), np.uint8)])


def test_image_processors_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="transformers cannot load the image processor of"):
        images(tmp_path, image_processor_type="Nonsense")
    with pytest.raises(IncompatibleError, match=r"ViTImageProcessor\w* cannot make one batch of these images"):
        images(tmp_path, do_resize=False)([np.zeros((8, 8), np.uint8), np.zeros((9, 8), np.uint8)])
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"images is unknown; add preprocessor_config.json"):
        load_processor(tmp_path, modality="image")


def test_image_processors_in_other_places(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"image_size": 6, "num_channels": 1}}))
    assert load_processor(tmp_path, modality="image") == PixelProcessor(6, channels=1)
    (tmp_path / "config.json").write_text(json.dumps({"image_size": [6, 4]}))
    assert load_processor(tmp_path, modality="image") == PixelProcessor((6, 4))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": VIT}))
    assert isinstance(load_processor(tmp_path, modality="image"), ImageProcessor)


def test_pixels_by_hand() -> None:
    processor = PixelProcessor(2, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))
    values = processor([np.array([[0, 255], [51, 102]], np.uint8)])["pixel_values"]
    assert values.dtype == torch.float32
    expected = torch.tensor([[[0, 1], [0.2, 0.4]], [[-1, 1], [-0.6, -0.2]], [[-0.5, 0], [-0.4, -0.3]]])
    assert torch.allclose(values[0], expected)


def test_pixels_agree_with_the_stock_processor(tmp_path: Path) -> None:
    stock = images(tmp_path)
    plain = PixelProcessor(8, std=(0.25,))
    random = np.random.Generator(np.random.PCG64(0))
    same = [random.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(5)]
    assert torch.allclose(plain(same)["pixel_values"], stock(same)["pixel_values"], atol=1e-6)
    # Pillow rounds to bytes after each direction.
    other = [random.integers(0, 256, (20, 13), dtype=np.uint8) for _ in range(5)]
    assert torch.allclose(plain(other)["pixel_values"], stock(other)["pixel_values"], atol=4 * 1.6 / 255)


def test_pixels_of_mixed_sizes_are_those_of_each_alone() -> None:
    processor = PixelProcessor((4, 6))
    mixed = [np.full((4, 6), 7, np.uint8), np.zeros((9, 3, 3), np.uint8), np.eye(5, dtype=np.uint8) * 200]
    together = processor(mixed)["pixel_values"]
    assert together.shape == (3, 3, 4, 6)
    for image, values in zip(mixed, together, strict=True):
        assert torch.equal(processor([image])["pixel_values"][0], values)


def test_pixels_that_are_refused() -> None:
    with pytest.raises(RecipeError, match="1 or 3 channels and a size, got 2 and 8"):
        PixelProcessor(8, channels=2)
    with pytest.raises(RecipeError, match="1 or 3 channels and a size, got 3 and 0"):
        PixelProcessor(0)
    with pytest.raises(IncompatibleError, match=r"must be uint8 \[H, W\] or \[H, W, C\], got float64 \[2, 2\]"):
        PixelProcessor(8)([np.zeros((2, 2))])
    with pytest.raises(IncompatibleError, match="reads images with 3 channels, got 4"):
        PixelProcessor(8)([np.zeros((2, 2, 4), np.uint8)])


def numbers(count: int) -> Examples:
    return Examples([np.full((2, 2), n, np.uint8) for n in range(count)], None, "test")


def seen(processed: Sequence[dict[str, torch.Tensor]]) -> list[int]:
    return [round(float(value)) for batch in processed for value in batch["pixel_values"][:, 0, 0, 0]]


PLAIN: Processor = PixelProcessor(2, mean=(0.0,), std=(1 / 255,), channels=1)


def test_batches_lose_nothing() -> None:
    for count, size in ((10, 4), (8, 4), (3, 4), (1, 1), (0, 4)):
        processed = list(batches(numbers(count), PLAIN, size))
        assert seen(processed) == list(range(count))
        assert [len(batch["pixel_values"]) for batch in processed][:-1] == [size] * (len(processed) - 1)
    assert seen(list(batches(numbers(5), PLAIN, 2, order=[4, 0, 0, 3]))) == [4, 0, 0, 3]

    class Loses(PixelProcessor):
        def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
            return super().__call__(inputs[1:])

    with pytest.raises(
        IncompatibleError, match="must make one row per input, got 1 rows of 'pixel_values' from 2 inputs"
    ):
        next(batches(numbers(3), Loses(2), 2))
