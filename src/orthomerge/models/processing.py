"""From inputs to what an encoder reads: texts through the model's tokenizer, images through its processor.

A digest says which files and options made the numbers, so that features can be cached by content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.data.task import pick
from orthomerge.files.documents import read_json
from orthomerge.models.load import quiet
from orthomerge.models.pixels import PixelProcessor, with_channels

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Examples, Modality


_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
_TOKENIZER = (*_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
# These count positions from the padding token's id on.
_OFFSET = ("roberta", "xlm-roberta", "camembert")


class Processor(Protocol):
    """Makes a batch of tensors from inputs, a row for each, in their order."""

    @property
    def modality(self) -> Modality: ...

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]: ...

    def digest(self) -> str: ...


@dataclass(frozen=True)
class TextProcessor:
    """A tokenizer; texts are cut at `max_length` tokens and padded to the longest of their batch, with a mask.

    `segments`: whether the model has token types.
    """

    modality: ClassVar[Modality] = "text"
    tokenizer: Any = field(repr=False)
    max_length: int
    segments: bool
    files: str = field(repr=False)

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        strange = next((item for item in inputs if not isinstance(item, str)), None)
        if strange is not None:
            raise IncompatibleError(f"a tokenizer reads texts, got {type(strange).__name__}")
        encoded = self.tokenizer(
            list(inputs),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=True,
            return_token_type_ids=self.segments,
            return_tensors="pt",
        )
        return dict(encoded)

    def digest(self) -> str:
        return _hash({"files": self.files, "max_length": self.max_length, "segments": self.segments})


@dataclass(frozen=True)
class ImageProcessor:
    """An image processor of transformers; grey images become RGB for a model that has three channels."""

    modality: ClassVar[Modality] = "image"
    processor: Any = field(repr=False)
    channels: int
    files: str = field(repr=False)

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        images = [with_channels(image, self.channels) for image in inputs]
        try:
            encoded = self.processor(images=images, return_tensors="pt", input_data_format="channels_last")
        except ValueError as error:
            raise IncompatibleError(
                f"{type(self.processor).__name__} cannot make one batch of these images: {error}"
            ) from error
        return dict(encoded)

    def digest(self) -> str:
        return _hash({"files": self.files, "channels": self.channels})


def load_processor(
    folder: Path | None,
    *,
    modality: Modality,
    max_length: int = 128,
    config: Mapping[str, Any] | None = None,
    where: Path | None = None,
) -> Processor:
    """The processor that a model's folder holds; `config`: of the model, as in the folder if it is not given. `where`:
    the folder's name in messages, if it is a copy of another.

    Texts are never longer than the model has positions. Without an image processor one is made from the config: resized
    to `image_size`, pixels from -1 to 1.
    """
    if config is None:
        there = folder is not None and (folder / "config.json").is_file()
        config = read_json(folder / "config.json") if folder is not None and there else {}
    where = where or folder
    if modality == "text":
        config = _merged(config, "text_config")
        if folder is None:
            raise CheckpointError("there is no tokenizer beside the base or an expert; copy its files to the base")
        tokenizer = _tokenizer(folder, config, f"{where}")
        return _limited(tokenizer, config, max_length, f"{where}", _digest_files(folder, _TOKENIZER))
    return _load_image(folder, _merged(config, "vision_config"), f"{where or 'the model'}")


def live_processor(live: Any, config: Mapping[str, Any], *, modality: Modality, max_length: int) -> Processor:
    """The processor around a tokenizer or image processor in memory."""
    with TemporaryDirectory() as place:
        live.save_pretrained(place)
        digest = _digest_files(Path(place), ("*",))
    if modality == "text":
        config = _merged(config, "text_config")
        return _limited(live, config, max_length, "the live model", digest)
    return ImageProcessor(live, _merged(config, "vision_config").get("num_channels", 3), digest)


def batches(
    examples: Examples, processor: Processor, size: int, *, order: Sequence[int] | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """All examples in batches of `size`, the last one as small as it must be; in the order of `order`, if given."""
    if size < 1:
        raise RecipeError(f"the batch size must be at least 1, got {size}")
    places = range(len(examples)) if order is None else order
    if len(places) and (min(places) < 0 or max(places) >= len(examples)):
        raise RecipeError(
            f"an order must have places from 0 to {len(examples) - 1}, got {min(places)} to {max(places)}"
        )
    return _batches(examples.inputs, processor, size, places)


def _batches(
    inputs: Sequence[Any], processor: Processor, size: int, places: Sequence[int]
) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(places), size):
        chunk = places[start : start + size]
        batch = processor(pick(inputs, chunk))
        for name, tensor in batch.items():
            if len(tensor) != len(chunk):
                raise IncompatibleError(f"the processor made {len(tensor)} rows of {name!r} from {len(chunk)} inputs")
        yield batch


def _tokenizer(folder: Path, config: Mapping[str, Any], where: str) -> Any:
    if not _matching(folder, _VOCABULARIES):
        # transformers would make a tokenizer that knows no word.
        raise CheckpointError(
            f"{where} has no vocabulary (tokenizer.json, vocab.txt or a sentencepiece model); "
            "copy the tokenizer's files from the base"
        )
    _refuse_code(folder / "tokenizer_config.json", "AutoTokenizer")
    with quiet():
        from transformers import AutoConfig, AutoTokenizer

        options: dict[str, Any] = {}
        if not (folder / "config.json").is_file() and "model_type" in config:
            named = {key: config[key] for key in ("tokenizer_class",) if key in config}
            options["config"] = AutoConfig.for_model(config["model_type"], **named)  # which class of tokenizer it is
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # of whatever class: each kind of tokenizer has its own
            raise CheckpointError(f"transformers cannot load the tokenizer of {where}: {error}") from error


def _limited(tokenizer: Any, config: Mapping[str, Any], max_length: int, where: str, digest: str) -> TextProcessor:
    """A tokenizer that makes no text longer than the model has positions."""
    if tokenizer.pad_token is None:
        raise CheckpointError(f"the tokenizer of {where} has no padding token, so that texts cannot share a batch")
    rows = config.get("vocab_size")
    if isinstance(rows, int) and len(tokenizer) > rows:
        raise IncompatibleError(
            f"the tokenizer of {where} knows {len(tokenizer)} tokens, but its model has {rows}; it is another model's"
        )
    longest = min(max_length, tokenizer.model_max_length, _positions(config))
    if longest <= tokenizer.num_special_tokens_to_add():
        raise RecipeError(f"'max_length' must leave room for a text beside the special tokens, got {longest}")
    types = config.get("type_vocab_size")
    segments = "token_type_ids" in tokenizer.model_input_names and (
        not config or (isinstance(types, int) and types > 1)
    )
    return TextProcessor(tokenizer, longest, segments, digest)


def _load_image(folder: Path | None, config: Mapping[str, Any], where: str) -> ImageProcessor | PixelProcessor:
    channels = config.get("num_channels", 3)
    nested = (
        folder is not None and (folder / _PROCESSOR).is_file() and "image_processor" in read_json(folder / _PROCESSOR)
    )
    if folder is None or (not nested and not (folder / _PREPROCESSOR).is_file()):
        size = config.get("image_size")
        if not isinstance(size, int | list):
            raise CheckpointError(
                f"{where} says nothing about its images: it needs {_PREPROCESSOR}, or a config with 'image_size'"
            )
        return PixelProcessor(size if isinstance(size, int) else (size[0], size[1]), channels=channels)
    for name in (_PREPROCESSOR, _PROCESSOR):
        _refuse_code(folder / name, "AutoImageProcessor")
    with quiet():
        from transformers import AutoImageProcessor

        try:
            # Pillow's resizing, not torchvision's: that one need not be installed, and gives other numbers.
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_fast=False
            )
        except Exception as error:  # as above
            raise CheckpointError(f"transformers cannot load the image processor of {where}: {error}") from error
    return ImageProcessor(processor, channels, _digest_files(folder, (_PREPROCESSOR, _PROCESSOR)))


def _refuse_code(path: Path, kind: str) -> None:
    """Refuse a tokenizer or processor that asks for Python code of its own."""
    asked = read_json(path).get("auto_map") if path.is_file() else None
    if isinstance(asked, Mapping) and kind in asked:
        raise CheckpointError(
            f"{path} asks to run code that came with it ('auto_map': {asked[kind]!r:.80}), which is never done; if the "
            "stock class does the same, take 'auto_map' out of the file, else copy the files of one from the base"
        )


def _positions(config: Mapping[str, Any]) -> int:
    """How many tokens a model has positions for; very many where positions are relative."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        return 1 << 30
    return positions - (config.get("pad_token_id", 1) + 1 if config.get("model_type") in _OFFSET else 0)


def _merged(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    nested = config.get(part)
    return {**config, **nested} if isinstance(nested, dict) else config


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(
        path for path in folder.glob("*") if path.is_file() and any(fnmatchcase(path.name, p) for p in patterns)
    )


def _digest_files(folder: Path, patterns: tuple[str, ...]) -> str:
    return _hash({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _matching(folder, patterns)})


def _hash(options: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
