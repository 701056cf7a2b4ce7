"""The tokenizer or image processor of a model: its files, which are checked and copied, and the object made of them.

transformers reads a copy of these files in a folder of our own, in which nothing else lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.data.task import Modality
from orthomerge.files.documents import parse_json, read_json
from orthomerge.files.folders import contained
from orthomerge.files.raw_file import RawFile, is_digest_of
from orthomerge.models.processing import ImageProcessor, PixelProcessor, Processor, TextProcessor, json_digest
from orthomerge.models.skeleton import quiet

# Files without which the encoder cannot be used.
COMPANIONS = (
    "added_tokens.json", "bpe.codes", "feature_extractor_config.json", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "spm.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
DEFAULT_LENGTH = 128  # tokens per text where a head does not say
_MOST_BYTES = 64 << 20
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
# These count positions from the padding token's id on.
_OFFSET = ("roberta", "xlm-roberta", "camembert")


@dataclass(frozen=True, eq=False)
class ProcessorSource:
    """Where a processor comes from: `files` of a `folder`, or `live`, an object in memory.

    `config`: of the encoder. `hashes`: of the files, if known.
    """

    modality: str
    config: Mapping[str, Any]
    folder: Path | None = None
    files: tuple[str, ...] = ()
    live: Any = None
    hashes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folders: Iterable[Path], modality: str, config: Mapping[str, Any]) -> ProcessorSource:
        """The files of the first folder that has any."""
        for folder in folders:
            if names := tuple(path.name for path in companions(folder)):
                return cls(modality, config, folder, names)
        return cls(modality, config)

    @cached_property
    def _loaded(self) -> dict[int, Processor]:
        return {}

    def processor(self, max_length: int | None = None) -> Processor:
        """The processor; texts are cut at `max_length` tokens, and never have more than the model has positions.

        Without files of an image processor one is made from the config: `image_size`, pixels from -1 to 1.
        """
        if self.modality not in ("text", "image"):
            raise CheckpointError("a module of your own has no processor that is known here; process inputs yourself")
        length = max_length or DEFAULT_LENGTH
        if length not in self._loaded:
            with TemporaryDirectory(prefix="orthomerge-") as place:
                copy = Path(place)
                self.write(copy)
                self._loaded[length] = self._text(copy, length) if self.modality == "text" else self._image(copy)
        return self._loaded[length]

    def write(self, folder: Path) -> list[str]:
        """Copy the files into a folder; their names."""
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
        config, where = _nested(self.config, "text_config"), f"{self.folder or 'the live model'}"
        if self.live is None and self.folder is None:
            raise CheckpointError("there is no tokenizer beside the base or an expert; copy its files to the base")
        if not any(any(copy.glob(pattern)) for pattern in _VOCABULARIES):
            # transformers would make a tokenizer that knows no word.
            raise CheckpointError(
                f"{where} has no vocabulary (tokenizer.json, vocab.txt or a sentencepiece model); "
                "copy the tokenizer's files from the base"
            )
        named = {key: config[key] for key in ("model_type", "tokenizer_class") if key in config}
        tokenizer = _load("AutoTokenizer", copy, f"the tokenizer of {where}", named=named)
        if tokenizer.pad_token is None:
            raise CheckpointError(f"the tokenizer of {where} has no padding token, so that texts cannot share a batch")
        if tokenizer.padding_side != "right":  # else the first token, which many heads read, would be padding
            raise CheckpointError(
                f"the tokenizer of {where} pads texts on the {tokenizer.padding_side}, so that features would depend "
                "on the batch; set 'padding_side' to 'right' in its tokenizer_config.json"
            )
        rows = config.get("vocab_size")
        if isinstance(rows, int) and len(tokenizer) > rows:
            raise IncompatibleError(
                f"the tokenizer of {where} knows {len(tokenizer)} tokens, but its model has {rows}; it is another "
                "model's"
            )
        longest = min(max_length, tokenizer.model_max_length, _positions(config))
        if longest <= tokenizer.num_special_tokens_to_add():
            raise RecipeError(f"'max_length' must leave room for a text beside the special tokens, got {longest}")
        types = config.get("type_vocab_size")
        has_types = not config or (isinstance(types, int) and types > 1)
        segments = has_types and "token_type_ids" in tokenizer.model_input_names
        return TextProcessor(tokenizer, longest, segments, _digest_files(copy))

    def _image(self, copy: Path) -> ImageProcessor | PixelProcessor:
        config, where = _nested(self.config, "vision_config"), f"{self.folder or 'the model'}"
        channels = config.get("num_channels", 3)
        nested = (copy / _PROCESSOR).is_file() and "image_processor" in read_json(copy / _PROCESSOR)
        if nested or (copy / _PREPROCESSOR).is_file():
            # Pillow's resizing, not torchvision's: that one need not be installed, and gives other numbers.
            loaded = _load("AutoImageProcessor", copy, f"the image processor of {where}", use_fast=False)
            return ImageProcessor(loaded, channels, _digest_files(copy))
        size: Any = config.get("image_size")
        sides = size if isinstance(size, list) else [size, size]
        if len(sides) != 2 or not all(type(side) is int for side in sides):
            raise CheckpointError(
                f"{where} says nothing about its images: it needs {_PREPROCESSOR}, or a config with 'image_size'"
            )
        return PixelProcessor((sides[0], sides[1]) if isinstance(size, list) else sides[0], channels=channels)


def load_processor(folder: Path, *, modality: Modality, max_length: int = DEFAULT_LENGTH) -> Processor:
    """The processor that a model's folder holds."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return ProcessorSource.of([folder], modality, config).processor(max_length)


def companions(folder: Path) -> list[Path]:
    """Tokenizer and processor files of a folder; a link that leaves the folder is refused."""
    if not folder.is_dir():
        return []
    paths = [folder / name for name in COMPANIONS]
    return [_checked(path, folder) for path in paths if path.is_file() or path.is_symlink()]


def _content(path: Path, folder: Path, expected: str | None) -> bytes:
    """The bytes of a companion, which must be those that were written and must not ask for code of their own."""
    file = RawFile(_checked(path, folder))
    data = file.bytes(0, file.size)
    if expected is not None and not is_digest_of(data, expected):
        raise CheckpointError(f"{path} has changed since it was written; fetch the folder again, or merge again")
    if path.name.endswith("_config.json") and (code := parse_json(data, str(path)).get("auto_map")):
        raise CheckpointError(
            f"{path} asks to run code that came with it ('auto_map': {code!r:.80}), which is never done; if the stock "
            "class does the same, take 'auto_map' out of the file, else copy the files of one from the base"
        )
    return data


def _checked(path: Path, folder: Path) -> Path:
    contained(path, folder)
    if not path.is_file():
        raise CheckpointError(f"{path} is a link to nothing; fetch the file again, or remove the link")
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise CheckpointError(
            f"{path} is {size} bytes long; more than {_MOST_BYTES} is not believable for a file of a tokenizer or "
            "processor: fetch it again, or remove it"
        )
    return path


def _load(loader: str, folder: Path, what: str, *, named: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """What a class of transformers loads from a folder of ours; `named`: keys of the config that say which class."""
    with quiet():
        import transformers

        try:
            if named and "model_type" in named:
                options["config"] = transformers.AutoConfig.for_model(**named)
            load = getattr(transformers, loader).from_pretrained
            return load(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # of whatever class: each kind of tokenizer or processor has its own
            raise CheckpointError(f"transformers cannot load {what}: {error}") from error


def _positions(config: Mapping[str, Any]) -> int:
    """How many tokens a model has positions for; very many where positions are relative."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        return 1 << 30
    return positions - (config.get("pad_token_id", 1) + 1 if config.get("model_type") in _OFFSET else 0)


def _nested(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """A config with the keys of one of its towers, if it has towers."""
    inner = config.get(part)
    return {**config, **inner} if isinstance(inner, dict) else config


def _digest_files(folder: Path) -> str:
    return json_digest({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
