"""Tokenizers keep their mask, grey images become RGB, and no example is lost on the way to a batch or to a pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.data.task import Examples
from orthomerge.models.prepared import Batch, Part, Pool
from orthomerge.models.processing import ImageProcessor, PixelProcessor, Processor, TextProcessor, batches
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


def test_texts_are_no_longer_than_the_model(tmp_path: Path) -> None:
    def longest(length: int = 128, **config: Any) -> int:
        return texts(tmp_path, length, **config)(["good " * 200])["input_ids"].shape[1]

    assert (longest(), longest(16), longest(max_position_embeddings=None)) == (40, 16, 128)
    assert longest(model_type="roberta", pad_token_id=1) == 38


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
    assert images(tmp_path, 1)([grey])["pixel_values"].shape == (1, 1, 8, 8)
    with pytest.raises(IncompatibleError, match="reads images with 1 channel, got 3"):
        images(tmp_path, 1)([np.zeros((8, 8, 3), np.uint8)])


def test_image_processors_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="transformers cannot load the image processor of"):
        images(tmp_path, image_processor_type="Nonsense")
    with pytest.raises(IncompatibleError, match=r"ViTImageProcessor\w* cannot make one batch of these images"):
        images(tmp_path, do_resize=False)([np.zeros((8, 8), np.uint8), np.zeros((9, 8), np.uint8)])
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"images is unknown; add preprocessor_config.json"):
        load_processor(tmp_path, modality="image")


def test_image_processors_in_other_places(tmp_path: Path) -> None:
    grey: dict[str, Any] = {"vision_config": {"image_size": 6, "num_channels": 1}}
    for config, expected in ((grey, PixelProcessor(6, channels=1)), ({"image_size": [6, 4]}, PixelProcessor((6, 4)))):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_processor(tmp_path, modality="image") == expected
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


def test_pixels_that_are_refused() -> None:
    for channels, size in ((2, 8), (3, 0)):
        with pytest.raises(RecipeError, match=f"1 or 3 channels and a size, got {channels} and {size}"):
            PixelProcessor(size, channels=channels)
    with pytest.raises(IncompatibleError, match=r"must be uint8 \[H, W\] or \[H, W, C\], got float64 \[2, 2\]"):
        PixelProcessor(8)([np.zeros((2, 2))])
    with pytest.raises(IncompatibleError, match="reads images with 3 channels, got 4"):
        PixelProcessor(8)([np.zeros((2, 2, 4), np.uint8)])


def test_batches_lose_nothing() -> None:
    plain = PixelProcessor(2, mean=(0.0,), std=(1 / 255,), channels=1)

    def seen(count: int, size: int, **order: Any) -> list[list[int]]:
        """The numbers that the inputs consist of, by batch."""
        inputs = Examples([np.full((2, 2), number, np.uint8) for number in range(count)], None, "test")
        made = batches(inputs, plain, size, **order)
        return [batch["pixel_values"][:, 0, 0, 0].round().int().tolist() for batch in made]

    for count, size in ((10, 4), (8, 4), (3, 4), (1, 1), (0, 4)):
        assert seen(count, size) == [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    assert seen(5, 2, order=[4, 0, 0, 3]) == [[4, 0], [0, 3]]

    loses = Mock(side_effect=lambda inputs: plain(inputs[1:]))
    with pytest.raises(IncompatibleError, match="one row per input, got 1 rows of 'pixel_values' from 2 inputs"):
        next(batches(some_images((2, 2)), loses, 2))


# Pools: what fits is kept, and batches are those of the processor


def some_texts() -> Examples:
    """Of 0 to 11 words, more than there are positions for some."""
    random = np.random.default_rng(0)
    made = [" ".join(random.choice([*WORDS[5:], "unknown"], random.integers(0, 12))) for _ in range(60)]
    return Examples(made, random.integers(0, 2, 60), "train")


def some_images(*shapes: tuple[int, ...], count: int = 30) -> Examples:
    """Shapes take turns."""
    random = np.random.default_rng(0)
    made = [random.integers(0, 256, shapes[number % len(shapes)]).astype(np.uint8) for number in range(count)]
    return Examples(made, random.integers(0, 2, count), "train")


def same(first: Batch, second: Batch) -> None:
    """Names in their order, dtypes and bytes."""
    assert list(first) == list(second)
    torch.testing.assert_close(dict(first), dict(second), rtol=0, atol=0)


def pool_of(source: Examples, processor: Processor, room: int = 1 << 30) -> Pool:
    return Pool.of([Part(source, processor)], torch.device("cpu"), room=room)


def check(source: Examples, processor: Processor) -> None:
    """Every batch of an epoch, of two sizes and of one."""
    kept, fresh = pool_of(source, processor), pool_of(source, processor, 0)
    assert kept.kept is not None
    assert fresh.kept is None
    for size in (1, 7, len(source)):
        for rows in torch.split(torch.randperm(len(source), generator=torch.Generator().manual_seed(0)), size):
            expected = processor([source.inputs[row] for row in rows.tolist()])
            same(kept.batch(rows), expected)
            same(fresh.batch(rows), expected)


def test_texts_of_a_pool_are_padded_as_the_tokenizer_does(tmp_path: Path) -> None:
    processor = texts(tmp_path, 10)
    assert isinstance(processor, TextProcessor)
    lengths = processor(some_texts().inputs)["attention_mask"].sum(1)
    assert (int(lengths.min()), int(lengths.max())) == (2, 10)  # an empty one, and some that are cut
    check(some_texts(), processor)
    processor.tokenizer.pad_token, processor.tokenizer._pad_token_type_id = "[MASK]", 1
    batch = processor(["a", "a good film"])
    assert [int(batch[name][0, -1]) for name in ("input_ids", "token_type_ids")] == [4, 1]
    check(some_texts(), processor)
    check(some_texts(), TextProcessor(processor.tokenizer, 10, False, ""))  # without token types


@pytest.mark.parametrize("shapes", [[(28, 28)], [(32, 32, 3)], [(28, 28), (32, 32, 3), (20, 41)]])
def test_images_of_a_pool(shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Images of mixed sizes are processed as each alone is."""
    check(some_images(*shapes), PixelProcessor((16, 24), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)))
    check(some_images((8, 8)), PixelProcessor(8, channels=1))
    numbers: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    check(some_images(*shapes), images(tmp_path, size={"height": 32, "width": 32}, **numbers))


def test_what_was_kept_is_not_read_again(tmp_path: Path) -> None:
    for source, processor in ((some_texts(), texts(tmp_path)), (some_images((8, 8)), PixelProcessor(8))):
        pool, rows = pool_of(source, processor), torch.tensor([3, 1])
        before = pool.batch(rows)
        before[next(iter(before))].zero_()  # the caller's to change
        expected = pool_of(source, processor, 0).batch(rows)
        assert isinstance(source.inputs, list)
        source.inputs[:] = [None] * len(source)
        same(pool.batch(rows), expected)


def test_only_what_fits_is_kept() -> None:
    source, processor = some_images((8, 8), count=10), PixelProcessor(8, channels=1)
    size = 10 * 8 * 8 * 4
    assert pool_of(source, processor, size).kept is not None
    assert pool_of(source, processor, size - 1).kept is None
    assert pool_of(Examples([], None, "val"), processor).kept is None


def test_images_whose_size_depends_on_themselves_are_not_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"size": {"shortest_edge": 8}, "do_center_crop": False, "do_convert_rgb": False}
    processor = images(tmp_path, image_processor_type="CLIPImageProcessor", **options)
    wide = some_images((8, 16, 3), count=1).inputs
    for count in (10, 1024):  # in one chunk, and in several
        pool = pool_of(Examples([*some_images((8, 8, 3), count=count).inputs, *wide], None, "train"), processor)
        assert pool.kept is None
    assert pool.batch(torch.tensor([1024]))["pixel_values"].shape == (1, 3, 8, 16)
    with pytest.raises(IncompatibleError, match="cannot make one batch of these images"):
        pool.batch(torch.tensor([0, 1024]))
