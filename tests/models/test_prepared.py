"""A pool of inputs: its batches are those of the processor, and what does not fit is processed as it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orthomerge.core.errors import IncompatibleError
from orthomerge.data.task import Examples
from orthomerge.models.prepared import Batch, Part, Pool
from orthomerge.models.processing import ImageProcessor, PixelProcessor, Processor, TextProcessor
from orthomerge.models.processors import load_processor

CPU = torch.device("cpu")
WORDS = ("a", "good", "bad", "film", "very", "unknown")
MUCH = 1 << 30


def texts(count: int = 60) -> Examples:
    """Of 0 to 11 words, more than there are positions for some."""
    random = np.random.default_rng(0)
    made = [" ".join(random.choice(WORDS, random.integers(0, 12))) for _ in range(count)]
    return Examples(made, random.integers(0, 2, count), "train")


def images(*shapes: tuple[int, ...], count: int = 30) -> Examples:
    """Shapes take turns."""
    random = np.random.default_rng(0)
    made = [random.integers(0, 256, shapes[number % len(shapes)]).astype(np.uint8) for number in range(count)]
    return Examples(made, random.integers(0, 2, count), "train")


def same(first: Batch, second: Batch) -> bool:
    """Names in their order, dtypes and bytes."""
    return list(first) == list(second) and all(
        tensor.dtype == second[name].dtype and tensor.equal(second[name]) for name, tensor in first.items()
    )


def pool_of(source: Examples, processor: Processor, room: int = MUCH) -> Pool:
    return Pool.of([Part(source, processor)], CPU, room=room)


def check(source: Examples, processor: Processor) -> None:
    """Every batch of an epoch, of two sizes and of one."""
    kept, fresh = pool_of(source, processor), pool_of(source, processor, 0)
    assert kept.kept is not None
    assert fresh.kept is None
    for size in (1, 7, len(source)):
        for rows in torch.split(torch.randperm(len(source), generator=torch.Generator().manual_seed(0)), size):
            expected = processor([source.inputs[row] for row in rows.tolist()])
            assert same(kept.batch(rows), expected)
            assert same(fresh.batch(rows), expected)


def tokens(berts: Path, **changes: Any) -> TextProcessor:
    processor = load_processor(berts / "base", modality="text", max_length=10)
    assert isinstance(processor, TextProcessor)
    for name, value in changes.items():
        setattr(processor.tokenizer, name, value)
    return processor


def test_texts_are_padded_as_the_tokenizer_does(berts: Path) -> None:
    processor = tokens(berts)
    lengths = processor(texts().inputs)["attention_mask"].sum(1)
    assert (int(lengths.min()), int(lengths.max())) == (2, 10)  # an empty one, and some that are cut
    check(texts(), processor)


def test_any_padding_value(berts: Path) -> None:
    processor = tokens(berts, pad_token="[MASK]", _pad_token_type_id=1)
    batch = processor(["a", "a good film"])
    assert [int(batch[name][0, -1]) for name in ("input_ids", "token_type_ids")] == [4, 1]
    check(texts(), processor)
    check(texts(), TextProcessor(processor.tokenizer, 10, False, ""))  # without token types


@pytest.mark.parametrize("shapes", [[(28, 28)], [(32, 32, 3)], [(28, 28), (32, 32, 3), (20, 41)]])
def test_pixels(shapes: list[tuple[int, ...]]) -> None:
    check(images(*shapes), PixelProcessor((16, 24), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)))
    check(images((8, 8)), PixelProcessor(8, channels=1))


def image_processor(folder: Path, kind: str, **options: Any) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **options}))
    processor = load_processor(folder, modality="image")
    assert isinstance(processor, ImageProcessor)
    return processor


def test_an_image_processor_of_transformers(tmp_path: Path) -> None:
    numbers = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    processor = image_processor(tmp_path, "ViTImageProcessor", size={"height": 16, "width": 16}, **numbers)
    check(images((28, 28), (20, 31, 3)), processor)
    check(images((16, 16, 3)), processor)


def test_what_was_kept_is_not_read_again(berts: Path) -> None:
    for source, processor in ((texts(), tokens(berts)), (images((8, 8)), PixelProcessor(8))):
        pool, rows = pool_of(source, processor), torch.tensor([3, 1])
        before = pool.batch(rows)
        before[next(iter(before))].zero_()  # the caller's to change
        expected = pool_of(source, processor, 0).batch(rows)
        assert isinstance(source.inputs, list)
        source.inputs[:] = [None] * len(source)
        assert same(pool.batch(rows), expected)


def test_only_what_fits_is_kept() -> None:
    source, processor = images((8, 8), count=10), PixelProcessor(8, channels=1)
    size = 10 * 8 * 8 * 4
    assert pool_of(source, processor, size).kept is not None
    assert pool_of(source, processor, size - 1).kept is None
    assert pool_of(Examples([], None, "val"), processor).kept is None


def test_images_whose_size_depends_on_themselves_are_not_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"size": {"shortest_edge": 8}, "do_center_crop": False, "do_convert_rgb": False}
    processor = image_processor(tmp_path, "CLIPImageProcessor", **options)
    wide = images((8, 16, 3), count=1).inputs
    for count in (10, 1024):  # in one chunk, and in several
        pool = pool_of(Examples([*images((8, 8, 3), count=count).inputs, *wide], None, "train"), processor)
        assert pool.kept is None
    assert pool.batch(torch.tensor([1024]))["pixel_values"].shape == (1, 3, 8, 16)
    with pytest.raises(IncompatibleError, match="cannot make one batch of these images"):
        pool.batch(torch.tensor([0, 1024]))
