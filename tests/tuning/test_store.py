"""Inputs that are kept give the very batches that the processor makes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.data.task import Examples
from orthomerge.models.processing import ImageProcessor, PixelProcessor, TextProcessor
from orthomerge.models.processors import load_processor
from orthomerge.tuning.batches import Feed, epoch_order
from orthomerge.tuning.store import Room, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from orthomerge.models.processing import Processor
    from orthomerge.tuning.batches import Batch

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


def check(source: Examples, processor: Processor) -> None:
    """Every batch of an epoch, of two sizes and of one."""
    kept, fresh = Feed([source], processor, CPU, room=Room(MUCH)), Feed([source], processor, CPU)
    assert make_store(source, processor, CPU, Room(MUCH)) is not None
    for size in (1, 7, len(source)):
        for place in epoch_order([len(source)], size, seed=0, epoch=0):
            (batch, labels), (expected, known) = kept.batch(place), fresh.batch(place)
            assert same(batch, expected)
            assert labels.equal(known)


@pytest.fixture
def tokens(berts: Path) -> Callable[..., TextProcessor]:
    def load(**changes: Any) -> TextProcessor:
        processor = load_processor(berts / "base", modality="text", max_length=10)
        assert isinstance(processor, TextProcessor)
        for name, value in changes.items():
            setattr(processor.tokenizer, name, value)
        return processor

    return load


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_padded_as_the_tokenizer_does(side: str, tokens: Callable[..., TextProcessor]) -> None:
    processor = tokens(padding_side=side)
    lengths = processor(texts().inputs)["attention_mask"].sum(1)
    assert (int(lengths.min()), int(lengths.max())) == (2, 10)  # an empty one, and some that are cut
    check(texts(), processor)


def test_any_padding_value(tokens: Callable[..., TextProcessor]) -> None:
    processor = tokens(pad_token="[MASK]", _pad_token_type_id=1)
    batch = processor(["a", "a good film"])
    assert [int(batch[name][0, -1]) for name in ("input_ids", "token_type_ids")] == [4, 1]
    check(texts(), processor)
    check(texts(), TextProcessor(processor.tokenizer, 10, False, ""))  # without token types


@pytest.mark.parametrize(
    "shapes", [[(28, 28)], [(32, 32, 3)], [(28, 28, 3)], [(45, 30)], [(28, 28), (32, 32, 3), (20, 41)]]
)
@pytest.mark.parametrize("size", [32, (16, 24)])
def test_pixels(shapes: list[tuple[int, ...]], size: int | tuple[int, int]) -> None:
    check(images(*shapes), PixelProcessor(size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)))


def test_grey_pixels_for_one_channel() -> None:
    check(images((8, 8)), PixelProcessor(8, channels=1))


def test_an_image_processor_of_transformers(tmp_path: Path) -> None:
    options = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 16, "width": 16},
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.3, 0.4],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    processor = load_processor(tmp_path, modality="image")
    assert isinstance(processor, ImageProcessor)
    check(images((28, 28), (20, 31, 3)), processor)
    check(images((16, 16, 3)), processor)


def test_what_was_kept_is_not_read_again(tokens: Callable[..., TextProcessor]) -> None:
    for source, processor in ((texts(), tokens()), (images((8, 8)), PixelProcessor(8))):
        feed, fresh = (Feed([source], processor, CPU, room=room) for room in (Room(MUCH), None))
        place = (0, [3, 1])
        before, _ = feed.batch(place)
        before[next(iter(before))].zero_()  # the caller's to change
        expected, _ = fresh.batch(place)
        assert isinstance(source.inputs, list)
        source.inputs[:] = [None] * len(source)
        assert same(feed.batch(place)[0], expected)


def test_only_what_fits_is_kept(tokens: Callable[..., TextProcessor]) -> None:
    source, processor = images((8, 8), count=10), PixelProcessor(8, channels=1)
    size = 10 * 8 * 8 * 4
    room = Room(2 * size - 1)
    assert make_store(source, processor, CPU, room) is not None
    assert room.left == size - 1
    assert make_store(source, processor, CPU, room) is None
    assert room.left == size - 1
    assert make_store(texts(5), tokens(), CPU, Room(2 * 5 * 10 * 8 - 1)) is None
    assert make_store(texts(5), tokens(), CPU, Room(2 * 5 * 10 * 8)) is not None
    feed = Feed([source, source], processor, CPU, room=Room(size))
    batches = [batch for _, batch, _ in feed.batches([(0, [1, 2]), (1, [1, 2])])]
    assert same(*batches)


def test_unknown_processors_and_empty_sources_are_not_kept(
    processors: dict[str, Any], tokens: Callable[..., TextProcessor]
) -> None:
    assert make_store(Examples(["3 4"], None, "train"), processors["text"], CPU, Room(MUCH)) is None
    assert make_store(images((8, 8, 3)), processors["image"], CPU, Room(MUCH)) is None
    assert make_store(Examples([], None, "val"), tokens(), CPU, Room(MUCH)) is None


def test_texts_without_tokens_are_left_to_the_processor(berts: Path) -> None:
    with_nothing = load_processor(berts / "base", modality="text")
    assert isinstance(with_nothing, TextProcessor)
    bare = Bare(with_nothing.tokenizer)
    source = Examples(["a", ""], None, "train")
    assert make_store(source, TextProcessor(bare, 10, True, ""), CPU, Room(MUCH)) is None


class Bare:
    """A tokenizer that puts nothing around a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, inputs: Sequence[str], **options: Any) -> Any:
        return self._tokenizer(inputs, add_special_tokens=False, **options)


def test_images_whose_size_depends_on_themselves_are_not_kept(tmp_path: Path) -> None:
    options = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 8},
        "do_center_crop": False,
        "do_convert_rgb": False,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    processor = load_processor(tmp_path, modality="image")
    wide = images((8, 16, 3), count=1).inputs
    for count in (10, 1024):  # in one chunk, and in two
        source = Examples([*images((8, 8, 3), count=count).inputs, *wide], None, "train")
        assert make_store(source, processor, CPU, Room(MUCH)) is None
    feed = Feed([source], processor, CPU, room=Room(MUCH))
    assert feed.batch((0, [1024]))[0]["pixel_values"].shape == (1, 3, 8, 16)
    with pytest.raises(IncompatibleError, match="cannot make one batch of these images"):
        feed.batch((0, [0, 1024]))


def test_rows_that_there_are_not() -> None:
    feed = Feed([images((8, 8))], PixelProcessor(8), CPU, room=Room(MUCH))
    for rows in ([-1], [30]):
        with pytest.raises(RecipeError, match="an order must have places from 0 to 29"):
            feed.batch((0, rows))
