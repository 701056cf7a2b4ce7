"""Tokenizer or image processor of a model: checking, copying and loading its files.

transformers loads them from a temporary folder that holds copies of these files and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.data.task import Modality
from orthomerge.files.documents import parse_json, read_json
from orthomerge.files.folders import contained
from orthomerge.files.raw_file import RawFile, digest_of
from orthomerge.models.processing import ImageProcessor, PixelProcessor, Processor, TextProcessor, json_digest
from orthomerge.models.skeleton import quiet, tower_config

# Files of tokenizers and processors, which are copied with a model.
COMPANIONS = (
    "added_tokens.json", "bpe.codes", "feature_extractor_config.json", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "spm.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
DEFAULT_LENGTH = 128  # tokens per text, for heads without a maximum length
_MOST_BYTES = 64 << 20
_VOCABULARIES = (("tokenizer.json",), ("vocab.txt",), ("*.model",), ("vocab.json", "merges.txt"))
_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
# The positions of these model types start after the id of the padding token.
_OFFSET = ("roberta", "xlm-roberta", "camembert")


@dataclass(frozen=True, eq=False)
class ProcessorSource:
    """Source of a processor: `files` of a `folder` with `hashes`, or a `live` object. `config`: the encoder's."""

    modality: str
    config: Mapping[str, Any]
    folder: Path | None = None
    files: tuple[str, ...] = ()
    live: Any = None
    hashes: Mapping[str, str] = field(default_factory=dict)
    _loaded: dict[int, Processor] = field(default_factory=dict, init=False, repr=False)  # by maximum length

    @classmethod
    def of(cls, folders: Iterable[Path], modality: str, config: Mapping[str, Any]) -> ProcessorSource:
        """Make a source from the first folder that has any of the files."""
        for folder in folders:
            if names := tuple(path.name for path in companions(folder)):
                return cls(modality, config, folder, names)
        return cls(modality, config)

    def processor(self, max_length: int | None = None) -> Processor:
        """Load the processor; texts are cut at `max_length` tokens or at the model's number of positions.

        If there are no files of an image processor, one is made from the config: `image_size`, pixels from -1 to 1.
        """
        if self.modality not in ("text", "image"):
            raise CheckpointError("a generic model has no processor; process the inputs yourself")
        length = max_length or DEFAULT_LENGTH
        if length not in self._loaded:
            with TemporaryDirectory(prefix="orthomerge-") as place:
                copy = Path(place)
                self.write(copy)
                self._loaded[length] = self._text(copy, length) if self.modality == "text" else self._image(copy)
        return self._loaded[length]

    def write(self, folder: Path) -> list[str]:
        if self.live is not None:
            before = {path.name for path in folder.iterdir()}
            self.live.save_pretrained(folder)
            return sorted({path.name for path in folder.iterdir() if path.is_file()} - before)
        if self.folder is None:
            return []
        for name in self.files:
            (folder / name).write_bytes(_content(self.folder / name, self.folder, self.hashes.get(name)))
        return list(self.files)

    def _text(self, copy: Path, max_length: int) -> TextProcessor:
        config, where = tower_config(self.config, "text_config"), f"{self.folder or 'the live model'}"
        if self.live is None and self.folder is None:
            raise CheckpointError("neither base nor experts have a tokenizer; copy its files to the base")
        if not any(all(any(copy.glob(name)) for name in names) for names in _VOCABULARIES):
            # transformers would make a tokenizer without any words.
            raise CheckpointError(
                f"{where} has no vocabulary (tokenizer.json, vocab.txt, a sentencepiece model, or vocab.json and "
                "merges.txt); copy the tokenizer's files from the base"
            )
        named = {key: config[key] for key in ("model_type", "tokenizer_class") if key in config}
        tokenizer = _load("AutoTokenizer", copy, f"the tokenizer of {where}", named=named)
        if tokenizer.pad_token is None:
            raise CheckpointError(f"the tokenizer of {where} has no padding token; set 'pad_token' in its config")
        if tokenizer.padding_side != "right":  # else the first token, which many heads read, would be padding
            raise CheckpointError(
                f"the tokenizer of {where} pads texts on the {tokenizer.padding_side}, so that features would depend "
                "on the batch; set 'padding_side' to 'right' in its tokenizer_config.json"
            )
        rows = config.get("vocab_size")
        if isinstance(rows, int) and len(tokenizer) > rows:
            raise IncompatibleError(
                f"the tokenizer of {where} has {len(tokenizer)} tokens, but its model has {rows}; it is another "
                "model's, so copy the right files from the base"
            )
        longest = min(max_length, tokenizer.model_max_length, _positions(config))
        if longest <= tokenizer.num_special_tokens_to_add():
            raise RecipeError(f"'max_length' must leave room for more than special tokens, got {longest}; increase it")
        segment_types = config.get("type_vocab_size")
        has_segments = not config or (isinstance(segment_types, int) and segment_types > 1)
        segments = has_segments and "token_type_ids" in tokenizer.model_input_names
        return TextProcessor(tokenizer, longest, segments, _digest_files(copy))

    def _image(self, copy: Path) -> ImageProcessor | PixelProcessor:
        config, where = tower_config(self.config, "vision_config"), f"{self.folder or 'the model'}"
        channels = config.get("num_channels", 3)
        nested = (copy / _PROCESSOR).is_file() and "image_processor" in read_json(copy / _PROCESSOR)
        if nested or (copy / _PREPROCESSOR).is_file():
            # Resize with Pillow: torchvision is optional and gives other values.
            loaded = _load("AutoImageProcessor", copy, f"the image processor of {where}", use_fast=False)
            return ImageProcessor(loaded, channels, _digest_files(copy))
        size: Any = config.get("image_size")
        sides = size if isinstance(size, list) else [size, size]
        if len(sides) != 2 or not all(type(side) is int for side in sides):
            raise CheckpointError(
                f"the size of {where}'s images is unknown; add {_PREPROCESSOR}, or 'image_size' in its config"
            )
        return PixelProcessor((sides[0], sides[1]) if isinstance(size, list) else sides[0], channels=channels)


def load_processor(folder: Path, *, modality: Modality, max_length: int = DEFAULT_LENGTH) -> Processor:
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return ProcessorSource.of([folder], modality, config).processor(max_length)


def companions(folder: Path) -> list[Path]:
    """List the tokenizer and processor files of a folder; a link that leaves the folder is an error."""
    if not folder.is_dir():
        return []
    paths = [folder / name for name in COMPANIONS]
    return [_checked(path, folder) for path in paths if path.is_file() or path.is_symlink()]


def _content(path: Path, folder: Path, expected: str | None) -> bytes:
    """Read a companion; a changed file, or one that asks to run its own code, is an error."""
    file = RawFile(_checked(path, folder))
    data = file.bytes(0, file.size)
    if expected is not None and digest_of(data) != expected:
        raise CheckpointError(f"{path} has changed since it was written; fetch the folder again, or merge again")
    if path.name.endswith("_config.json") and (code := parse_json(data, str(path)).get("auto_map")):
        raise CheckpointError(
            f"{path} asks to run its own code ('auto_map': {code!r:.80}), which is never done; if the stock class does "
            "the same, remove 'auto_map' from the file, else copy the base's files"
        )
    return data


def _checked(path: Path, folder: Path) -> Path:
    contained(path, folder)
    if not path.is_file():
        raise CheckpointError(f"{path} is a link to nothing; fetch the file again, or remove the link")
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise CheckpointError(
            f"{path} must have at most {_MOST_BYTES} bytes, as a file of a tokenizer or processor, got {size}; fetch "
            "it again, or remove it"
        )
    return path


def _load(loader: str, folder: Path, what: str, *, named: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Load a folder with an auto class of transformers; `named`: keys of the config that select the class."""
    with quiet():
        import transformers

        try:
            if named and "model_type" in named:
                options["config"] = transformers.AutoConfig.for_model(**named)
            return getattr(transformers, loader).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
        except Exception as error:  # of any class, by kind of tokenizer or processor
            raise CheckpointError(
                f"transformers cannot load {what}: {error}; fetch its files again, or copy those of the base"
            ) from error


def _positions(config: Mapping[str, Any]) -> int:
    """Largest number of tokens by the config of a model; a huge number if positions are relative."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        return 1 << 30
    return positions - (config.get("pad_token_id", 1) + 1 if config.get("model_type") in _OFFSET else 0)


def _digest_files(folder: Path) -> str:
    return json_digest({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
